"""Environments of tasks on one node: made once for the same one, kept as a snapshot, and begun with.

Invariants: what is kept is never changed; a making that failed leaves nothing; at most `MOST` are kept, the ones that
were not used for longest go first (sandboxes that began with them go on).

Awaits: the making or dropping of the same environment by another call, which is bounded by its steps; the backend.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from opengyre.proto.task import TaskEnvironment
from opengyre.sandbox.core import Backend, InfraError, Options, Spec
from opengyre.sandbox.harbor import Inside, healthy
from opengyre.sandbox.origin import Origin, origin, specified
from opengyre.sandbox.replay import replay
from opengyre.tasks.dockerfile import Folder

MOST = 32


class Environments:
    """What tasks' sandboxes begin with."""

    def __init__(self, backend: Backend, node: str, *, stand_in: str | None = None, offline: bool = False) -> None:
        """``stand_in``: the image that takes the place of bases that are not here. ``offline``: instructions run with
        the offline stand-ins.
        """
        self.backend = backend
        self._node = node
        self._stand_in = stand_in
        self.offline = offline
        self._making: dict[str, asyncio.Lock] = {}
        self._used: dict[str, None] = {}

    def specify(self, spec: Spec, environment: TaskEnvironment) -> tuple[Spec, Origin]:
        """The sandbox of an environment, and where that comes from; raises `InvalidRequest`."""
        made = origin(environment, self.backend.images(), stand_in=self._stand_in, node=self._node)
        return specified(spec, environment, made, self.backend.capabilities()), made

    async def create(self, spec: Spec, environment: TaskEnvironment, made: Origin, files: Mapping[str, str]) -> None:
        """Make a sandbox of an environment; after a failure the caller calls the backend's `destroy`."""
        await self._create(spec, environment, made, files)
        if environment.healthcheck is not None:
            await healthy(environment.healthcheck, self.inside(spec, "made"))

    async def _create(self, spec: Spec, environment: TaskEnvironment, made: Origin, files: Mapping[str, str]) -> None:
        can = self.backend.capabilities()
        if not can.fork or all(isinstance(step, Folder) for step in made.plan.steps):
            await self.backend.create(spec, files)
            await replay(environment, made.plan, self.inside(spec, "replay"))
            return
        await self.backend.fork(await self._kept(spec, environment, made), spec)
        for path, text in files.items():
            await self.backend.write(spec.sandbox, path, text.encode("utf-8", "surrogateescape"), 0o644)

    def inside(self, spec: Spec, prefix: str) -> Inside:
        """The sandbox as one who prepares it sees it; commands count for no lease."""

        async def execute(exec_id: str, command: str, timeout_s: float, limit: int, options: Options):
            return await self.backend.exec(spec, exec_id, command, timeout_s, limit, options)

        return Inside(self.backend, spec, execute, prefix, self.offline)

    async def forget(self) -> None:
        """Drop all that is kept; sandboxes that began with it go on."""
        while self._used:
            await self.backend.drop(self._used.popitem()[0])

    async def _kept(self, spec: Spec, environment: TaskEnvironment, made: Origin) -> str:
        """The snapshot of an environment, made where it is not there."""
        key = key_of(environment, made)
        lock = self._making.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self.backend.snapshots():
                await self._make(key, spec, environment, made)
        self._used.pop(key, None)
        self._used[key] = None
        while len(self._used) > MOST:
            oldest = next(iter(self._used))
            del self._used[oldest]
            # Who wants it just now waits, and makes it anew: what is being dropped is nothing to begin with.
            async with self._making.setdefault(oldest, asyncio.Lock()):
                if oldest not in self._used:
                    await self.backend.drop(oldest)
        return key

    async def _make(self, key: str, spec: Spec, environment: TaskEnvironment, made: Origin) -> None:
        # A dot is in no caller's id; a service that starts again removes what has one.
        name = f"{key}.{secrets.token_hex(4)}"
        builder = msgspec.structs.replace(spec, sandbox=name, network="none", allowed_hosts=())
        try:
            await self.backend.create(builder, {})
            await replay(environment, made.plan, self.inside(builder, "build"))
            await self.backend.quiet(builder.sandbox)
            await self.backend.snapshot(builder, key)
        finally:
            # What cannot be removed now is removed by the next start.
            with suppress(InfraError):
                await self.backend.destroy(builder.sandbox)


def key_of(environment: TaskEnvironment, made: Origin) -> str:
    """Name of the snapshot, the same for the same base, Dockerfile, context and limits. A dot is in no caller's."""
    # What it is made into depends on none of these.
    same = msgspec.structs.replace(environment, healthcheck=None, network="none", allowed_hosts=())
    found = hashlib.sha256(msgspec.json.encode(same))
    found.update(made.image.encode())
    return f"env.{found.hexdigest()[:32]}"
