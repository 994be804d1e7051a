"""A host in the tests' own process, with a tiny engine, and versions as the trainer publishes them."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from opengyre.host.service import Host
from opengyre.host.tiny import TinyHostEngine
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostState, HostStateChanged, HostStatus
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, read
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import HostSettings, Settings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import version_directory, write_version
from support import eventually

CONFIG = TinyConfig(vocab_size=64, hidden_size=32, intermediate_size=64)


class Versions:
    """Publishes versions as the trainer does."""

    def __init__(self, bus: Bus, root: Path, run: str = "r") -> None:
        self.bus, self.root, self.run = bus, root, run

    def write(self, version: int) -> Manifest:
        model = TinyModel(CONFIG, seed=version)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
        config = self.root / f"config{version}"
        save_pretrained(model, config)
        extra = {"config.json": (config / "config.json").read_bytes()}
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return write_version(
            tensors,
            version_directory(self.root / self.run, version),
            run=self.run,
            version=version,
            parent=None,
            step=version,
            extra=extra,
        )

    async def announce(self, manifest: Manifest) -> None:
        await self.bus.publish(
            subjects.weights(self.run, "published"), WeightsPublished(run=self.run, manifest=manifest)
        )

    async def publish(self, version: int) -> Manifest:
        manifest = self.write(version)
        await self.announce(manifest)
        return manifest


class Running:
    """A host in this process."""

    def __init__(self, bus: Bus, context: Context, host: Host, engine: TinyHostEngine) -> None:
        self.task: asyncio.Task[None] = asyncio.create_task(host.run())
        self.bus, self.context, self.host, self.engine = bus, context, host, engine
        self.statuses = Bucket(bus, subjects.KV_HOSTS, HostStatus)
        self.desired = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self.name = context.settings.host.host

    async def status(self) -> HostStatus:
        found = await self.statuses.get(self.name)
        assert found is not None
        return found[0]

    async def tell(self, role: str, epoch: int, grace_s: float = 0.05) -> None:
        await self.desired.put(
            self.name,
            DesiredRole(host=self.name, role=role, epoch=epoch, grace_s=grace_s),  # type: ignore[arg-type]  # fields by keyword, checked at run time
        )

    async def reach(self, state: HostState) -> HostStatus:
        """Wait until it says that it is in this state; that status, whatever it says next."""
        return await reached(self.statuses, self.name, state)

    @contextlib.contextmanager
    def held_at(self, tokens: int) -> Iterator[None]:
        """In the block the engine samples until each call in flight has so many tokens, and waits then for the end of
        the block: calls are there for as long as they are looked at. It is paused, slept and loaded all the same."""
        core = self.engine._awake()._core
        step = core.step

        def bounded() -> int:
            calls = core.progress()
            if not calls or any(sampled < tokens for _, _, sampled, _ in calls):
                return step()
            time.sleep(0.001)
            return 0

        core.step = bounded  # type: ignore[method-assign]  # of this engine alone
        try:
            yield
        finally:
            core.step = step  # type: ignore[method-assign]  # as it was

    async def under_way(self, calls: int, tokens: int) -> None:
        """Wait until so many calls are in flight with so many tokens each."""
        await eventually(lambda: [call.sampled >= tokens for call in self.engine.progress()] == [True] * calls)

    async def changes(self) -> list[HostStateChanged]:
        """All that led to its present state, once it has told them: a change is told after the status."""
        found: list[HostStateChanged] = []

        async def told() -> bool:
            stored = await read(self.bus, subjects.HOSTS, subjects.host(self.name, "state"))
            found[:] = [event for event in (s.event() for s in stored) if isinstance(event, HostStateChanged)]
            return bool(found) and found[-1].after is self.host._position.state

        await eventually(told)
        return found


async def reached(statuses: Bucket[HostStatus], host: str, state: HostState, not_boot: str = "") -> HostStatus:
    """Wait until a host says that it is in this state; that status, whatever it says next."""
    last: HostStatus | None = None

    async def there() -> bool:
        nonlocal last
        found = await statuses.get(host)
        last = found[0] if found is not None else None
        return last is not None and last.state is state and last.boot != not_boot

    await eventually(there)
    assert last is not None
    return last


@contextlib.asynccontextmanager
async def running(bus: Bus, folder: Path, name: str = "host0", engine: TinyHostEngine | None = None, **more: object):
    # Not LOST, and so no other way of states, where the machine stalls for a while.
    own = {"host": name, "heartbeat_s": 0.2, "lost_after_s": 120, **more}
    settings = Settings(state_dir=folder, host=HostSettings.model_validate(own))
    sock = listen(settings.http)
    async with Blobs(folder / "blobs", settings.cache) as blobs:
        context = Context("host", f"{name}-test", settings, bus, blobs, f"http://127.0.0.1:{sock.getsockname()[1]}")
        engine = engine or TinyHostEngine(int(settings.host.capacity), 1)
        host = Host(context, engine)
        async with serving_http(sock, app_of(list(host.routes()))):
            program = Running(bus, context, host, engine)
            try:
                yield program
            finally:
                context.stopping.set()
                await asyncio.wait_for(program.task, 60)
