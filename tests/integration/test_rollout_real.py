"""The rollout service with the real sandbox service and real hosts of the tiny engine, each a process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.proto import ids, subjects
from opengyre.proto.host import DesiredRole, HostState, HostStatus
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check
from opengyre.proto.traj import AnyTrajEvent, Call, Ended, Suspended, ToolResult, Verified
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.processes import process, publish_version
from support.rollout_fakes import Stack, dispatch

pytestmark = [pytest.mark.torch, pytest.mark.sandbox]

HOSTS = ("h0", "h1")


@pytest.fixture
async def stack(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    await publish_version(made)
    with contextlib.ExitStack() as processes:
        started = [processes.enter_context(process(made, name)) for name in ("sandbox", "rollout")]
        for name in HOSTS:
            processes.enter_context(process(made, "host", HOST__HOST=name, HOST__HEARTBEAT_S="0.2"))
        async with Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
            pids = {running.pid for running in started}
            await eventually(lambda: pids <= {s.pid for s in services.values.values() if s.ready}, 90)
        async with Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts:
            await eventually(lambda: [h.state for h in hosts.values.values()] == [HostState.ROLLOUT] * 2, 90)
        yield made


def sampled(events: list[AnyTrajEvent]) -> list[tuple[int, ...]]:
    return [event.sampled_ids for event in events if isinstance(event, Call)]


async def test_drains_of_all_hosts_change_nothing_of_an_episode(stack: Stack) -> None:
    """Twice the same execution, once with its calls moved and parked again and again: the same tokens, the same
    observations, the same score; what was written by a command is what the checks find."""
    checks = (
        Check(name="kept", command='[ "$(cat a.txt)" = zero ]', weight=0.5),
        Check(name="never", command="[ -e nowhere ]", weight=0.5),
    )
    # An untrained policy says anything, pipelines too, whose parts complain in any order: show only the first bytes.
    base = dispatch(max_turns=3, max_tokens=100, context_tokens=512, observation_chars=3)
    base = msgspec.structs.replace(base, task=msgspec.structs.replace(base.task, checks=checks))
    calm = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 0))
    moved = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 1))
    await stack.submit(calm)
    await eventually(lambda: stack.ended(calm), 90)
    desired = Bucket(stack.bus, subjects.KV_DESIRED, DesiredRole)
    epoch = 0
    await stack.submit(moved)
    async with asyncio.timeout(240), Bucket(stack.bus, subjects.KV_HOSTS, HostStatus).view() as hosts:

        def all_are(state: HostState) -> bool:
            return all(status.state is state for status in hosts.values.values())

        while not await stack.ended(moved):
            epoch += 1
            state = HostState.TRAIN if epoch % 2 else HostState.ROLLOUT
            for name in HOSTS:
                await desired.put(name, DesiredRole(host=name, role=state.value, epoch=epoch, grace_s=0.0))
            # However slow the machine is: they get there, and what serves samples something, more each time.
            await eventually(lambda wanted=state: all_are(wanted), 90)
            await asyncio.sleep(0.15 + 0.01 * epoch)
    before, after = await stack.log(calm), await stack.log(moved)
    assert any(isinstance(event, Suspended) for event in after)
    assert not any(isinstance(event, Suspended) for event in before)
    assert sampled(after) == sampled(before)
    assert len(sampled(after)) == 3

    def seen(events: list[AnyTrajEvent]) -> list[tuple[str, str, int | None]]:
        return [(e.command, e.output, e.exit_code) for e in events if isinstance(e, ToolResult)]

    assert seen(after) == seen(before)
    for events in (before, after):
        verified, end = events[-2:]
        assert isinstance(verified, Verified)
        assert isinstance(end, Ended)
        assert end.reason == "turn_budget"
        assert verified.infra_error is None
        assert {part.name: part.value for part in verified.parts} == {"kept": 1.0, "never": 0.0}
