"""The states of an episode, as a fold over its log. Pure.

    NEW --Started--> OPENING --SandboxOpened--> ACTING <--Suspended/Resumed--> SUSPENDED
                        |                        |  | AgentEnded                   | AgentEnded
                        | AgentEnded      Forked |  v                              |
                        +----------------------- | -+-> VERIFYING <----------------+
                                                 v         | Verified
                                               FORKED ---> ENDING --Ended--> RELEASING --Released--> OVER
                                                 Verified, of the last lane

Of a task of several steps, SandboxOpened leads to PREPARING, and so does Verified after which it goes on; from there
Stepped leads to ACTING, and AgentEnded, where the step cannot begin, to VERIFYING.

A synthetic execution goes from NEW to ACTING. `Ended` also comes from any phase before ENDING: the execution was given
up, and goes to RELEASING. A sandbox that was lost and made again, and a measurement of progress, change no phase.

The same `advance` rebuilds the state from a log and drives a live episode, so that a writer that takes over stands
where the former one stood. `AgentEnded` and `Released` are not in the log: a writer that takes over before `Verified`
runs the agent again from its recorded turns, and the agent ends again by itself.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import (
    PROGRAM,
    AnyTrajEvent,
    Call,
    Ended,
    EndReason,
    Forked,
    Part,
    Progressed,
    Resumed,
    SandboxOpened,
    Started,
    Stepped,
    Suspended,
    TakenOver,
    ToolResult,
    Verified,
)
from opengyre.rollout.steps import Begun


class Phase(enum.Enum):
    """Where an episode is."""

    NEW = "new"
    OPENING = "opening"
    PREPARING = "preparing"
    ACTING = "acting"
    SUSPENDED = "suspended"
    FORKED = "forked"
    VERIFYING = "verifying"
    ENDING = "ending"
    RELEASING = "releasing"
    OVER = "over"


class Effect(enum.Enum):
    """What has to be done next."""

    OPEN_SANDBOX = "open_sandbox"
    PREPARE = "prepare"
    RUN_AGENT = "run_agent"
    RUN_LANES = "run_lanes"
    VERIFY = "verify"
    CONCLUDE = "conclude"
    RELEASE = "release"


@dataclass(frozen=True)
class AgentEnded:
    """The agent is done, was stopped by a budget, or cannot go on."""

    reason: EndReason
    detail: str | None = None
    unjudged: bool = False
    """Not by its own doing: there is nothing to be judged."""


@dataclass(frozen=True)
class Released:
    """The sandbox is gone."""


EpisodeEvent = AnyTrajEvent | AgentEnded | Released


class IllegalTransitionError(ValueError):
    """An event that cannot happen in this phase: the log is not one of ours."""


@dataclass(frozen=True)
class Episode:
    """All that is known of an episode, but its turns."""

    phase: Phase = Phase.NEW
    dispatch: EpisodeDispatch | None = None
    attempt: int = 0
    events: int = 0
    """Length of its log."""
    sandbox: SandboxOpened | None = None
    calls: int = 0
    sampled_tokens: int = 0
    active_s: float = 0.0
    """Spent in calls and commands, without parking: what counts against the time budget after a change of writers."""
    parked_s: float = 0.0
    measured_at: int | None = None
    """Calls that were recorded when progress was last measured. None: it never was."""
    measured_s: float = 0.0
    """What measuring took: the agent waited for it, and does not pay."""
    reason: EndReason | None = None
    detail: str | None = None
    unjudged: bool = False
    """The agent's end leaves nothing to be judged."""
    step: int = 0
    """Of a task of several, the one that it is at."""
    begun: Begun = field(default_factory=Begun)
    """Of that step."""
    parts: tuple[Part, ...] = ()
    """Of the steps before."""
    forked: Forked | None = None
    lanes: tuple[SandboxOpened | None, ...] = ()
    """Of each lane, its sandbox."""
    verdicts: tuple[Verified | None, ...] = ()
    """Of each lane."""


_DUE: dict[Phase, tuple[Effect, ...]] = {
    Phase.OPENING: (Effect.OPEN_SANDBOX,),
    Phase.PREPARING: (Effect.PREPARE,),
    Phase.ACTING: (Effect.RUN_AGENT,),
    Phase.SUSPENDED: (Effect.RUN_AGENT,),
    Phase.FORKED: (Effect.RUN_LANES,),
    Phase.VERIFYING: (Effect.VERIFY,),
    Phase.ENDING: (Effect.CONCLUDE,),
    Phase.RELEASING: (Effect.RELEASE,),
}


def due(state: Episode) -> tuple[Effect, ...]:
    """What a writer that begins in this state has to do."""
    return _DUE.get(state.phase, ())


def _started(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Started)
    # A synthetic agent has nothing to run in a sandbox, so none is opened.
    sandboxed = event.dispatch.harness.agent != "synthetic"
    return replace(state, dispatch=event.dispatch, phase=Phase.OPENING if sandboxed else Phase.ACTING)


def _opened(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, SandboxOpened)
    steps = state.dispatch is not None and state.dispatch.task.steps
    return replace(state, sandbox=event, phase=Phase.PREPARING if steps else Phase.ACTING)


def _reopened(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, SandboxOpened)
    return replace(state, sandbox=event)


def _forked(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Forked)
    none = (None,) * event.copies
    return replace(state, phase=Phase.FORKED, forked=event, lanes=none, verdicts=none)


def _lane_opened(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, SandboxOpened)
    if event.lane is None:
        return _reopened(state, event)
    return replace(state, lanes=(*state.lanes[: event.lane], event, *state.lanes[event.lane + 1 :]))


def _lane_verified(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Verified)
    if event.lane is None:
        raise IllegalTransitionError(f"an episode that is {state.phase.value} is verified lane by lane")
    verdicts = (*state.verdicts[: event.lane], event, *state.verdicts[event.lane + 1 :])
    whole = [verdict for verdict in verdicts if verdict is not None]
    if len(whole) < len(verdicts):
        return replace(state, verdicts=verdicts)
    reasons = [verdict.reason or "agent_error" for verdict in whole]
    # An execution is ours to answer for only if nothing of it is left.
    reason = next((reason for reason in reasons if reason != "infra"), "infra")
    told = ", ".join(f"lane {lane} {reason}" for lane, reason in enumerate(reasons))
    return replace(state, phase=Phase.ENDING, verdicts=verdicts, reason=reason, detail=told)


def _stepped(state: Episode, _event: EpisodeEvent) -> Episode:
    begun = Begun(state.calls, state.active_s, state.parked_s, state.measured_s)
    return replace(state, phase=Phase.ACTING, begun=begun)


def _progressed(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Progressed)
    return replace(state, measured_at=event.turn, measured_s=state.measured_s + event.duration_s)


def _share(state: Episode, event: Call | ToolResult) -> float:
    """Of the time of what happened, how much counts: lanes work side by side."""
    return 1.0 if event.lane is None else 1.0 / max(1, len(state.lanes))


def _called(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Call)
    return replace(
        state,
        calls=state.calls + 1,
        sampled_tokens=state.sampled_tokens + len(event.sampled_ids),
        active_s=state.active_s + _share(state, event) * max(0.0, event.duration_s - event.parked_s),
        parked_s=state.parked_s + event.parked_s,
    )


def _ran(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, ToolResult)
    if event.turn == PROGRAM:  # The calls' times are in its own.
        begun = state.begun
        own_s = event.duration_s - (state.parked_s - begun.parked_s) - (state.measured_s - begun.measured_s)
        return replace(state, active_s=max(state.active_s, begun.active_s + own_s))
    return replace(state, active_s=state.active_s + _share(state, event) * event.duration_s)


def _suspended(state: Episode, _event: EpisodeEvent) -> Episode:
    return replace(state, phase=Phase.SUSPENDED)


def _acting(state: Episode, _event: EpisodeEvent) -> Episode:
    return replace(state, phase=Phase.ACTING)


def _agent_ended(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, AgentEnded)
    return replace(state, phase=Phase.VERIFYING, reason=event.reason, detail=event.detail, unjudged=event.unjudged)


def _verified(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Verified)
    if event.goes_on:
        return replace(state, phase=Phase.PREPARING, step=state.step + 1, parts=event.parts, reason=None, detail=None)
    return replace(state, phase=Phase.ENDING, reason=event.reason or state.reason, detail=event.detail or state.detail)


def _ended(state: Episode, event: EpisodeEvent) -> Episode:
    assert isinstance(event, Ended)
    return replace(state, phase=Phase.RELEASING, reason=event.reason, detail=event.detail)


def _over(state: Episode, _event: EpisodeEvent) -> Episode:
    return replace(state, phase=Phase.OVER)


def _same(state: Episode, _event: EpisodeEvent) -> Episode:
    return state


_TABLE: dict[tuple[Phase, type], Callable[[Episode, EpisodeEvent], Episode]] = {
    (Phase.NEW, Started): _started,
    (Phase.OPENING, SandboxOpened): _opened,
    (Phase.OPENING, TakenOver): _same,
    (Phase.OPENING, AgentEnded): _agent_ended,
    (Phase.OPENING, Verified): _verified,
    (Phase.OPENING, Ended): _ended,
    (Phase.PREPARING, TakenOver): _same,
    (Phase.PREPARING, SandboxOpened): _reopened,
    (Phase.PREPARING, Stepped): _stepped,
    (Phase.PREPARING, AgentEnded): _agent_ended,
    (Phase.PREPARING, Verified): _verified,
    (Phase.PREPARING, Ended): _ended,
    (Phase.ACTING, Call): _called,
    (Phase.ACTING, ToolResult): _ran,
    (Phase.ACTING, Suspended): _suspended,
    (Phase.ACTING, Resumed): _same,
    (Phase.ACTING, TakenOver): _same,
    (Phase.ACTING, SandboxOpened): _reopened,
    (Phase.ACTING, Progressed): _progressed,
    (Phase.ACTING, Forked): _forked,
    (Phase.ACTING, AgentEnded): _agent_ended,
    (Phase.ACTING, Verified): _verified,
    (Phase.ACTING, Ended): _ended,
    # Other calls and commands of the same agent go on while one call is parked.
    (Phase.SUSPENDED, Call): _called,
    (Phase.SUSPENDED, ToolResult): _ran,
    (Phase.SUSPENDED, Resumed): _acting,
    # What was parked is asked for again by the new writer.
    (Phase.SUSPENDED, TakenOver): _acting,
    (Phase.SUSPENDED, Progressed): _progressed,
    (Phase.SUSPENDED, AgentEnded): _agent_ended,
    (Phase.SUSPENDED, Verified): _verified,
    (Phase.SUSPENDED, Ended): _ended,
    (Phase.FORKED, Call): _called,
    (Phase.FORKED, ToolResult): _ran,
    (Phase.FORKED, Suspended): _same,
    (Phase.FORKED, Resumed): _same,
    (Phase.FORKED, TakenOver): _same,
    (Phase.FORKED, SandboxOpened): _lane_opened,
    (Phase.FORKED, Verified): _lane_verified,
    (Phase.FORKED, Ended): _ended,
    # What was being stored when the agent was stopped.
    (Phase.VERIFYING, Call): _called,
    (Phase.VERIFYING, ToolResult): _ran,
    (Phase.VERIFYING, Suspended): _same,
    (Phase.VERIFYING, Resumed): _same,
    (Phase.VERIFYING, Progressed): _progressed,
    (Phase.VERIFYING, SandboxOpened): _reopened,
    (Phase.VERIFYING, Verified): _verified,
    (Phase.ENDING, TakenOver): _same,
    (Phase.ENDING, Ended): _ended,
    (Phase.RELEASING, Released): _over,
}

_ENTERED = {Phase.ACTING: {Phase.ACTING, Phase.SUSPENDED}, Phase.SUSPENDED: {Phase.ACTING, Phase.SUSPENDED}}
"""Phases that are entered anew only from others than these: the agent that runs goes on."""


def advance(state: Episode, event: EpisodeEvent) -> tuple[Episode, tuple[Effect, ...]]:
    """The next state and what to do; raises `IllegalTransitionError`."""
    step = _TABLE.get((state.phase, type(event)))
    if step is None:
        raise IllegalTransitionError(f"an episode that is {state.phase.value} cannot meet {type(event).__name__}")
    after = step(state, event)
    if not isinstance(event, AgentEnded | Released):
        after = replace(after, events=state.events + 1, attempt=event.attempt)
    begins = isinstance(event, TakenOver) or (
        after.phase is not state.phase and state.phase not in _ENTERED.get(after.phase, ())
    )
    return after, due(after) if begins else ()


def rebuild(log: Iterable[AnyTrajEvent]) -> Episode:
    """The state after a log, in order."""
    state = Episode()
    for event in log:
        state, _ = advance(state, event)
    return state
