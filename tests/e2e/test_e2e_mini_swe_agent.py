"""mini-swe-agent, unmodified, in sandboxes: it solves a shell task with the tiny policy, and what it did is trained."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.run import Dispatch, Elastic, Harness, Optimization, RunSpec
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, ToolResult, Verified
from opengyre.proto.update import Committed
from opengyre.sandbox import machine
from opengyre.shared.bus import read
from support.mini_swe_agent import CONFIG, LINE, PLACE, SUBMIT, installed, policy
from support.stack import whole

INSTRUCTION = "write one into a.txt"
SOLVES = "echo one > a.txt"
FAILS = "echo two > a.txt"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    machine.find_bwrap() is None or machine.user_namespaces() is not None, reason="needs bubblewrap and user namespaces"
)
async def test_an_unmodified_agent_is_trained(tmp_path: Path) -> None:
    agents = await asyncio.to_thread(installed)
    model = await asyncio.to_thread(policy, tmp_path, INSTRUCTION, *[(SOLVES, SUBMIT)] * 3, (FAILS, SUBMIT))
    spec = RunSpec(
        run="demo",
        model=str(model),
        updates=1,
        dispatch=Dispatch(phi=0, mu=1, batch_groups=1, group_size=4, min_members=2),
        harness=Harness(agent="program", program=LINE, max_turns=8, max_tokens=60, time_budget_s=900),
        optimization=Optimization(learning_rate=1e-3),
        elastic=Elastic(dwell_s=0.2),
    )
    task = TaskSpec(
        task="one",
        instruction=INSTRUCTION,
        files={"mini.yaml": CONFIG},
        checks=(Check(name="one", command='[ "$(cat a.txt)" = one ]', weight=1.0),),
        repeat=1,
    )
    environment = {
        "GYRE_SANDBOX__BINDS": f"{PLACE}={agents}",
        "GYRE_SANDBOX__MEMORY_MB": "1024",
        "GYRE_ROLLOUT__MAX_EPISODES": "2",  # what it imports takes a processor many seconds
    }
    async with whole(tmp_path / "state", spec, environment=environment) as stack:
        await stack.api.post("/v1/tasks", {"run": spec.run, "tasks": [msgspec.to_builtins(task)]})
        assert await stack.wait(lambda: stack.driver.facts.finished, 900), stack.notes[-3:]
        stored = await read(stack.bus, subjects.TRAJ, f"{subjects.PREFIX}.traj.{spec.run}.>")
        events = [one.event() for one in stored]
        committed = [
            one.event() for one in await read(stack.bus, subjects.UPDATES, subjects.update("demo", "committed"))
        ]
    [update] = committed
    assert isinstance(update, Committed)
    ends = {event.execution: event for event in events if isinstance(event, Ended)}
    results = [event for event in events if isinstance(event, ToolResult)]
    assert {event.reason for event in ends.values()} <= {"done", "agent_error", "turn_budget"}, ends
    scores = {
        event.execution: sum(part.value for part in event.parts) for event in events if isinstance(event, Verified)
    }
    assert max(scores.values()) == 1.0, (scores, results)
    solved = next(name for name, score in scores.items() if score == 1.0)
    calls = [event for event in events if isinstance(event, Call) and event.execution == solved]
    assert [tool.name for call in calls for tool in call.tool_calls] == ["bash"] * len(calls)
    assert [call.text for call in calls][-2:] == [SOLVES, SUBMIT]
    assert all(call.parent is not None and call.transition == "extend" for call in calls[1:])
    assert ends[solved].reason == "done"
