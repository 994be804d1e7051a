"""A task of several steps, as its execution goes through it. Pure.

Each step is a conversation of its own in the same sandbox, with budgets of its own, and is judged by itself. An
execution ends after the last step, after one that earned too little, and where nothing further can be sampled or
judged. Its score is made of the steps' parts: with `reward = "mean"` each step has the same share, and what was not
reached is 0; with `final` the last step has all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.task import TaskSpec, TaskStep
from opengyre.proto.traj import EndReason, Part
from opengyre.tasks.rewards import NAME, enough

LAST: frozenset[EndReason] = frozenset(("infra", "token_budget"))
"""Ends of an agent after which no other one could do anything."""


@dataclass(frozen=True)
class Begun:
    """Where the log stood when a step began."""

    calls: int = 0
    active_s: float = 0.0
    parked_s: float = 0.0
    measured_s: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Where an execution of a task of several steps is."""

    dispatch: EpisodeDispatch
    """Of the whole task."""
    step: int
    calls: int
    """Made before the step."""
    parts: tuple[Part, ...]
    """Of the steps before."""
    prepared: bool
    """What comes with the step is in the sandbox."""

    @property
    def now(self) -> TaskStep:
        return self.dispatch.task.steps[self.step]


def at(dispatch: EpisodeDispatch, step: int) -> EpisodeDispatch:
    """The dispatch as one of a task that is this step alone; itself where the task has no steps."""
    task = dispatch.task
    if not task.steps:
        return dispatch
    now = task.steps[step]
    alone = msgspec.structs.replace(
        task,
        instruction=now.instruction,
        tests=now.tests,
        steps=(),
        time_budget_s=now.time_budget_s if now.time_budget_s is not None else task.time_budget_s,
    )
    return msgspec.structs.replace(dispatch, task=alone)


def line_of(execution: str, step: int) -> str:
    """Begins the ids of what is done in a step, which are no other step's."""
    return execution if step == 0 else f"{execution}-s{step}"


def goes_on(task: TaskSpec, step: int, said: Sequence[Part], reason: EndReason) -> bool:
    """Whether the next step begins after one that was judged so, whose agent ended for this reason."""
    rewards = {part.name: part.value for part in said}
    return step + 1 < len(task.steps) and reason not in LAST and enough(rewards, task.steps[step].min_reward)


def parts(task: TaskSpec, step: int, before: Sequence[Part], said: Sequence[Part], *, last: bool) -> tuple[Part, ...]:
    """The parts of the score so far: those of the steps before, as they were stored, and of this one. ``last``: with
    those that are not reached any more."""
    found = [*before, *(_shared(task, step, part) for part in said)]
    if last:
        found += [
            Part(name=f"{task.steps[missed].name}.{NAME}", weight=_share(task, missed), value=0.0, output="not reached")
            for missed in range(step + 1, len(task.steps))
        ]
    return tuple(found)


def _shared(task: TaskSpec, step: int, part: Part) -> Part:
    now: TaskStep = task.steps[step]
    return msgspec.structs.replace(part, name=f"{now.name}.{part.name}", weight=part.weight * _share(task, step))


def _share(task: TaskSpec, step: int) -> float:
    if task.reward == "final":
        return 1.0 if step == len(task.steps) - 1 else 0.0
    return 1 / len(task.steps)
