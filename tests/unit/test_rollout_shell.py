"""The shell agent's decisions, an execution's seeds, and the time budget."""

import asyncio
from typing import Any

import msgspec
import pytest

from opengyre.proto.examples import DISPATCH
from opengyre.proto.run import (
    Branching,
    Harness,
    InvalidRunError,
    Optimization,
    RunSpec,
    Sampling,
    Scoring,
    validate,
)
from opengyre.proto.sandbox import ExecResult
from opengyre.rollout.budget import BudgetSpentError, TimeBudget
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.recorder import call_seed
from opengyre.rollout.shell import (
    Ask,
    Execute,
    Part,
    Step,
    decide,
    most_calls,
    observation,
    time_budget_s,
    turn_budget,
)

HARNESS = msgspec.structs.replace(DISPATCH.harness, max_turns=2, system="be brief", time_budget_s=9.0)
TASK = msgspec.structs.replace(DISPATCH.task, instruction="do it", max_turns=None, time_budget_s=None)
EPISODE = msgspec.structs.replace(DISPATCH, harness=HARNESS, task=TASK)


def test_the_agent_asks_runs_and_ends() -> None:
    talk: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "do it"}]
    assert decide(EPISODE, []) == Ask(tuple(talk))
    assert decide(EPISODE, [Step("ls", None)]) == Execute(0, "ls")
    talk += [{"role": "assistant", "content": "ls"}, {"role": "tool", "content": "a"}]
    assert decide(EPISODE, [Step("ls", "a")]) == Ask(tuple(talk))
    assert decide(EPISODE, [Step("ls", "a"), Step("cat a", None)]) == Execute(1, "cat a")
    assert decide(EPISODE, [Step("ls", "a"), Step("cat a", "")]) == AgentEnded("turn_budget")
    assert decide(EPISODE, [Step(" done\n", None)]) == AgentEnded("done")


def test_a_tasks_budgets_come_before_the_runs() -> None:
    own = msgspec.structs.replace(EPISODE, task=msgspec.structs.replace(TASK, max_turns=7, time_budget_s=1.5))
    assert (turn_budget(EPISODE), time_budget_s(EPISODE)) == (2, 9.0)
    assert (turn_budget(own), time_budget_s(own)) == (7, 1.5)


@pytest.mark.parametrize(
    ("stdout", "stderr", "timed_out", "seen"),
    [
        ("one\n", "", False, "one"),
        ("", "no such file\n", False, "no such file"),
        ("one\n", "two\n", False, "one\ntwo"),
        ("x" * 50, "", False, "x" * 20),
        ("half", "", True, "timed out\nhalf"),
        ("", "", False, ""),
    ],
)
def test_what_the_agent_sees_of_a_command(stdout: str, stderr: str, timed_out: bool, seen: str) -> None:
    result = ExecResult(
        exec_id="x", exit_code=0, stdout=stdout, stderr=stderr, stdout_bytes=0, stderr_bytes=0,
        stdout_truncated=False, stderr_truncated=False, timed_out=timed_out, duration_s=0.0, isolated=True,
    )  # fmt: skip
    assert observation(result, 20) == seen


def test_seeds_differ_by_call_and_fit_63_bits() -> None:
    seeds = {call_seed(execution, number) for execution in range(50) for number in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert call_seed(1, 2) == 3719260088301377541


async def test_a_spent_budget_ends_its_block() -> None:
    budget = TimeBudget(0.02)
    with pytest.raises(BudgetSpentError):
        async with budget.limit():
            await asyncio.Event().wait()
    assert 0.02 <= budget.spent_s < 60.0


async def test_what_former_writers_spent_counts() -> None:
    with pytest.raises(BudgetSpentError):
        async with TimeBudget(100.0, 100.5).limit():
            await asyncio.Event().wait()


async def test_paused_time_does_not_count_and_pauses_nest() -> None:
    budget = TimeBudget(0.3)

    async def paused_for_longer_than_the_budget() -> None:
        async with budget.limit():
            budget.pause()
            budget.pause()
            await asyncio.sleep(0.4)
            budget.resume()
            await asyncio.sleep(0.4)
            assert budget.spent_s < 0.3
            budget.resume()
            await asyncio.Event().wait()

    with pytest.raises(BudgetSpentError):
        await paused_for_longer_than_the_budget()


async def test_a_timeout_of_the_block_itself_is_not_the_budgets() -> None:
    with pytest.raises(TimeoutError, match="mine"):
        async with TimeBudget(5.0).limit():
            raise TimeoutError("mine")


def test_the_trunk_parts_where_the_run_says_and_lanes_go_on() -> None:
    forked = msgspec.structs.replace(
        EPISODE, harness=msgspec.structs.replace(HARNESS, max_turns=5, branching=Branching(turn=1, copies=3))
    )
    step = Step("ls", "a")
    assert isinstance(decide(forked, []), Ask)
    assert decide(forked, [Step("ls", None)]) == Execute(0, "ls")
    assert decide(forked, [step]) == Part()
    assert isinstance(decide(forked, [step], lane=0), Ask)
    assert decide(forked, [step] * 5, lane=2) == AgentEnded("turn_budget")
    assert decide(forked, [Step("done", None)]) == AgentEnded("done")
    assert most_calls(forked) == 1 + 3 * 4
    assert most_calls(EPISODE) == 2
    short = msgspec.structs.replace(forked, task=msgspec.structs.replace(TASK, max_turns=1))
    assert (decide(short, [step]), most_calls(short)) == (AgentEnded("turn_budget"), 1)


@pytest.mark.parametrize(
    ("harness", "more", "said"),
    [
        ({"branching": Branching(turn=0)}, {}, r"harness.branching.turn is 0; allowed are values from 1 to 3"),
        ({"branching": Branching(turn=4)}, {}, r"harness.branching.turn is 4; allowed are values from 1 to 3"),
        ({"branching": Branching(turn=1, copies=17)}, {}, r"copies is 17; allowed are values from 2 to 16"),
        ({"branching": Branching(turn=1), "agent": "program", "program": "x"}, {}, r"allowed is shell"),
        ({"branching": Branching(turn=1)}, {"scoring": Scoring(progress_every=1)}, r"leave out one of them"),
        ({"branching": Branching(turn=1)}, {"optimization": Optimization(loss="sequence")}, r"loss is sequence beside"),
        (
            {"branching": Branching(turn=1, copies=3)},
            {"sampling": Sampling(j_max=2)},
            r"sampling.j_max is 2 .* allowed are values from 3, or none",
        ),
    ],
)
def test_branching_that_cannot_be_is_refused_by_name(harness: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRunError, match=said):
        validate(RunSpec(run="r", model="/m", harness=Harness(**harness), **more))


def test_branching_with_room_for_each_lane_is_taken() -> None:
    spec = RunSpec(run="r", model="/m", harness=Harness(branching=Branching(turn=3)), sampling=Sampling(j_max=2))
    assert validate(spec) == spec


def test_a_loss_of_whole_sequences_does_not_go_with_credit_by_turns() -> None:
    """Its gradient spreads over the path what one turn is credited with."""
    credit, loss = Scoring(credit="progress", progress_every=1), Optimization(loss="sequence")
    spec = RunSpec(run="r", model="/m", scoring=credit, optimization=loss)
    with pytest.raises(InvalidRunError, match=r"credit is progress; .*allowed are clip, truncated and reinforce"):
        validate(spec)
