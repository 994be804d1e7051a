"""Sandboxes with their leases, over any backend.

Invariants:
- a sandbox is registered, in memory and in its folder, before its first side effect, and forgotten after its last;
- calls are idempotent by their ids; a repeated one joins or answers what is recorded;
- nothing outlives its lease: `reap` removes what is due, what died and what could not be removed before.

States: see `opengyre.sandbox.lease`. Awaits: whoever joins a creation or a verification waits for its entry's event,
set when that ends, for `JOIN_BOUND_S` at most; `reap` waits for the next lease's end, a wake-up or `LOOK_S`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from opengyre.proto.sandbox import (
    DestroyResult,
    ExecRequest,
    ExecResult,
    ForwardRequest,
    ForwardResult,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    VerifyRequest,
    VerifyResult,
)
from opengyre.sandbox import check
from opengyre.sandbox.core import Backend, InfraError, InvalidRequest, SandboxBusy, SandboxError, SandboxGone, Spec
from opengyre.sandbox.forward import Forwards
from opengyre.sandbox.lease import Effect, Event, Lease, State, advance
from opengyre.sandbox.records import load, save
from opengyre.sandbox.verdict import judge, verdict

log = logging.getLogger("gyre.sandbox")

JOIN_BOUND_S = 60.0
LOOK_S = 5.0
CHECK_OUTPUT = 4096
CREATE_AT_ONCE = 8


def _now() -> float:
    # The monotonic clock itself, not the loop's: a lease's record is read by the next process of this boot.
    return time.monotonic()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """``manager.json``: what a service that starts again has to know."""

    spec: Spec
    owner: str
    labels: Mapping[str, str]
    created_at: float
    expires_at: float
    idle_ttl_s: float


class Quieted(msgspec.Struct, frozen=True):
    """``verify-*.quiet``: what the agent left running has been ended for this verification."""


@dataclass
class _Sandbox:
    spec: Spec
    owner: str
    labels: Mapping[str, str]
    created_at: float
    lease: Lease
    state: State = State.CREATING
    running: int = 0
    making: bool = True
    verifying: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = advance(self.state, event)
        self.changed.set()
        self.changed = asyncio.Event()
        return effects


class Manager:
    """All sandboxes of one node."""

    def __init__(self, backend: Backend, node: str, defaults: Spec, max_sandboxes: int = 512) -> None:
        self._backend = backend
        self._node = node
        self._defaults = defaults
        self._max = max_sandboxes
        self._known: dict[str, _Sandbox] = {}
        self._wake = asyncio.Event()
        self._forwards = Forwards(backend.listen)
        # More at once would only make each slower.
        self._creating = asyncio.Semaphore(CREATE_AT_ONCE)

    async def start(self) -> int:
        """Take up the sandboxes that live; their number."""
        now = _now()
        for name in await self._backend.start():
            entry = load(self._backend.folder(name) / "manager.json", Entry)
            if entry is None:
                await self._backend.destroy(name)
                continue
            # How long nobody used it is not written down; the idle time begins anew, the lease does not.
            lease = Lease(expires_at=entry.expires_at, idle_ttl_s=entry.idle_ttl_s, used_at=now)
            self._known[name] = _Sandbox(
                spec=entry.spec,
                owner=entry.owner,
                labels=entry.labels,
                created_at=entry.created_at,
                lease=lease,
                state=State.READY,
                making=False,
            )
        return len(self._known)

    async def stop(self) -> None:
        """Let go; sandboxes and running commands stay for the next start, half-made and doomed ones do not."""
        for name, sandbox in list(self._known.items()):
            if sandbox.state not in (State.READY, State.VERIFYING):
                # What cannot be removed now is removed by the next start.
                with suppress(InfraError):
                    await self._remove(name)
        await self._forwards.close_all()
        await self._backend.stop()

    def count(self) -> int:
        """Sandboxes of any state."""
        return len(self._known)

    def _find(self, name: str) -> _Sandbox:
        sandbox = self._known.get(name)
        if sandbox is None or sandbox.state in (State.DESTROYING, State.GONE):
            raise SandboxGone(f"sandbox {name[:120]!r} is not on {self._node}: destroyed, expired or never made")
        if sandbox.lease.ends_at(sandbox.running > 0) <= _now():
            raise SandboxGone(f"the lease of sandbox {name!r} is over")
        return sandbox

    def _ready(self, name: str) -> _Sandbox:
        sandbox = self._find(name)
        if sandbox.state is not State.READY:
            raise SandboxBusy(f"sandbox {name!r} is {sandbox.state.value}; try again when that has ended")
        return sandbox

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Make a sandbox, or answer the one that has this id."""
        made, files = check.spec(spec, self._defaults)
        known = self._known.get(spec.sandbox)
        if known is not None:
            await self._until(known, spec.sandbox, lambda: known.state is not State.CREATING)
            return self._ref(self._find(spec.sandbox))
        if len(self._known) >= self._max:
            raise SandboxBusy(f"{self._node} holds {len(self._known)} sandboxes; allowed are {self._max}")
        now = _now()
        sandbox = _Sandbox(
            spec=made,
            owner=spec.owner,
            labels=dict(spec.labels),
            created_at=now,
            lease=Lease.begin(now, spec.ttl_s, spec.idle_ttl_s),
        )
        self._known[spec.sandbox] = sandbox
        try:
            async with self._creating:
                self._find(spec.sandbox)
                await self._backend.create(made, files)
            self._save(sandbox)
            sandbox.step(Event.CREATED)
        except BaseException:
            sandbox.step(Event.FAILED)
            raise
        finally:
            sandbox.making = False
            self._wake.set()
            if sandbox.state is State.DESTROYING:
                await self._remove(spec.sandbox)
        return self._ref(self._find(spec.sandbox))

    async def _until(self, sandbox: _Sandbox, name: str, done: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(JOIN_BOUND_S):
                while not done():
                    await sandbox.changed.wait()
        except TimeoutError:
            raise SandboxBusy(f"sandbox {name!r} is {sandbox.state.value} for more than {JOIN_BOUND_S:g} s") from None

    def _save(self, sandbox: _Sandbox) -> None:
        entry = Entry(
            spec=sandbox.spec,
            owner=sandbox.owner,
            labels=sandbox.labels,
            created_at=sandbox.created_at,
            expires_at=sandbox.lease.expires_at,
            idle_ttl_s=sandbox.lease.idle_ttl_s,
        )
        save(self._backend.folder(sandbox.spec.sandbox) / "manager.json", entry)

    def _ref(self, sandbox: _Sandbox) -> SandboxRef:
        left = sandbox.lease.ends_at(sandbox.running > 0) - _now()
        return SandboxRef(
            sandbox=sandbox.spec.sandbox, node=self._node, isolated=self._backend.isolated, expires_in_s=left
        )

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command once for its id."""
        check.execution(request)
        sandbox = self._ready(request.sandbox)
        return await self._exec(sandbox, request.exec_id, request.command, request.timeout_s, request.output_limit)

    async def forward(self, request: ForwardRequest) -> ForwardResult:
        """Open a port of a sandbox that leads outside, or lead it elsewhere."""
        check.forwarding(request)
        self._ready(request.sandbox)
        await self._forwards.point(request.sandbox, request.port, (request.host, request.target_port))
        if self._known.get(request.sandbox) is None:  # removed meanwhile
            await self._forwards.close(request.sandbox)
            self._find(request.sandbox)
        return ForwardResult(port=request.port)

    async def _exec(self, sandbox: _Sandbox, exec_id: str, command: str, timeout_s: float, limit: int) -> ExecResult:
        sandbox.running += 1
        try:
            return await self._backend.exec(sandbox.spec, exec_id, command, timeout_s, limit)
        finally:
            sandbox.running -= 1
            sandbox.lease = sandbox.lease.used(_now())

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """End what the agent left running and run the checks, once for the id."""
        check.verification(request)
        sandbox = self._find(request.sandbox)
        if sandbox.verifying == request.verify_id:
            await self._until(sandbox, request.sandbox, lambda: sandbox.verifying != request.verify_id)
        path = self._backend.folder(request.sandbox) / f"verify-{request.verify_id}.json"
        recorded = load(path, VerifyResult)
        if recorded is not None:
            return recorded
        sandbox = self._ready(request.sandbox)
        sandbox.verifying = request.verify_id
        sandbox.step(Event.VERIFY)
        try:
            result = await self._verify(sandbox, request)
            self._record(request.sandbox, path, result)
            return result
        finally:
            sandbox.verifying = None
            sandbox.step(Event.VERIFIED)

    def _record(self, name: str, path: Path, value: msgspec.Struct) -> None:
        try:
            save(path, value)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {name!r} was destroyed") from None

    async def _verify(self, sandbox: _Sandbox, request: VerifyRequest) -> VerifyResult:
        name = request.sandbox
        quieted = self._backend.folder(name) / f"verify-{request.verify_id}.quiet"
        if not quieted.exists():
            # Written down, so that a service that starts again does not end the checks that go on meanwhile.
            await self._backend.quiet(name)
            self._record(name, quieted, Quieted())
        parts = []
        for number, part in enumerate(request.checks):
            # A dot is in no caller's id.
            exec_id = f"verify.{request.verify_id}.{number}"
            try:
                done = await self._exec(sandbox, exec_id, part.command, request.timeout_s, CHECK_OUTPUT)
            except InfraError as error:
                return msgspec.structs.replace(
                    verdict(request.verify_id, parts, len(request.checks), isolated=self._backend.isolated),
                    infra_error=f"check {part.name!r} could not be run: {error}",
                )
            parts.append(judge(part, done))
            if parts[-1].error is not None:
                break
        return verdict(request.verify_id, parts, len(request.checks), isolated=self._backend.isolated)

    async def read(self, name: str, path: str, limit: int) -> bytes:
        """Content of a file."""
        check.between("limit", limit, 0, check.FILE_LIMIT)
        full = check.path("path", path)
        sandbox = self._find(name)
        sandbox.lease = sandbox.lease.used(_now())
        return await self._backend.read(name, full, limit)

    async def write(self, name: str, path: str, data: bytes, mode: int) -> str:
        """Write a file; its absolute path."""
        full = check.path("path", path)
        if len(data) > check.FILE_LIMIT:
            raise InvalidRequest(f"data has {len(data)} bytes; allowed are {check.FILE_LIMIT}")
        check.between("mode", mode, 0, 0o777)
        sandbox = self._ready(name)
        sandbox.lease = sandbox.lease.used(_now())
        await self._backend.write(name, full, data, mode)
        return full

    def renew(self, request: RenewRequest) -> SandboxRef:
        """Lengthen a lease, never shorten it."""
        check.between("ttl_s", request.ttl_s, 0.05, 30 * 86400)
        sandbox = self._find(request.sandbox)
        sandbox.lease = sandbox.lease.renewed(_now(), request.ttl_s)
        if request.owner is not None:
            sandbox.owner = request.owner
        if sandbox.state is not State.CREATING:
            self._save(sandbox)
        return self._ref(sandbox)

    async def destroy(self, name: str) -> DestroyResult:
        """Leave nothing of it, waiting for nothing that runs in it."""
        check.identifier("sandbox", name)
        sandbox = self._known.get(name)
        if sandbox is None:
            return DestroyResult(sandbox=name, existed=False)
        if Effect.REMOVE in sandbox.step(Event.DESTROY):
            await self._remove(name)
        return DestroyResult(sandbox=name, existed=True)

    async def _remove(self, name: str) -> None:
        sandbox = self._known.get(name)
        if sandbox is None:
            return
        await self._forwards.close(name)
        try:
            await self._backend.destroy(name)
        except (OSError, SandboxError) as error:
            self._wake.set()
            raise InfraError(f"sandbox {name!r} could not be removed yet and is tried again: {error}") from error
        # A creation that is under way fails now, removes what it made since, and forgets the sandbox.
        if not sandbox.making and Effect.FORGET in sandbox.step(Event.DESTROYED):
            del self._known[name]

    def stat(self, name: str) -> SandboxInfo:
        """One sandbox."""
        return self._info(self._find(name))

    def listing(self, labels: Mapping[str, str]) -> tuple[SandboxInfo, ...]:
        """Those that carry all of the labels."""
        found = [one for one in self._known.values() if one.state in (State.READY, State.VERIFYING)]
        chosen = [one for one in found if all(one.labels.get(key) == value for key, value in labels.items())]
        return tuple(self._info(one) for one in sorted(chosen, key=lambda one: one.created_at))

    def _info(self, sandbox: _Sandbox) -> SandboxInfo:
        now = _now()
        ready = sandbox.state is not State.CREATING
        execs, running = self._backend.execs(sandbox.spec.sandbox) if ready else (0, [])
        return SandboxInfo(
            sandbox=sandbox.spec.sandbox,
            node=self._node,
            owner=sandbox.owner,
            labels=sandbox.labels,
            isolated=self._backend.isolated,
            age_s=now - sandbox.created_at,
            expires_in_s=sandbox.lease.ends_at(sandbox.running > 0) - now,
            execs=execs,
            running=tuple(running),
        )

    async def reap(self) -> None:
        """Remove what is due until cancelled."""
        while True:
            self._wake.clear()
            for name in await self._due():
                try:
                    await self.destroy(name)
                    log.info("sandbox: %s removed: its lease is over or it died", name)
                except InfraError as error:
                    log.warning("sandbox: %s", error)
            ends = [one.lease.ends_at(one.running > 0) for one in self._known.values()]
            # What could not be removed is due already: not before a moment has passed.
            wait = max(0.05, min([LOOK_S, *(end - _now() for end in ends)]))
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _due(self) -> list[str]:
        now = _now()
        due = []
        for name, one in list(self._known.items()):
            over = one.state is State.DESTROYING or one.lease.ends_at(one.running > 0) <= now
            if over or (one.state is not State.CREATING and not await self._backend.alive(name)):
                due.append(name)
        return due
