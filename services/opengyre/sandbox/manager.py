"""Sandboxes with their leases, over any backend.

Invariants:
- a sandbox is registered, in memory and in its folder, before its first side effect, and forgotten after its last;
- calls are idempotent by their ids; a repeated one joins or answers what is recorded;
- nothing outlives its lease: `reap` removes what is due, what died and what could not be removed before.

States: see `opengyre.sandbox.lease`. Awaits: whoever joins a creation or a verification waits for its entry's event,
set when that ends, for `JOIN_BOUND_S` at most; whoever joins a removal for its end, which the backend bounds; `reap`
waits for the next lease's end, a wake-up or `LOOK_S`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from opengyre.proto.sandbox import (
    DestroyResult,
    ExecRequest,
    ExecResult,
    ForwardRequest,
    ForwardResult,
    PrepareRequest,
    PrepareResult,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    VerifyRequest,
    VerifyResult,
)
from opengyre.sandbox import check
from opengyre.sandbox.allowlist import PORT
from opengyre.sandbox.apart import building_s
from opengyre.sandbox.core import (
    PLAIN,
    Backend,
    InfraError,
    InvalidRequest,
    Options,
    SandboxBusy,
    SandboxError,
    SandboxGone,
    Spec,
)
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.evaluate import is_clean, is_of
from opengyre.sandbox.evaluations import Evaluations, Hands
from opengyre.sandbox.forward import Forwards
from opengyre.sandbox.held import Entry, Held
from opengyre.sandbox.lease import Effect, Event, Lease, State
from opengyre.sandbox.records import load, save

log = logging.getLogger("gyre.sandbox")

JOIN_BOUND_S = 60.0
LOOK_S = 5.0
CREATE_AT_ONCE = 8


def _now() -> float:
    # The monotonic clock itself, not the loop's: a lease's record is read by the next process of this boot.
    return time.monotonic()


class Manager:
    """All sandboxes of one node."""

    def __init__(
        self,
        backend: Backend,
        node: str,
        defaults: Spec,
        max_sandboxes: int = 512,
        environments: Environments | None = None,
    ) -> None:
        self._backend = backend
        self._node = node
        self._defaults = defaults
        self._environments = environments or Environments(backend, node)
        self._max = max_sandboxes
        self._known: dict[str, Held] = {}
        self._wake = asyncio.Event()
        self._forwards = Forwards(backend.listen)
        # More at once would only make each slower.
        self._creating = asyncio.Semaphore(CREATE_AT_ONCE)
        hands = Hands(self._find, self._ready, self._until, self._make, self._end, self._exec)
        self._evaluations = Evaluations(backend, node, defaults, self._environments, hands)

    async def start(self) -> int:
        """Take up the sandboxes that live; their number."""
        now = _now()
        for name in await self._backend.start():
            entry = load(self._backend.folder(name) / "manager.json", Entry)
            # An evaluation that was under way is asked for again, and begins again.
            if entry is None or is_clean(name):
                await self._backend.destroy(name)
                continue
            # How long nobody used it is not written down; the idle time begins anew, the lease does not.
            lease = Lease(expires_at=entry.expires_at, idle_ttl_s=entry.idle_ttl_s, used_at=now)
            self._known[name] = Held(
                spec=entry.spec,
                owner=entry.owner,
                labels=entry.labels,
                created_at=entry.created_at,
                lease=lease,
                environment=entry.environment,
                state=State.READY,
                making=False,
            )
            await self._connect(entry.spec)
        for snapshot in self._backend.snapshots():
            if snapshot.startswith("verify."):
                await self._backend.drop(snapshot)
        return len(self._known)

    async def _connect(self, spec: Spec) -> None:
        """Open the way out of a sandbox again; `reap` tries what is not open then."""
        try:
            await self._backend.connect(spec)
        except (OSError, SandboxError) as error:
            # Only what runs in it can hold the port: that is its own loss.
            log.warning("sandbox: %s has no way out for now: %s", spec.sandbox, error)

    async def stop(self) -> None:
        """Let go; sandboxes and running commands stay for the next start, half-made and doomed ones do not."""
        for name, sandbox in list(self._known.items()):
            if is_clean(name) or sandbox.state not in (State.READY, State.VERIFYING):
                # What cannot be removed now is removed by the next start.
                with suppress(InfraError):
                    await self._remove(name)
        await self._forwards.close_all()
        await self._backend.stop()

    def count(self) -> int:
        """Sandboxes of any state."""
        return len(self._known)

    def _find(self, name: str) -> Held:
        sandbox = self._known.get(name)
        if sandbox is None or sandbox.state in (State.DESTROYING, State.GONE):
            raise SandboxGone(f"sandbox {name[:120]!r} is not on {self._node}: destroyed, expired or never made")
        if sandbox.lease.ends_at(sandbox.running > 0) <= _now():
            raise SandboxGone(f"the lease of sandbox {name!r} is over")
        return sandbox

    def _ready(self, name: str) -> Held:
        sandbox = self._find(name)
        if sandbox.state is not State.READY:
            raise SandboxBusy(f"sandbox {name!r} is {sandbox.state.value}; try again when that has ended")
        return sandbox

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Make a sandbox, or answer the one that has this id."""
        made, files = check.spec(spec, self._defaults)
        check.capable(made, self._backend.capabilities())
        known = self._known.get(spec.sandbox)
        if known is not None:
            await self._until(known, spec.sandbox, lambda: known.state is not State.CREATING)
            return self._ref(self._find(spec.sandbox))
        held = sum(not is_clean(name) for name in self._known)
        if held >= self._max:
            raise SandboxBusy(f"{self._node} holds {held} sandboxes; allowed are {self._max}")
        now = _now()
        build = partial(self._backend.create, made, files)
        sentence, more_s = "", 0.0
        if spec.environment is not None:
            made, origin = self._environments.specify(made, spec.environment)
            build = partial(self._environments.create, made, spec.environment, origin, files)
            sentence = origin.sentence
            more_s = building_s(spec.environment, origin)
        sandbox = Held(
            spec=made,
            owner=spec.owner,
            labels=dict(spec.labels),
            created_at=now,
            lease=Lease.begin(now, spec.ttl_s + more_s, spec.idle_ttl_s + more_s),
            environment=sentence,
        )
        await self._make(sandbox, build)
        made_one = self._find(spec.sandbox)
        if more_s:  # the lease is from when it can be used
            made_one.lease = Lease.begin(_now(), spec.ttl_s, spec.idle_ttl_s)
            self._save(made_one)
        return self._ref(made_one)

    async def _make(self, sandbox: Held, build: Callable[[], Awaitable[None]]) -> None:
        name = sandbox.spec.sandbox
        self._known[name] = sandbox
        try:
            async with self._creating:
                self._find(name)
                await build()
            self._save(sandbox)
            sandbox.step(Event.CREATED)
        except BaseException:
            sandbox.step(Event.FAILED)
            raise
        finally:
            sandbox.making = False
            self._wake.set()
            if sandbox.state is State.DESTROYING:
                await self._remove(name)

    async def _until(self, sandbox: Held, name: str, done: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(JOIN_BOUND_S):
                while not done():
                    await sandbox.changed.wait()
        except TimeoutError:
            raise SandboxBusy(f"sandbox {name!r} is {sandbox.state.value} for more than {JOIN_BOUND_S:g} s") from None

    def _save(self, sandbox: Held) -> None:
        entry = Entry(
            spec=sandbox.spec,
            owner=sandbox.owner,
            labels=sandbox.labels,
            created_at=sandbox.created_at,
            expires_at=sandbox.lease.expires_at,
            idle_ttl_s=sandbox.lease.idle_ttl_s,
            environment=sandbox.environment,
        )
        save(self._backend.folder(sandbox.spec.sandbox) / "manager.json", entry)

    def _ref(self, sandbox: Held) -> SandboxRef:
        left = sandbox.lease.ends_at(sandbox.running > 0) - _now()
        return SandboxRef(
            sandbox=sandbox.spec.sandbox,
            node=self._node,
            isolated=self._backend.isolated,
            expires_in_s=left,
            environment=sandbox.environment,
        )

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command once for its id."""
        check.execution(request)
        options = check.options(request)
        sandbox = self._ready(request.sandbox)
        bounds = request.timeout_s, request.output_limit
        return await self._exec(sandbox, request.exec_id, request.command, *bounds, options)

    async def forward(self, request: ForwardRequest) -> ForwardResult:
        """Open a port of a sandbox that leads outside, or lead it elsewhere."""
        check.forwarding(request)
        if self._ready(request.sandbox).spec.network == "allowlist" and request.port == PORT:
            raise InvalidRequest(f"port is {PORT}; allowed is another one, as the sandbox's proxy answers there")
        while not await self._forwards.point(request.sandbox, request.port, (request.host, request.target_port)):
            self._ready(request.sandbox)  # it is being removed or restored, or was restored meanwhile
        return ForwardResult(port=request.port)

    async def _exec(
        self, sandbox: Held, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> ExecResult:
        sandbox.running += 1
        try:
            return await self._backend.exec(sandbox.spec, exec_id, command, timeout_s, limit, options)
        finally:
            sandbox.running -= 1
            sandbox.lease = sandbox.lease.used(_now())

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Run the checks, once for the id, in the way that the request's mode says."""
        return await self._evaluations.verify(request)

    async def prepare(self, request: PrepareRequest) -> PrepareResult:
        """Make a sandbox ready for a step of a task, once for the id."""
        return await self._evaluations.prepare(request)

    async def read(self, name: str, path: str, limit: int) -> bytes:
        """Content of a file."""
        check.between("limit", limit, 0, check.FILE_LIMIT)
        sandbox = self._find(name)
        full = check.path("path", path, anywhere=sandbox.spec.image is not None)
        sandbox.lease = sandbox.lease.used(_now())
        return await self._backend.read(name, full, limit)

    async def write(self, name: str, path: str, data: bytes, mode: int) -> str:
        """Write a file; its absolute path."""
        known = self._known.get(name)
        full = check.path("path", path, anywhere=known is not None and known.spec.image is not None)
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
        return DestroyResult(sandbox=name, existed=await self._end(name))

    async def _end(self, name: str) -> bool:
        """Remove a sandbox with those that were made to evaluate it; False where there is none."""
        sandbox = self._known.get(name)
        remove = sandbox is not None and Effect.REMOVE in sandbox.step(Event.DESTROY)
        for other in [other for other in self._known if is_of(other, name)]:
            await self._end(other)
        if remove:
            await self._remove(name)
        return sandbox is not None

    async def _remove(self, name: str) -> None:
        sandbox = self._known.get(name)
        if sandbox is None:
            return
        # One at a time: what the second of two removes may be another sandbox of the same id already.
        async with sandbox.removing:
            if sandbox.state is State.GONE:
                return
            await self._forwards.close(name)
            try:
                await self._backend.destroy(name)
            except (OSError, SandboxError) as error:
                self._wake.set()
                raise InfraError(f"sandbox {name!r} could not be removed yet and is tried again: {error}") from error
            # A creation or a restoration that is under way fails now, removes what it made since, and forgets the
            # sandbox.
            if not sandbox.making and Effect.FORGET in sandbox.step(Event.DESTROYED):
                del self._known[name]

    def stat(self, name: str) -> SandboxInfo:
        """One sandbox."""
        return self._info(self._find(name))

    def listing(self, labels: Mapping[str, str]) -> tuple[SandboxInfo, ...]:
        """Those that carry all of the labels."""
        found = [one for one in self._known.values() if one.state in (State.READY, State.VERIFYING)]
        chosen = [one for one in found if all(one.labels.get(key) == value for key, value in labels.items())]
        told = []
        for one in sorted(chosen, key=lambda one: one.created_at):
            with suppress(SandboxGone):  # one whose restoration failed has nothing any more; `reap` removes it
                told.append(self._info(one))
        return tuple(told)

    def _info(self, sandbox: Held) -> SandboxInfo:
        now = _now()
        # One that is being made, or made anew with other files, has no commands to look at.
        execs, running = (0, []) if sandbox.making else self._backend.execs(sandbox.spec.sandbox)
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
            network=self._backend.network(sandbox.spec.sandbox),
        )

    async def reap(self) -> None:
        """Remove what is due until cancelled."""
        while True:
            self._wake.clear()
            for one in [one for one in self._known.values() if one.state is State.READY]:
                if one.spec.network == "allowlist":
                    await self._connect(one.spec)
            for name in await self._due():
                # While others were removed it may have been too, and another one made that has its id.
                if not await self._is_due(name):
                    continue
                try:
                    await self._end(name)
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
        return [name for name in list(self._known) if await self._is_due(name)]

    async def _is_due(self, name: str) -> bool:
        one = self._known.get(name)
        if one is None:
            return False
        if one.state is State.DESTROYING or one.lease.ends_at(one.running > 0) <= _now():
            return True
        if one.making or await self._backend.alive(name):
            return False
        # A restoration that began while that was looked at has ended its processes.
        return self._known.get(name) is one and not one.making
