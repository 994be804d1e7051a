"""A drain of every serving host at once suspends the episodes; a resume continues them where they were."""

from pathlib import Path

import pytest

from opengyre.proto import sandbox as proto
from opengyre.proto import subjects
from opengyre.proto.sandbox import SandboxInfo, StatRequest, WriteRequest, WriteResult
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Resumed, SandboxOpened, Suspended, ToolResult, Verified
from opengyre.shared.bus import call, read
from support.stack import Whole, small_run, whole

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.sandbox, pytest.mark.timeout(900)]
CHECKS = (
    Check(name="untouched", command="test ! -e /workspace/tampered", weight=0.75),
    Check(name="marked", command="test -e /workspace/tampered", weight=0.25),
)


def task(name: str) -> TaskSpec:
    """Nobody fails it by chance: only who writes `tampered` changes its score."""
    return TaskSpec(task=name, instruction="Write anything.", checks=CHECKS, purpose="evaluate")


async def log_of(stack: Whole, execution: str) -> list[object]:
    group = execution.rpartition("-")[0]
    stored = await read(stack.bus, subjects.TRAJ, f"{subjects.PREFIX}.traj.demo.{group}.{execution}.>")
    return [message.event() for message in stored]


async def submit(stack: Whole, names: list[str]) -> None:
    await stack.api.post("/v1/tasks", {"run": "demo", "tasks": [task(name) for name in names]})


async def suspend(stack: Whole, names: list[str]) -> set[str]:
    """Submit tasks and drain every host at once, until some of their episodes wait for one; those."""
    await stack.api.post("/v1/cells/host0/drain", None)
    await stack.api.post("/v1/cells/host1/drain", None)
    serving = {"rollout", "joining", "draining"}
    assert await stack.wait(lambda: not serving & set(stack.driver.shown.cells.values()), 120), stack.driver.shown.cells
    await submit(stack, names)
    facts = stack.driver.facts
    assert await stack.wait(lambda: len(facts.suspended) >= len(names), 120), stack.driver.shown
    return set(facts.suspended)


async def resume(stack: Whole) -> None:
    await stack.api.post("/v1/cells/host0/resume", None)
    await stack.api.post("/v1/cells/host1/resume", None)


async def test_a_drain_of_every_host_suspends_and_a_resume_continues_in_the_same_sandbox(
    tmp_path: Path, policy: Path
) -> None:
    async with whole(tmp_path / "state", small_run(policy, 1000), hosts=2) as stack:
        facts = stack.driver.facts
        assert await stack.wait(lambda: "rollout" in stack.driver.shown.cells.values(), 120), stack.driver.shown.cells
        # Many, so that the drain finds some in the middle of their turns.
        names = [f"task_{i:03d}" for i in range(60)]
        await submit(stack, names)
        assert await stack.wait(lambda: len(facts.ended) >= 2 and len(facts.live) >= 8, 120), stack.driver.shown
        before: dict[str, list[object]] = {}
        for _ in range(4):  # until a drain finds some in the middle of their turns
            await stack.api.post("/v1/cells/host0/drain", None)
            await stack.api.post("/v1/cells/host1/drain", None)
            assert await stack.wait(lambda: len(facts.suspended) >= 4, 120), stack.driver.shown
            suspended = set(facts.suspended)
            before = {execution: await log_of(stack, execution) for execution in suspended}
            if any(isinstance(event, Call) for log in before.values() for event in log):
                break
            await resume(stack)
            ended = len(facts.ended)
            assert await stack.wait(lambda e=ended: len(facts.ended) > e, 120), stack.driver.shown
        suspended = set(before)
        assert any(isinstance(event, Call) for log in before.values() for event in log)  # some are under way
        boxes = {
            execution: next(event for event in log if isinstance(event, SandboxOpened))
            for execution, log in before.items()
        }
        for box in boxes.values():  # alive, its lease kept
            info = await call(
                stack.bus, proto.SERVICE, box.node, "stat", StatRequest(sandbox=box.sandbox), SandboxInfo, timeout_s=5
            )
            assert info.expires_in_s > 0

        await resume(stack)
        assert await stack.wait(lambda: len(facts.ended) >= len(names), 300), stack.driver.shown
        for execution in suspended:
            log = await log_of(stack, execution)
            assert log[: len(before[execution])] == before[execution]
            assert [event for event in log if isinstance(event, SandboxOpened)] == [boxes[execution]]
            assert sum(isinstance(event, Suspended) for event in log) == sum(isinstance(e, Resumed) for e in log) > 0
            calls = [event.turn for event in log if isinstance(event, Call)]
            assert calls == list(range(calls[0], calls[0] + len(calls)))  # no lost turn, none twice
            tools = [event.turn for event in log if isinstance(event, ToolResult)]
            assert tools == calls[: len(tools)]
            assert isinstance(log[-1], Ended)
            assert log[-1].reason in {"done", "turn_budget"}
            verified = next(event for event in log if isinstance(event, Verified))
            assert verified.infra_error is None
        assert facts.interrupted == 0


async def test_the_score_is_what_is_found_in_the_sandbox(tmp_path: Path, policy: Path) -> None:
    """Two equal episodes wait; a file is put into the sandbox of one behind its agent's back, and its score changes."""
    async with whole(tmp_path / "state", small_run(policy, 1000), hosts=2) as stack:
        facts = stack.driver.facts
        assert await stack.wait(lambda: "rollout" in stack.driver.shown.cells.values(), 120), stack.driver.shown.cells
        first, second = sorted(await suspend(stack, ["honest", "tampered"]))
        boxes = [event for x in (first, second) for event in await log_of(stack, x) if isinstance(event, SandboxOpened)]
        request = WriteRequest(sandbox=boxes[1].sandbox, path="tampered", data=b"yes")
        await call(stack.bus, proto.SERVICE, boxes[1].node, "write", request, WriteResult, timeout_s=5)
        await resume(stack)
        assert await stack.wait(lambda: {"honest", "tampered"} <= facts.evaluations.keys(), 120), stack.driver.shown
        assert sorted(facts.evaluations.values()) == [0.25, 0.75]
