"""Episodes of hours in a moment: the lease clock is moved by the test, the sandboxes are real."""

import asyncio
from pathlib import Path

import pytest

from opengyre.proto.sandbox import RenewRequest
from opengyre.sandbox.core import SandboxGone, Spec
from support import eventually
from support.sandboxes import Node, needs_sandboxes

pytestmark = [pytest.mark.sandbox, needs_sandboxes]
SMALL = Spec(sandbox="", workspace_mb=4, memory_mb=64, pids=32)
HOURS = 3
TTL_S = 120.0
"""Of the rollout service's leases, which it renews at a third."""
STEP_S = TTL_S / 3


class Clock:
    """The manager's clock, and a reaper that looks once each time it was moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 50_000.0
        monkeypatch.setattr("opengyre.sandbox.manager._now", lambda: self.time)

    async def move(self, node: Node, seconds: float) -> None:
        self.time += seconds
        for name in await node.manager._due():
            await node.manager._end(name)


def renew(node: Node, name: str) -> None:
    node.manager.renew(RenewRequest(sandbox=name, ttl_s=TTL_S))


async def test_an_episode_of_three_hours_keeps_its_sandbox_and_a_dead_owners_is_gone_in_one_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewed at a third of its lease all the time, over a restart of the service in each hour, with commands at times.
    The owner of another one dies after an hour and a half.
    """
    clock = Clock(monkeypatch)
    node = Node(tmp_path / "node", SMALL)
    await node.manager.start()
    began = clock.time
    for name in ("kept", "left"):
        await node.create(name, ttl_s=TTL_S)
    died_at = began + HOURS * 1800.0
    last_renewed, gone_at = began, None
    turns = 0
    while clock.time < began + HOURS * 3600.0:
        await clock.move(node, STEP_S)
        renew(node, "kept")
        if clock.time < died_at:
            renew(node, "left")
            last_renewed = clock.time
        elif gone_at is None and "left" not in {info.sandbox for info in node.manager.listing({})}:
            gone_at = clock.time
        if int((clock.time - began) / STEP_S) % 15 == 0:  # every ten minutes
            turns += 1
            done = await node.run("echo x >> turns; wc -l < turns", sandbox="kept")
            assert done.stdout == f"{turns}\n"
        if int((clock.time - began) / STEP_S) % 90 == 0:  # every hour
            await node.manager.stop()
            node = Node(tmp_path / "node", SMALL)
            await node.manager.start()
    assert turns == 18
    assert gone_at is not None
    assert TTL_S <= gone_at - last_renewed <= TTL_S + STEP_S, "in one lease, and not before"
    with pytest.raises(SandboxGone):
        await node.run("true", sandbox="left")
    await clock.move(node, TTL_S - 1)
    assert [info.sandbox for info in node.manager.listing({})] == ["kept"]
    await clock.move(node, 2)
    assert node.left() == []
    await node.close()


async def test_a_command_that_outlasts_the_idle_time_is_a_use_and_one_that_outlasts_the_lease_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    node = Node(tmp_path / "node", SMALL)
    await node.manager.start()
    await node.create("idle", ttl_s=10_000.0, idle_ttl_s=60.0)
    await node.create("late", ttl_s=60.0)
    command = "until [ -e go ]; do sleep 0.05; done; echo ok"
    running = {
        name: asyncio.ensure_future(node.run(command, sandbox=name, timeout_s=120.0)) for name in ("idle", "late")
    }
    await eventually(lambda: all(node.backend.execs(name)[1] for name in running))
    await clock.move(node, 3600.0)
    with pytest.raises(SandboxGone):
        await running["late"]
    await node.backend.write("idle", "/workspace/go", b"", 0o644)  # which is no use, as the manager would count it
    assert (await running["idle"]).stdout == "ok\n"
    await clock.move(node, 59.0)
    assert [info.sandbox for info in node.manager.listing({})] == ["idle"]
    await clock.move(node, 2.0)
    assert node.left() == []
    await node.close()
