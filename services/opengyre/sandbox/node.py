"""All that a node answers: a manager's sandboxes with background commands, directories, large files and snapshots.

Invariants: large content passes through files, never through memory as a whole; what a transfer made on the node is
gone with its call; a snapshot is dropped when its lease is over, and one without a lease by the next start.

Awaits: the backend, which bounds its work; a snapshot of the same sandbox that is being taken; `reap` waits for the end
of the next lease of a snapshot or `LOOK_S`.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from time import monotonic

import msgspec

from opengyre.proto.sandbox import NodeInfo, ReadRequest, ReadResult, SandboxRef, WriteRequest, WriteResult
from opengyre.proto.sandbox_jobs import JobStatus, KillRequest, LogPage, LogsRequest, PollRequest, SpawnRequest
from opengyre.proto.sandbox_trees import (
    DropRequest,
    DropResult,
    ForkRequest,
    ForkResult,
    GetRequest,
    GetResult,
    PutRequest,
    PutResult,
    RestoreRequest,
    SnapshotInfo,
    SnapshotRequest,
)
from opengyre.sandbox import check
from opengyre.sandbox.core import InfraError, InvalidRequest, SandboxError, Spec, unsupported
from opengyre.sandbox.held import Held
from opengyre.sandbox.lease import Event, Lease, State
from opengyre.sandbox.manager import LOOK_S, Manager
from opengyre.sandbox.records import boot_id, load, save
from opengyre.sandbox.shelf import Shelf
from opengyre.shared.blobs import MESSAGE_LIMIT, BlobMissingError, Blobs

log = logging.getLogger("gyre.sandbox")

POLL_BOUND_S = 60.0
TRIM_S = 2.0


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """``lease.json``: a snapshot as its node holds it."""

    boot: str
    sandbox: str
    spec: Spec
    size: int
    ttl_s: float
    expires_at: float
    environment: str = ""


class Node(Manager):
    """A manager that also moves content through the blob store."""

    blobs: Blobs | None = None
    """Where large content goes and comes from; None refuses it."""
    _transfers = itertools.count()

    @cached_property
    def shelf(self) -> Shelf:
        """Its images."""
        return Shelf(self._backend, self._node, self._fetch)

    async def stop(self) -> None:
        await self.shelf.stop()
        await super().stop()

    async def start(self) -> int:
        found = await super().start()
        for snapshot in self._backend.snapshots():
            taken = self._taken(snapshot)
            # A dot is in no caller's id: those are the manager's own.
            if "." not in snapshot and (taken is None or taken.boot != boot_id()):
                await self._backend.drop(snapshot)
        return found

    def info(self) -> NodeInfo:
        """What this node is."""
        return NodeInfo(
            node=self._node,
            capabilities=self._backend.capabilities(),
            unenforced=tuple(self._backend.unenforced()),
            sandboxes=self.count(),
            max_sandboxes=self._max,
            images=tuple(self._backend.images()),
        )

    # Background commands

    async def spawn(self, request: SpawnRequest) -> JobStatus:
        """Start a command, once for its id."""
        check.execution(request)
        options = check.options(request)
        held = self._used(self._ready(request.sandbox))
        await self._backend.spawn(
            held.spec, request.exec_id, request.command, request.timeout_s, request.output_limit, options
        )
        return await self._backend.poll(request.sandbox, request.exec_id)

    async def poll(self, request: PollRequest) -> JobStatus:
        """Where a command is."""
        check.between("wait_s", request.wait_s, 0, POLL_BOUND_S)
        held = self._used(self._find(request.sandbox))
        held.running += 1
        try:
            return await self._backend.poll(request.sandbox, check.job(request.exec_id), request.wait_s)
        finally:
            held.running -= 1
            self._used(held)

    async def logs(self, request: LogsRequest) -> LogPage:
        """A page of a command's output."""
        check.between("limit", request.limit, 1, check.OUTPUT_LIMIT)
        self._used(self._find(request.sandbox))
        exec_id = check.job(request.exec_id)
        return await self._backend.logs(request.sandbox, exec_id, request.stream, request.offset, request.limit)

    async def kill(self, request: KillRequest) -> JobStatus:
        """End a command."""
        self._used(self._find(request.sandbox))
        exec_id = check.job(request.exec_id)
        await self._backend.kill(request.sandbox, exec_id, request.signal)
        return await self._backend.poll(request.sandbox, exec_id)

    # Files

    async def read_file(self, request: ReadRequest) -> ReadResult:
        """Content of a file, in the answer or as a blob."""
        if not request.blob:
            return ReadResult(data=await self.read(request.sandbox, request.path, request.limit))
        check.between("limit", request.limit, 0, check.BLOB_LIMIT)
        held = self._used(self._find(request.sandbox))
        full = check.path("path", request.path, anywhere=held.spec.image is not None)
        with self._passing(held) as target:
            await self._backend.read_to(request.sandbox, full, target, request.limit)
            size = target.stat().st_size
            return ReadResult(data=b"", blob=await self._store().put_file(target), size=size)

    async def write_file(self, request: WriteRequest) -> WriteResult:
        """Write a file from the request or a blob."""
        if request.blob is None:
            path = await self.write(request.sandbox, request.path, request.data, request.mode)
            return WriteResult(path=path, size=len(request.data))
        check.between("mode", request.mode, 0, 0o777)
        held = self._used(self._ready(request.sandbox))
        full = check.path("path", request.path, anywhere=held.spec.image is not None)
        source = await self._fetch(request.blob)
        await self._backend.write_from(request.sandbox, full, source, request.mode)
        return WriteResult(path=full, size=source.stat().st_size)

    async def put(self, request: PutRequest) -> PutResult:
        """Unpack an archive."""
        held = self._used(self._ready(request.sandbox))
        full = check.path("path", request.path, anywhere=held.spec.image is not None, folder=True)
        check.user("user", request.user)
        if request.blob is not None:
            packed = await self._backend.put(request.sandbox, full, await self._fetch(request.blob), request.user)
        else:
            with self._passing(held) as source:
                await asyncio.to_thread(source.write_bytes, request.data)
                packed = await self._backend.put(request.sandbox, full, source, request.user)
        return PutResult(path=full, entries=packed.entries, skipped=packed.skipped)

    async def get(self, request: GetRequest) -> GetResult:
        """Pack a directory."""
        check.between("limit", request.limit, 1, check.BLOB_LIMIT)
        held = self._used(self._find(request.sandbox))
        full = check.path("path", request.path, anywhere=held.spec.image is not None, folder=True)
        with self._passing(held) as target:
            packed = await self._backend.get(request.sandbox, full, target, request.limit)
            size = target.stat().st_size
            found = GetResult(data=b"", size=size, entries=packed.entries, skipped=packed.skipped)
            if size > MESSAGE_LIMIT:
                return msgspec.structs.replace(found, blob=await self._store().put_file(target))
            return msgspec.structs.replace(found, data=await asyncio.to_thread(target.read_bytes))

    # Snapshots

    async def snapshot(self, request: SnapshotRequest) -> SnapshotInfo:
        """Keep the files of a sandbox."""
        check.identifier("snapshot", request.snapshot)
        check.between("ttl_s", request.ttl_s, 0.05, 30 * 86400)
        self._able("snapshot")
        if (known := self._same(request)) is None:
            held = self._used(self._ready(request.sandbox))
            async with held.keeping:
                # The same call may have come twice, and one may have waited for the other.
                known = self._same(request) or await self._take(held, request)
        return self._snapshot_info(request.snapshot, known)

    def _same(self, request: SnapshotRequest) -> Taken | None:
        """What a call is repeated for."""
        known = self._taken(request.snapshot)
        if known is None or request.snapshot not in self._backend.snapshots():
            return None
        if known.sandbox != request.sandbox:
            raise InvalidRequest(f"snapshot is {request.snapshot!r}, of another sandbox; allowed is an id for each")
        return known

    async def _take(self, held: Held, request: SnapshotRequest) -> Taken:
        size = await self._backend.snapshot(held.spec, request.snapshot)
        taken = Taken(
            boot=boot_id(),
            sandbox=request.sandbox,
            spec=held.spec,
            size=size,
            ttl_s=request.ttl_s,
            expires_at=monotonic() + request.ttl_s,
            environment=held.environment,
        )
        save(self._lease_path(request.snapshot), taken)
        return taken

    async def fork(self, request: ForkRequest) -> ForkResult:
        """Make sandboxes from a snapshot, all or none."""
        check.forking(request)
        self._able("fork")
        taken = self._known_snapshot(request.snapshot)
        save(self._lease_path(request.snapshot), self._renewed(taken))
        new = [name for name in request.sandboxes if name not in self._known]
        if self.count() + len(new) > self._max:
            raise InfraError(f"{self._node} holds {self.count()} sandboxes; allowed are {self._max}")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in new:
                    tasks.create_task(self._fork(name, request, taken))
        except* SandboxError as errors:
            for name in new:
                with contextlib.suppress(InfraError):  # what cannot be removed now is removed by `reap`
                    await self._end(name)
            raise next(_leaves(errors)) from errors
        return ForkResult(sandboxes=tuple([await self._settled(name) for name in request.sandboxes]))

    async def _fork(self, name: str, request: ForkRequest, taken: Taken) -> None:
        if name in self._known:  # the same call once more began it before this task did
            return
        now = monotonic()
        spec = msgspec.structs.replace(taken.spec, sandbox=name)
        held = Held(
            spec=spec,
            owner=request.owner,
            labels=dict(request.labels),
            created_at=now,
            lease=Lease.begin(now, request.ttl_s, request.idle_ttl_s),
            environment=taken.environment,
        )
        await self._make(held, partial(self._backend.fork, request.snapshot, spec))

    async def _settled(self, name: str) -> SandboxRef:
        held = self._find(name)
        await self._until(held, name, lambda: not held.making)
        return self._ref(self._find(name))

    async def restore(self, request: RestoreRequest) -> SandboxRef:
        """Give a sandbox the files of a snapshot."""
        self._able("snapshot")
        self._known_snapshot(request.snapshot)
        held = self._used(self._ready(request.sandbox))
        held.step(Event.VERIFY)  # nothing else may begin in it meanwhile
        held.making = True
        try:
            await self._forwards.close(request.sandbox)
            await self._backend.restore(held.spec, request.snapshot)
        finally:
            held.making = False
            held.step(Event.VERIFIED)
            self._wake.set()
            if held.state is State.DESTROYING:  # it was removed meanwhile, but not what was made after that
                await self._remove(request.sandbox)
        return self._ref(self._find(request.sandbox))

    async def drop(self, request: DropRequest) -> DropResult:
        """Forget a snapshot."""
        check.identifier("snapshot", request.snapshot)
        return DropResult(snapshot=request.snapshot, existed=await self._backend.drop(request.snapshot))

    async def reap(self) -> None:
        """Remove what is due until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().reap())
            tasks.create_task(self._reap_snapshots())
            tasks.create_task(self._trim())

    async def _trim(self) -> None:
        while True:
            try:
                await self._backend.trim()
            except OSError as error:
                log.warning("sandbox: outputs of commands could not be held to their bound: %s", error)
            await asyncio.sleep(TRIM_S)  # a file that grows tells nobody

    async def _reap_snapshots(self) -> None:
        while True:
            ends = [monotonic() + LOOK_S]
            for snapshot in self._backend.snapshots():
                taken = self._taken(snapshot)
                if taken is None:
                    continue
                if taken.expires_at > monotonic():
                    ends.append(taken.expires_at)
                    continue
                try:
                    await self._backend.drop(snapshot)
                    log.info("sandbox: snapshot %s dropped: its lease is over", snapshot)
                except SandboxError as error:
                    log.warning("sandbox: snapshot %s is dropped later: %s", snapshot, error)
            await asyncio.sleep(max(0.05, min(ends) - monotonic()))

    def _able(self, capability: str) -> None:
        can = self._backend.capabilities()
        if not getattr(can, capability):
            raise unsupported(capability, f"the verb for a {capability}", can.backend)

    def _used(self, held: Held) -> Held:
        held.lease = held.lease.used(monotonic())
        return held

    def _lease_path(self, snapshot: str) -> Path:
        return self._backend.snapshot_folder(snapshot) / "lease.json"

    def _taken(self, snapshot: str) -> Taken | None:
        return load(self._lease_path(snapshot), Taken)

    def _known_snapshot(self, snapshot: str) -> Taken:
        check.identifier("snapshot", snapshot)
        taken = self._taken(snapshot)
        if taken is None or snapshot not in self._backend.snapshots():
            raise InvalidRequest(f"snapshot is {snapshot[:120]!r}; allowed is one that was taken and not dropped")
        return taken

    @staticmethod
    def _renewed(taken: Taken) -> Taken:
        return msgspec.structs.replace(taken, expires_at=max(taken.expires_at, monotonic() + taken.ttl_s))

    def _snapshot_info(self, snapshot: str, taken: Taken) -> SnapshotInfo:
        return SnapshotInfo(
            snapshot=snapshot,
            node=self._node,
            sandbox=taken.sandbox,
            size=taken.size,
            expires_in_s=taken.expires_at - monotonic(),
        )

    @contextlib.contextmanager
    def _passing(self, held: Held) -> Iterator[Path]:
        """A file of the node for one call; it goes with the call, or with the sandbox."""
        path = self._backend.folder(held.spec.sandbox) / f"pass-{next(self._transfers)}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _store(self) -> Blobs:
        if self.blobs is None:
            raise InvalidRequest(f"blob is asked for; allowed is only what fits a message on {self._node}")
        return self.blobs

    async def _fetch(self, reference: str) -> Path:
        try:
            return await self._store().file(reference)
        except BlobMissingError as error:
            raise InvalidRequest(f"blob is {reference[:100]!r}; {error}") from error


def _leaves(errors: BaseExceptionGroup[SandboxError]) -> Iterator[SandboxError]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
