"""The sandbox service on the bus.

Creation is asked of any replica; all else of the node that the sandbox lives on. When the service stops, sandboxes
and running commands stay; whoever waits for one is told ``sandbox_busy`` and repeats the call at the next start,
where it joins what runs or gets what is recorded.

Awaits: `run` waits for the stop; a handler waits for its work or the stop, whichever is first.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from starlette.routing import BaseRoute

from opengyre.proto.ids import check_token
from opengyre.proto.sandbox import (
    SERVICE,
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    ForwardRequest,
    ForwardResult,
    InfoRequest,
    ListRequest,
    ListResult,
    NodeInfo,
    PrepareRequest,
    ReadRequest,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    StatRequest,
    VerifyRequest,
    VerifyResult,
    WriteRequest,
)
from opengyre.proto.sandbox_images import AddImageRequest, ImagesRequest, RemoveImageRequest
from opengyre.proto.sandbox_jobs import KillRequest, LogsRequest, PollRequest, SpawnRequest
from opengyre.proto.sandbox_trees import (
    DropRequest,
    ForkRequest,
    GetRequest,
    PutRequest,
    RestoreRequest,
    SnapshotRequest,
)
from opengyre.sandbox import offline, stand_in
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Backend, CannotIsolateError, SandboxError, Spec
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import OFFLINE
from opengyre.sandbox.node import Node
from opengyre.sandbox.origin import HOST
from opengyre.shared.bus import Endpoint, RpcFailedError, serving
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import SandboxSettings

log = logging.getLogger("gyre.sandbox")

LIVE = Gauge("gyre_sandboxes", "Sandboxes on this node")
CREATE_SECONDS = Histogram(
    "gyre_sandbox_create_seconds", "Making a sandbox", buckets=(0.01, 0.02, 0.04, 0.1, 0.25, 1, 5, 20)
)
EXEC_SECONDS = Histogram(
    "gyre_sandbox_exec_seconds", "One command", buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 300)
)
VERIFY_SECONDS = Histogram(
    "gyre_sandbox_verify_seconds",
    "One evaluation, by its mode",
    ["mode"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30, 300),
)
REFUSED = Counter("gyre_sandbox_errors", "Calls that ended in an error, by kind", ["kind"])

T = TypeVar("T")
DOCKER_SOCKET = "/var/run/docker.sock"


class SandboxService:
    """One node's sandboxes, for as long as the process lives."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.sandbox
        self._node = check_token("sandbox.node", self._settings.node)
        self._manager: Node | None = None

    def routes(self) -> Sequence[BaseRoute]:
        return ()

    @property
    def manager(self) -> Node:
        assert self._manager is not None, "run() makes it"
        return self._manager

    async def run(self) -> None:
        try:
            found = await self._start()
        except SandboxError as error:
            raise SystemExit(f"sandbox: {error}") from error
        log.info("sandbox: %s is ready, %d live sandboxes taken up", self._node, found)
        async with asyncio.TaskGroup() as tasks:
            reaping = tasks.create_task(self.manager.reap())
            node = self._endpoints()
            create = {"create": node["create"]}
            async with (
                serving(self._context.bus, SERVICE, "any", create, "Sandboxes for agents: creation"),
                serving(self._context.bus, SERVICE, self._node, node, "Sandboxes for agents: one node"),
            ):
                self._context.missing = None
                while await self._context.pause(1.0):
                    LIVE.set(self.manager.count())
                    self._context.gauges["sandboxes"] = float(self.manager.count())
            reaping.cancel()
        await self.manager.stop()

    async def _start(self) -> int:
        root = self._context.state_dir / "sandbox" / self._node
        if self._settings.backend == "docker":
            # A folder of its own: one backend cannot end what another one left.
            root = self._context.state_dir / "sandbox-docker" / self._node
            return await self._use(docker_backend(root, await self._offline(root)))
        try:
            return await self._use(self._bubblewrap(root, await self._offline(root)))
        except CannotIsolateError as error:
            if not self._settings.allow_unisolated:
                raise CannotIsolateError(
                    f"{error}; to run commands without isolation all the same, set sandbox.allow_unisolated = true"
                ) from error
            log.warning(
                "sandbox: %s; going on without isolation, as sandbox.allow_unisolated is set; runs need "
                "scoring.grading = 'shared' here",
                error,
            )
            return await self._use(Bubblewrap(root, isolated=False))

    @staticmethod
    def _bubblewrap(root: Path, settings: SandboxSettings) -> Bubblewrap:
        return Bubblewrap(
            root,
            binds=settings.bound(),
            image_roots=[Path(path) for path in settings.image_roots],
            image_cache_mb=settings.image_cache_mb,
            spool_mb=settings.spool_mb,
        )

    async def _offline(self, root: Path) -> SandboxSettings:
        """The settings with the folder of offline stand-ins among the binds, where it is wanted and can be made."""
        settings = self._settings
        if not settings.offline:
            return settings
        try:
            folder, missing = await asyncio.to_thread(offline.make, offline.place(root))
        except OSError as error:
            log.warning("sandbox: without the offline stand-ins, which could not be made: %s", error)
            return settings
        if missing:
            log.info("sandbox: the offline stand-ins lack %s", ", ".join(missing))
        return settings.model_copy(update={"binds": (*settings.binds, f"{OFFLINE}={folder}")})

    async def _use(self, backend: Backend) -> int:
        settings = self._settings
        defaults = Spec(
            sandbox="", workspace_mb=settings.workspace_mb, memory_mb=settings.memory_mb, pids=settings.pids
        )
        environments = Environments(backend, self._node, stand_in=settings.stand_in, offline=settings.offline)
        manager = Node(backend, self._node, defaults, settings.max_sandboxes, environments)
        manager.blobs = self._context.blobs
        try:
            found = await manager.start()
            if isinstance(backend, Bubblewrap) and settings.stand_in == HOST and backend.capabilities().images:
                await asyncio.to_thread(stand_in.ensure, backend.image_cache)
        except BaseException:
            await backend.stop()
            raise
        self._manager = manager
        missing = backend.unenforced()
        if missing:
            log.warning("sandbox: not enforced here: %s", "; ".join(missing))
        return found

    def _endpoints(self) -> dict[str, Endpoint]:
        def endpoint(request: type, work: Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]) -> Endpoint:
            return Endpoint(request, lambda value: self._answer(work(value)))

        return {
            "create": endpoint(SandboxSpec, self._create),
            "exec": endpoint(ExecRequest, self._exec),
            "verify": endpoint(VerifyRequest, self._verify),
            "prepare": endpoint(PrepareRequest, self.manager.prepare),
            "renew": endpoint(RenewRequest, self._renew),
            "destroy": endpoint(DestroyRequest, self._destroy),
            "list": endpoint(ListRequest, self._list),
            "stat": endpoint(StatRequest, self._stat),
            "read": endpoint(ReadRequest, self.manager.read_file),
            "write": endpoint(WriteRequest, self.manager.write_file),
            "forward": endpoint(ForwardRequest, self._forward),
            "info": endpoint(InfoRequest, self._info),
            "spawn": endpoint(SpawnRequest, self.manager.spawn),
            "poll": endpoint(PollRequest, self.manager.poll),
            "logs": endpoint(LogsRequest, self.manager.logs),
            "kill": endpoint(KillRequest, self.manager.kill),
            "put": endpoint(PutRequest, self.manager.put),
            "get": endpoint(GetRequest, self.manager.get),
            "snapshot": endpoint(SnapshotRequest, self.manager.snapshot),
            "fork": endpoint(ForkRequest, self.manager.fork),
            "restore": endpoint(RestoreRequest, self.manager.restore),
            "drop": endpoint(DropRequest, self.manager.drop),
            "images": endpoint(ImagesRequest, self.manager.shelf.listing),
            "add_image": endpoint(AddImageRequest, self.manager.shelf.add),
            "remove_image": endpoint(RemoveImageRequest, self.manager.shelf.remove),
        }

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a call's work unless the service stops first."""
        doing = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._context.stopping.wait())
        try:
            await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                REFUSED.labels("sandbox_busy").inc()
                raise RpcFailedError("sandbox_busy", f"{self._node} is stopping; repeat the call")
            return doing.result()
        except SandboxError as error:
            REFUSED.labels(error.kind).inc()
            raise RpcFailedError(error.kind, str(error)) from error
        finally:
            await _cancelled(doing)
            await _cancelled(stop)

    async def _create(self, spec: SandboxSpec) -> SandboxRef:
        with CREATE_SECONDS.time():
            return await self.manager.create(spec)

    async def _exec(self, request: ExecRequest) -> ExecResult:
        with EXEC_SECONDS.time():
            return await self.manager.exec(request)

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        with VERIFY_SECONDS.labels(request.mode).time():
            return await self.manager.verify(request)

    async def _renew(self, request: RenewRequest) -> SandboxRef:
        return self.manager.renew(request)

    async def _destroy(self, request: DestroyRequest) -> DestroyResult:
        return await self.manager.destroy(request.sandbox)

    async def _list(self, request: ListRequest) -> ListResult:
        return ListResult(sandboxes=self.manager.listing(request.labels))

    async def _stat(self, request: StatRequest) -> SandboxInfo:
        return self.manager.stat(request.sandbox)

    async def _info(self, _: InfoRequest) -> NodeInfo:
        return self.manager.info()

    async def _forward(self, request: ForwardRequest) -> ForwardResult:
        return await self.manager.forward(request)


def docker_backend(root: Path, settings: SandboxSettings) -> Backend:
    """The Docker backend; `CannotIsolateError` where its client is not installed."""
    try:
        from opengyre.sandbox.docker import Docker
    except ModuleNotFoundError as error:
        raise CannotIsolateError(
            "sandbox.backend is 'docker', whose client is missing: install opengyre[docker], or set 'bubblewrap'"
        ) from error
    return Docker(
        root,
        socket=docker_socket(settings.docker_socket, os.environ.get("DOCKER_HOST")),
        image=settings.docker_image,
        binds=settings.bound(),
        spool_mb=settings.spool_mb,
    )


def docker_socket(setting: str | None, host: str | None) -> Path:
    """Where the engine is, as the setting says, else as Docker's own variable does; `CannotIsolateError` where that
    names one of another machine. Pure.
    """
    if setting is not None or not host:
        return Path(setting or DOCKER_SOCKET)
    if not host.startswith("unix:///"):
        raise CannotIsolateError(
            f"DOCKER_HOST is {host[:200]!r}; allowed is unix:///..., as the engine has to be on this machine, or the "
            "setting sandbox.docker_socket in its place"
        )
    return Path(host.removeprefix("unix://"))


async def _cancelled(work: Awaitable[Any]) -> None:
    task = asyncio.ensure_future(work)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # heard; whoever waited for it has had it
