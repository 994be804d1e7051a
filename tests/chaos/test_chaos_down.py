"""A stack that is stopped with episodes under way goes on from there when it is started again."""

from pathlib import Path

import pytest

from opengyre.proto import subjects
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, SandboxOpened, TakenOver, Verified
from opengyre.shared.bus import read
from support.stack import marked, small_run, whole

CHECK = Check(name="there", command="test -e /workspace/given.txt", weight=1.0)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_down_and_up_again_ends_no_episode(tmp_path: Path, policy: Path) -> None:
    state = tmp_path / "state"
    spec = small_run(policy, 1000)
    tasks = [
        TaskSpec(
            task=f"task_{i:02d}",
            instruction="Write anything.",
            files={"given.txt": "x"},
            checks=(CHECK,),
            purpose="evaluate",
        )
        for i in range(60)
    ]
    async with whole(state, spec) as stack:
        facts = stack.driver.facts
        assert await stack.wait(lambda: "rollout" in stack.driver.shown.cells.values(), 120), stack.driver.shown.cells
        await stack.api.post("/v1/tasks", {"run": "demo", "tasks": tasks})
        assert await stack.wait(lambda: len(facts.ended) >= 2 and len(facts.live) >= 8, 120), stack.driver.shown
        await stack.api.post("/v1/cells/host0/drain", None)
        await stack.api.post("/v1/cells/host1/drain", None)
        assert await stack.wait(lambda: len(facts.suspended) >= 4, 120), stack.driver.shown
        live = set(facts.live)
    assert marked(state) == {}

    async with whole(state, spec) as stack:
        facts = stack.driver.facts
        await stack.api.post("/v1/cells/host0/resume", None)
        await stack.api.post("/v1/cells/host1/resume", None)
        assert await stack.wait(lambda: len(facts.ended) >= len(tasks), 300), stack.driver.shown
        stored = await read(stack.bus, subjects.TRAJ, subjects.traj("demo", "*", "*", "ended"))
        endings = [event for message in stored if isinstance(event := message.event(), Ended)]
        assert [(e.execution, e.detail) for e in endings if e.reason == "infra"] == []
        turns = 0
        for execution in live:
            group = execution.rpartition("-")[0]
            stored = await read(stack.bus, subjects.TRAJ, f"{subjects.PREFIX}.traj.demo.{group}.{execution}.>")
            log = [message.event() for message in stored]
            if not any(isinstance(event, TakenOver) for event in log):
                continue  # it ended while the stack was being stopped
            turns += sum(isinstance(event, Call) for event in log)
            assert sum(isinstance(event, SandboxOpened) for event in log) <= 2
            assert isinstance(log[-1], Ended)
            verified = next(event for event in log if isinstance(event, Verified))
            assert [part.value for part in verified.parts] in ([0.0], [1.0])
        assert turns > 0
    assert marked(state) == {}
