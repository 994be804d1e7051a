"""The shell agent's decisions. Pure.

It says one command a turn and sees what the command printed, until it says `done` or a budget ends it. What it does
next is a function of its turns so far, so that it goes on from a log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import ExecResult
from opengyre.rollout import transcript
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.messages import answer

DONE = "done"
"""What the agent says instead of a command when it thinks that the task is solved."""


@dataclass(frozen=True)
class Step:
    """A turn as the agent knows it: what was said, and what it saw (None: not yet run)."""

    command: str
    observation: str | None


@dataclass(frozen=True)
class Ask:
    """Call the model."""

    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Continue:
    """Have the model go on with a text, to the stop string."""

    text: str
    stop: str


@dataclass(frozen=True)
class Execute:
    turn: int
    command: str


@dataclass(frozen=True)
class Part:
    """Go on as several lanes."""


Next = Ask | Continue | Execute | Part | AgentEnded


def turn_budget(dispatch: EpisodeDispatch) -> int:
    return dispatch.task.max_turns if dispatch.task.max_turns is not None else dispatch.harness.max_turns


def most_calls(dispatch: EpisodeDispatch) -> int:
    """Calls that an execution may make, those of all its lanes together."""
    turns, branching = turn_budget(dispatch), dispatch.harness.branching
    if branching is None or turns <= branching.turn:
        return turns
    return branching.turn + branching.copies * (turns - branching.turn)


def time_budget_s(dispatch: EpisodeDispatch) -> float:
    own = dispatch.task.time_budget_s
    return own if own is not None else dispatch.harness.time_budget_s


def messages(dispatch: EpisodeDispatch, steps: Sequence[Step]) -> tuple[dict[str, Any], ...]:
    """The conversation so far."""
    talk: list[dict[str, Any]] = []
    if dispatch.harness.system is not None:
        talk.append({"role": "system", "content": dispatch.harness.system})
    talk.append({"role": "user", "content": dispatch.task.instruction})
    for step in steps:
        talk.append(answer(step.command))
        if step.observation is not None:
            talk.append({"role": "tool", "content": step.observation})
    return tuple(talk)


def decide(dispatch: EpisodeDispatch, steps: Sequence[Step], lane: int | None = None) -> Next:
    """What the agent does next; `lane` is None on the trunk, which goes on as lanes where that is asked for."""
    if steps and steps[-1].command.strip() == DONE:
        return AgentEnded("done")
    if steps and steps[-1].observation is None:
        return Execute(len(steps) - 1, steps[-1].command.strip())
    if len(steps) >= turn_budget(dispatch):
        return AgentEnded("turn_budget")
    branching = dispatch.harness.branching
    if branching is not None and lane is None and len(steps) == branching.turn:
        return Part()
    if dispatch.harness.prompt == "transcript":
        begin = transcript.begin(dispatch.harness.system, dispatch.harness.shots, dispatch.task.instruction)
        said = [(step.command, step.observation) for step in steps]
        return Continue(begin + transcript.after(said), transcript.STOP)
    return Ask(messages(dispatch, steps))


def observation(result: ExecResult, limit: int) -> str:
    """What the agent sees of a command: what it printed, cut to `limit` characters."""
    printed = "\n".join(part for part in (result.stdout.strip(), result.stderr.strip()) if part)
    if result.timed_out:
        printed = f"timed out\n{printed}".strip()
    return printed[:limit]
