"""A task of several steps: what each of them is, whether it goes on, and what the whole is worth."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness
from opengyre.proto.task import TaskEnvironment, TaskSpec, TaskStep, TaskTests
from opengyre.proto.traj import Part
from opengyre.rollout import steps
from opengyre.tasks.rewards import over_steps
from opengyre.trajectory.score import score_of

TESTS = TaskTests(archive=b"x", timeout_s=7.0)


def task(count: int, **fields: object) -> TaskSpec:
    made = tuple(
        TaskStep(name=f"s{number}", instruction=f"do {number}", tests=TESTS, **fields.pop(f"step{number}", {}))  # type: ignore[arg-type]  # fields by keyword, checked at run time
        for number in range(count)
    )
    base = TaskSpec(task="t", instruction="all", environment=TaskEnvironment(image="i"), steps=made)
    return msgspec.structs.replace(base, **fields)


def dispatch(spec: TaskSpec) -> EpisodeDispatch:
    return EpisodeDispatch(
        run="r", group="g", execution="e", members=("e",), version=0, seed=1, task=spec, harness=Harness(),
        min_members=1,
    )  # fmt: skip


def said(**values: float) -> tuple[Part, ...]:
    return tuple(Part(name=name, weight=1 / len(values), value=value) for name, value in values.items())


def test_a_step_alone_has_its_instruction_its_tests_and_its_time() -> None:
    spec = task(2, step1={"time_budget_s": 5.0}, time_budget_s=9.0)
    first, second = steps.at(dispatch(spec), 0).task, steps.at(dispatch(spec), 1).task
    assert (first.instruction, first.tests, first.time_budget_s, first.steps) == ("do 0", TESTS, 9.0, ())
    assert (second.instruction, second.time_budget_s) == ("do 1", 5.0)
    plain = dispatch(TaskSpec(task="t", instruction="x"))
    assert steps.at(plain, 0) is plain


@pytest.mark.parametrize(
    ("least", "rewards", "reason", "on"),
    [
        (None, {"reward": 0.0}, "done", True),
        (1.0, {"reward": 1.0}, "turn_budget", True),
        (1.0, {"reward": 0.9}, "done", False),
        (0.5, {"a": 0.5, "b": 0.4}, "done", False),
        ({"a": 0.5}, {"a": 0.5, "b": 0.0}, "time_budget", True),
        ({"c": 0.0}, {"a": 0.5}, "done", False),
        (None, {"reward": 1.0}, "infra", False),
        (None, {"reward": 1.0}, "token_budget", False),
    ],
)
def test_the_next_step_begins_where_this_one_earned_enough(least, rewards, reason, on) -> None:
    spec = task(2, step0={"min_reward": least})
    assert steps.goes_on(spec, 0, said(**rewards), reason) is on
    assert not steps.goes_on(spec, 1, said(**rewards), reason)


def whole(spec: TaskSpec, values: list[float]) -> tuple[Part, ...]:
    found: tuple[Part, ...] = ()
    for number, value in enumerate(values):
        found = steps.parts(spec, number, found, said(reward=value), last=number == len(values) - 1)
    return found


def test_parts_name_their_step_and_those_that_were_not_reached_are_0() -> None:
    parts = whole(task(3), [1.0, 0.5])
    assert [(part.name, part.value) for part in parts] == [("s0.reward", 1.0), ("s1.reward", 0.5), ("s2.reward", 0.0)]
    assert score_of(parts) == 0.5
    final = whole(task(3, reward="final"), [1.0, 0.5])
    assert [part.weight for part in final] == [0.0, 0.0, 1.0]
    assert score_of(final) == 0.0
    assert score_of(whole(task(3, reward="final"), [0.0, 0.0, 0.75])) == 0.75


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.floats(0, 1), min_size=1, max_size=n))))
def test_the_score_is_what_the_check_of_the_task_says(case: tuple[int, list[float]]) -> None:
    """Law: for steps that name one reward, a run and `gyre task check` make the same of the same rewards."""
    count, values = case
    for strategy in ("mean", "final"):
        expected = over_steps([{"reward": value} for value in values], strategy, count)["reward"]
        found = score_of(whole(task(count, reward=strategy), values))
        assert found is not None
        assert math.isclose(found, expected, abs_tol=1e-12)
