"""A host in the tests' own process, with a tiny engine, and versions as the trainer publishes them."""

import asyncio
import contextlib
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
        async def there() -> bool:
            found = await self.statuses.get(self.name)
            return found is not None and found[0].state is state

        await eventually(there)
        return await self.status()

    async def changes(self) -> list[HostStateChanged]:
        stored = await read(self.bus, subjects.HOSTS, subjects.host(self.name, "state"))
        return [event for event in (s.event() for s in stored) if isinstance(event, HostStateChanged)]


@contextlib.asynccontextmanager
async def running(bus: Bus, folder: Path, name: str = "host0", engine: TinyHostEngine | None = None, **more: object):
    settings = Settings(state_dir=folder, host=HostSettings(host=name, heartbeat_s=0.2, **more))  # type: ignore[arg-type]  # fields by keyword, checked at run time
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
                await asyncio.wait_for(program.task, 15)
