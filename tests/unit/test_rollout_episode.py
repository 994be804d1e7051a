"""The states of an episode: every pair of phase and event, and that a log rebuilds what was lived."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness
from opengyre.proto.task import TaskEnvironment, TaskSpec, TaskStep, TaskTests
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
from opengyre.rollout.episode import (
    AgentEnded,
    Effect,
    Episode,
    EpisodeEvent,
    IllegalTransitionError,
    Phase,
    Released,
    advance,
    due,
    rebuild,
)

DISPATCH = EpisodeDispatch(
    run="r", group="r-g0", execution="r-g0-e0", members=("r-g0-e0",), version=0, seed=1,
    task=TaskSpec(task="t", instruction="do"), harness=Harness(), min_members=1,
)  # fmt: skip


def event(kind: type, index: int = 0, attempt: int = 0) -> EpisodeEvent:
    common: dict = {"run": "r", "group": "r-g0", "execution": "r-g0-e0", "index": index, "attempt": attempt}
    own: dict[type, dict] = {
        Started: {"dispatch": DISPATCH, "replica": "a"},
        TakenOver: {"replica": "b"},
        SandboxOpened: {"sandbox": "s", "node": "n", "isolated": True},
        Call: {
            "call": f"c{index}", "turn": index, "request_digest": str(index), "parent": None, "prefix_tokens": 0,
            "prompt_ids": (1,), "sampled_ids": (2, 3), "logprobs": (-1.0, -1.0), "versions": (), "temperature": 1.0,
            "finish_reason": "stop", "text": "x", "hosts": ("h",), "parked_s": 1.0, "duration_s": 3.0,
        },
        ToolResult: {
            "turn": index, "exec_id": "x", "command": "x", "exit_code": 0, "output": "", "output_bytes": 0,
            "timed_out": False, "duration_s": 0.5,
        },
        Stepped: {"name": "s"},
        Forked: {"turn": 1, "copies": 2, "snapshot": "s"},
        Suspended: {"turn": 0},
        Resumed: {"turn": 0, "waited_s": 1.0},
        Progressed: {"turn": index, "call": None, "parts": (), "duration_s": 0.25},
        Verified: {"parts": (), "reason": "done"},
        Ended: {"reason": "done", "turns": 1, "sampled_tokens": 2, "duration_s": 1.0, "members": ("r-g0-e0",)},
    }  # fmt: skip
    if kind is AgentEnded:
        return AgentEnded("turn_budget")
    if kind is Released:
        return Released()
    return kind(**common, **own[kind])


KINDS = (
    Started, TakenOver, SandboxOpened, Stepped, Forked, Call, ToolResult, Suspended, Resumed, Progressed, Verified,
    Ended, AgentEnded, Released,
)  # fmt: skip

ALLOWED: dict[Phase, dict[type, tuple[Phase, tuple[Effect, ...]]]] = {
    Phase.NEW: {Started: (Phase.OPENING, (Effect.OPEN_SANDBOX,))},
    Phase.OPENING: {
        SandboxOpened: (Phase.ACTING, (Effect.RUN_AGENT,)),
        TakenOver: (Phase.OPENING, (Effect.OPEN_SANDBOX,)),
        AgentEnded: (Phase.VERIFYING, (Effect.VERIFY,)),
        Verified: (Phase.ENDING, (Effect.CONCLUDE,)),
        Ended: (Phase.RELEASING, (Effect.RELEASE,)),  # given up
    },
    Phase.PREPARING: {
        TakenOver: (Phase.PREPARING, (Effect.PREPARE,)),
        SandboxOpened: (Phase.PREPARING, ()),  # made again
        Stepped: (Phase.ACTING, (Effect.RUN_AGENT,)),
        AgentEnded: (Phase.VERIFYING, (Effect.VERIFY,)),  # the step cannot begin
        Verified: (Phase.ENDING, (Effect.CONCLUDE,)),
        Ended: (Phase.RELEASING, (Effect.RELEASE,)),  # given up
    },
    Phase.ACTING: {
        Call: (Phase.ACTING, ()),
        ToolResult: (Phase.ACTING, ()),
        Suspended: (Phase.SUSPENDED, ()),
        Resumed: (Phase.ACTING, ()),
        TakenOver: (Phase.ACTING, (Effect.RUN_AGENT,)),
        SandboxOpened: (Phase.ACTING, ()),  # made again
        Progressed: (Phase.ACTING, ()),
        Forked: (Phase.FORKED, (Effect.RUN_LANES,)),
        AgentEnded: (Phase.VERIFYING, (Effect.VERIFY,)),
        Verified: (Phase.ENDING, (Effect.CONCLUDE,)),
        Ended: (Phase.RELEASING, (Effect.RELEASE,)),  # given up
    },
    Phase.SUSPENDED: {
        Call: (Phase.SUSPENDED, ()),
        ToolResult: (Phase.SUSPENDED, ()),
        Resumed: (Phase.ACTING, ()),
        TakenOver: (Phase.ACTING, (Effect.RUN_AGENT,)),
        Progressed: (Phase.SUSPENDED, ()),
        AgentEnded: (Phase.VERIFYING, (Effect.VERIFY,)),
        Verified: (Phase.ENDING, (Effect.CONCLUDE,)),
        Ended: (Phase.RELEASING, (Effect.RELEASE,)),  # given up
    },
    Phase.FORKED: {
        Call: (Phase.FORKED, ()),
        ToolResult: (Phase.FORKED, ()),
        Suspended: (Phase.FORKED, ()),
        Resumed: (Phase.FORKED, ()),
        TakenOver: (Phase.FORKED, (Effect.RUN_LANES,)),
        SandboxOpened: (Phase.FORKED, ()),  # of a lane
        Ended: (Phase.RELEASING, (Effect.RELEASE,)),  # given up
    },  # a verdict of no lane is none of it
    Phase.VERIFYING: {
        Call: (Phase.VERIFYING, ()),
        ToolResult: (Phase.VERIFYING, ()),
        Suspended: (Phase.VERIFYING, ()),
        Resumed: (Phase.VERIFYING, ()),
        Progressed: (Phase.VERIFYING, ()),
        SandboxOpened: (Phase.VERIFYING, ()),  # made again
        Verified: (Phase.ENDING, (Effect.CONCLUDE,)),
    },
    Phase.ENDING: {TakenOver: (Phase.ENDING, (Effect.CONCLUDE,)), Ended: (Phase.RELEASING, (Effect.RELEASE,))},
    Phase.RELEASING: {Released: (Phase.OVER, ())},
    Phase.OVER: {},
}


@pytest.mark.parametrize(("phase", "kind"), list(itertools.product(Phase, KINDS)))
def test_every_pair_of_phase_and_event(phase: Phase, kind: type) -> None:
    expected = ALLOWED[phase].get(kind)
    if expected is None:
        with pytest.raises(IllegalTransitionError, match=phase.value):
            advance(Episode(phase=phase), event(kind))
    else:
        after, effects = advance(Episode(phase=phase), event(kind))
        assert (after.phase, effects) == expected


def test_the_reason_outlives_its_writer() -> None:
    state = rebuild([event(Started), event(SandboxOpened), event(Verified)])  # type: ignore[list-item]  # events of the union, built or decoded
    assert (state.phase, state.reason) == (Phase.ENDING, "done")
    assert due(state) == (Effect.CONCLUDE,)


STEPS = msgspec.structs.replace(
    DISPATCH,
    task=TaskSpec(
        task="t",
        instruction="do",
        environment=TaskEnvironment(image="i"),
        steps=tuple(
            TaskStep(name=name, instruction=name, tests=TaskTests(archive=b"x"), min_reward=0.5)
            for name in ("a", "b", "c")
        ),
    ),
)


def test_a_task_of_steps_prepares_each_of_them_and_counts_for_each_alone() -> None:
    began = msgspec.structs.replace(event(Started), dispatch=STEPS)  # type: ignore[type-var]  # an event, of the union
    state = rebuild([began, event(SandboxOpened)])  # type: ignore[list-item]  # events of the union, built or decoded
    assert (state.phase, due(state), state.step) == (Phase.PREPARING, (Effect.PREPARE,), 0)
    state = rebuild([began, event(SandboxOpened), event(Stepped), event(Call, 3)])  # type: ignore[list-item]  # as above
    assert (state.phase, state.begun.calls, state.calls) == (Phase.ACTING, 0, 1)
    parts = (Part(name="a.reward", weight=0.5, value=1.0),)
    on = msgspec.structs.replace(event(Verified, 4), goes_on=True, parts=parts)  # type: ignore[type-var]  # as above
    state, effects = advance(state, on)
    assert (state.phase, effects, state.step, state.parts, state.reason) == (
        Phase.PREPARING, (Effect.PREPARE,), 1, parts, None,
    )  # fmt: skip
    state, _ = advance(state, event(Stepped, 5))
    assert (state.begun.calls, state.begun.active_s, state.begun.parked_s) == (1, 2.0, 1.0)
    program = msgspec.structs.replace(event(ToolResult, 6), turn=PROGRAM, duration_s=4.0)  # type: ignore[type-var]  # as above
    # The calls of the step before are not in this program's time, nor is their parking.
    assert advance(state, program)[0].active_s == 6.0


def verdict(index: int, lane: int, reason: EndReason) -> Verified:
    return Verified(
        run="r", group="r-g0", execution="r-g0-e0", index=index, attempt=0, parts=(), reason=reason, lane=lane
    )


@pytest.mark.parametrize(
    ("reasons", "reason"),
    [(("done", "done"), "done"), (("infra", "turn_budget"), "turn_budget"), (("infra", "infra"), "infra")],
)
def test_lanes_end_with_the_last_verdict(reasons: tuple[EndReason, EndReason], reason: EndReason) -> None:
    state = rebuild([event(Started), event(SandboxOpened), event(Forked)])  # type: ignore[list-item]  # events of the union, built or decoded
    assert due(state) == (Effect.RUN_LANES,)
    state, effects = advance(state, verdict(3, 1, reasons[1]))
    assert (state.phase, effects) == (Phase.FORKED, ())
    state, effects = advance(state, verdict(4, 0, reasons[0]))
    assert (state.phase, state.reason, effects) == (Phase.ENDING, reason, (Effect.CONCLUDE,))
    assert state.detail == f"lane 0 {reasons[0]}, lane 1 {reasons[1]}"


def test_lanes_side_by_side_take_the_time_of_one() -> None:
    calls = [msgspec.structs.replace(event(Call, 3 + lane), lane=lane) for lane in range(2)]  # type: ignore[type-var]  # a call, of the union
    state = rebuild([event(Started), event(SandboxOpened), event(Forked), *calls])  # type: ignore[list-item]  # events of the union, built or decoded
    assert (state.calls, state.active_s) == (2, 2.0)


def test_parking_is_not_active_time() -> None:
    state = rebuild([event(Started), event(SandboxOpened), event(Call), event(ToolResult)])  # type: ignore[list-item]  # events of the union, built or decoded
    assert state.active_s == 2.5
    assert state.parked_s == 1.0
    assert (state.calls, state.sampled_tokens) == (1, 2)


def test_measuring_progress_is_not_active_time() -> None:
    """A program waits for it within its own run, which is longer by that."""
    begun = [event(Started), event(SandboxOpened), event(Progressed), event(Call, 3)]
    state = rebuild(begun)  # type: ignore[arg-type]  # events of the union, built or decoded
    assert (state.measured_at, state.measured_s, state.active_s) == (0, 0.25, 2.0)
    program = ToolResult(
        run="r", group="r-g0", execution="r-g0-e0", index=4, attempt=0, turn=PROGRAM, exec_id="x", command="x",
        exit_code=0, output="", output_bytes=0, timed_out=False, duration_s=10.0,
    )  # fmt: skip
    assert advance(state, program)[0].active_s == 10.0 - state.parked_s - 0.25


@given(st.lists(st.sampled_from(KINDS), max_size=40))
def test_a_log_rebuilds_what_was_lived(kinds: list[type]) -> None:
    """Law: at any moment, the fold of the stored events differs from the live state by what is not stored only."""
    live, log = Episode(), list[AnyTrajEvent]()
    for kind in kinds:
        happening = event(kind, len(log), live.attempt + (kind is TakenOver))
        try:
            live, _ = advance(live, happening)
        except IllegalTransitionError:
            continue
        if isinstance(happening, AgentEnded | Released):
            return  # the agent ends again by itself; what follows is tested above
        log.append(happening)
        assert rebuild(log) == live
        assert live.events == len(log)
