"""What a host does whose news of a version does not reach the broker, and what it says of one that it cannot load."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto import subjects
from opengyre.proto.host import HostState
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import WeightsApplied
from opengyre.shared.bus import Bucket, Bus, BusUnavailableError
from opengyre.tiny.types import EngineError
from support import eventually
from support.running_host import Versions, running

pytestmark = pytest.mark.torch


async def test_a_version_that_the_broker_was_not_told_of_is_loaded_once(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load ends what calls in flight had computed, and while the broker was away there was one for each try."""
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("r", RunSpec(run="r", model="unused"))
    versions = Versions(bus, tmp_path / "weights")
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        loads, tries = [], []
        load, publish = host.engine.load, bus.publish

        async def loading(directory: Path, version: int) -> None:
            loads.append(version)
            await load(directory, version)

        async def publishing(subject: str, event: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(event, WeightsApplied):
                tries.append(event.version)
                if len(tries) < 3:
                    raise BusUnavailableError("the broker is away")
            return await publish(subject, event, *rest, **more)

        monkeypatch.setattr(host.engine, "load", loading)
        monkeypatch.setattr(bus, "publish", publishing)
        await versions.publish(1)
        await eventually(lambda: host.engine.stats().version == 1 and len(tries) == 3)
        assert (loads, tries) == ([1], [1, 1, 1])


async def test_what_waits_for_a_version_says_why_it_was_refused_before(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that took longer than the pause after a refusal hid the reason, which was in the host's log only."""
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("r", RunSpec(run="r", model="unused"))
    versions = Versions(bus, tmp_path / "weights")
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        load, tries, again = host.engine.load, [], asyncio.Event()

        async def loading(directory: Path, version: int) -> None:
            tries.append(version)
            if len(tries) == 1:
                raise EngineError("no such argument")
            await again.wait()
            await load(directory, version)

        def waits() -> list[str]:
            return [wait.what for wait in host.context.waits.report()]

        monkeypatch.setattr(host.engine, "load", loading)
        await versions.publish(1)
        said = "version 1 to be loaded, which failed before: no such argument"
        try:
            await eventually(lambda: said in waits(), found=waits)
        finally:
            again.set()
        await eventually(lambda: host.engine.stats().version == 1)
