"""kill -9 of each service, of the broker and of the cache, in turn, while a run goes: it ends, whole.

The laws, checked on the streams at the end: no episode died of it, the books balance, each execution was trained
exactly once, versions grew by one, nothing was left as a dead letter, no process is left.
"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from opengyre.cli.demo_facts import balances
from opengyre.proto import subjects
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed
from opengyre.shared.bus import read
from support.stack import Whole, marked, small_run, whole

UPDATES = 14
VICTIMS = ("rollout", "trainer", "sandbox", "trajectory", "host0", "allocator", "valkey", "gateway", "host1", "nats")


async def kill_in_turn(stack: Whole) -> int:
    """Kill each victim while episodes are live; how many were killed before the run was over."""
    facts, killed = stack.driver.facts, 0
    for victim in VICTIMS:
        ended = len(facts.ended)
        assert await stack.wait(lambda e=ended: facts.finished or (bool(facts.live) and len(facts.ended) > e), 180), (
            victim,
            stack.driver.shown,
        )
        if facts.finished:
            break
        pid = stack.run.supervisor.children[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed += 1
        await stack.restarted(victim, pid)
    return killed


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(900)
async def test_a_run_survives_the_death_of_everything_in_turn(tmp_path: Path, policy: Path) -> None:
    state = tmp_path / "state"
    async with whole(state, small_run(policy, UPDATES)) as stack:
        killing = asyncio.create_task(kill_in_turn(stack))
        await stack.driver.train()
        assert await killing == len(VICTIMS), "the run was over before all were killed: give it more updates"
        facts, report = await stack.driver.conclude()

        assert facts.interrupted == 0
        assert report is not None
        assert balances(report.groups)
        assert balances(report.executions)
        assert report.groups.trained == UPDATES * 4
        assert report.executions.trained + sum(report.executions.dropped.values()) == UPDATES * 16
        assert (report.groups.live, report.groups.ready) == (0, 0)

        updates = subjects.update("demo", "committed")
        committed = [message.event() for message in await read(stack.bus, subjects.UPDATES, updates)]
        assert [e.version for e in committed if isinstance(e, Committed)] == list(range(1, UPDATES + 1))
        trained = Counter(x for e in committed if isinstance(e, Committed) for x in e.executions)
        assert set(trained.values()) == {1}

        endings = await read(stack.bus, subjects.TRAJ, subjects.traj("demo", "*", "*", "ended"))
        ended = Counter(e.execution for m in endings if isinstance(e := m.event(), Ended))
        assert set(ended.values()) == {1}
        assert len(ended) == UPDATES * 16

        letters = await read(stack.bus, subjects.DLQ, "gyre.v1.dlq.>")
        assert [message.payload for message in letters] == []
    assert marked(state) == {}
