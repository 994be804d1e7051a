"""Evaluating what was done in a node's sandboxes, and making these ready for the steps of a task; each once for its id.

Invariants: an answer is recorded in the sandbox's folder before it is given, so that a repeated request gets the same;
what the agent left running has ended before anything is judged, except for ``live``, which judges a copy; sandboxes
that are made for an evaluation are gone with it, or with their leases.

Awaits: whoever repeats a request waits for the one under way, bounded by `Hands.until`; one command at a time, each
bounded by its timeout.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import msgspec

from opengyre.proto.sandbox import ExecResult, PrepareRequest, PrepareResult, VerifyRequest, VerifyResult
from opengyre.proto.task import TaskEnvironment
from opengyre.sandbox import apart, check
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
from opengyre.sandbox.evaluate import clean, evaluate, failed, lasts_s, own_name, snapshot_for
from opengyre.sandbox.harbor import Inside, collect, prepare, run_tests
from opengyre.sandbox.held import Held, Quieted
from opengyre.sandbox.lease import Event, Lease
from opengyre.sandbox.records import load, save
from opengyre.tasks.archives import unsqueeze
from opengyre.tasks.errors import TaskError


@dataclass(frozen=True)
class Hands:
    """What a manager lets its evaluations do with its sandboxes."""

    find: Callable[[str], Held]
    ready: Callable[[str], Held]
    until: Callable[[Held, str, Callable[[], bool]], Awaitable[None]]
    make: Callable[[Held, Callable[[], Awaitable[None]]], Awaitable[None]]
    end: Callable[[str], Awaitable[bool]]
    execute: Callable[[Held, str, str, float, int, Options], Awaitable[ExecResult]]


class Evaluations:
    """Of one node."""

    def __init__(self, backend: Backend, node: str, defaults: Spec, environments: Environments, hands: Hands) -> None:
        self._backend = backend
        self._node = node
        self._defaults = defaults
        self._environments = environments
        self._hands = hands

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Run the checks, once for the id, in the way that the request's mode says."""
        check.verification(request)
        if request.mode != "shared" and not self._backend.isolated:
            raise InvalidRequest(f"mode is {request.mode!r}; allowed is 'shared' on {self._node}, which cannot isolate")
        path = await self._place(request.sandbox, "verify", request.verify_id)
        if (recorded := load(path, VerifyResult)) is not None:
            return recorded
        live = request.mode == "live"
        with self._held(request.sandbox, request.verify_id, alone=not live) as sandbox:
            if request.tests is not None and sandbox.spec.image is None:
                raise InvalidRequest("tests are for a sandbox with an environment or an image; allowed here are checks")
            if not live:
                await self._quiet(request)
            own = request.tests is not None and request.tests.environment is not None
            make = self._shared if request.mode == "shared" and not own else self._separate
            result = await make(sandbox, request)
            self._record(request.sandbox, path, result)
            return result

    async def prepare(self, request: PrepareRequest) -> PrepareResult:
        """Make a sandbox ready for a step of a task, once for the id."""
        check.preparation(request)
        path = await self._place(request.sandbox, "prepare", request.prepare_id)
        if (recorded := load(path, PrepareResult)) is not None:
            return recorded
        with self._held(request.sandbox, request.prepare_id) as sandbox:
            result = PrepareResult(prepare_id=request.prepare_id, fault=await self._prepared(sandbox, request))
            self._record(request.sandbox, path, result)
            return result

    async def _place(self, name: str, kind: str, given: str) -> Path:
        """Where the answer to an id is recorded, once the one that is under way is over."""
        sandbox = self._hands.find(name)
        if sandbox.verifying == given:
            await self._hands.until(sandbox, name, lambda: sandbox.verifying != given)
        return self._backend.folder(name) / f"{kind}-{given}.json"

    @contextmanager
    def _held(self, name: str, given: str, *, alone: bool = True) -> Iterator[Held]:
        """A sandbox in which nothing else is evaluated meanwhile; `alone`: in which nothing else begins."""
        sandbox = self._hands.ready(name)
        if sandbox.verifying is not None:
            raise SandboxBusy(f"sandbox {name!r} is being evaluated; try again when that has ended")
        sandbox.verifying = given
        if alone:
            sandbox.step(Event.VERIFY)
        try:
            yield sandbox
        finally:
            sandbox.verifying = None
            sandbox.tell()
            if alone:
                sandbox.step(Event.VERIFIED)

    async def _prepared(self, sandbox: Held, request: PrepareRequest) -> str | None:
        inside = self._inside(sandbox, f"prepare.{request.prepare_id}")
        try:
            files = unsqueeze(request.files) if request.files else b""
            await prepare(files, request.setup, request.healthcheck, inside)
        except (TaskError, InvalidRequest) as error:
            return str(error)
        return None

    def _record(self, name: str, path: Path, value: msgspec.Struct) -> None:
        try:
            save(path, value)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {name!r} was destroyed") from None

    async def _quiet(self, request: VerifyRequest) -> None:
        quieted = self._backend.folder(request.sandbox) / f"verify-{request.verify_id}.quiet"
        if not quieted.exists():
            # Written down, so that a service that starts again does not end the checks that go on meanwhile.
            await self._backend.quiet(request.sandbox)
            self._record(request.sandbox, quieted, Quieted())

    async def _shared(self, sandbox: Held, request: VerifyRequest) -> VerifyResult:
        error = await self._collect(sandbox, request)
        if error is not None:
            return failed(request, error, isolated=self._backend.isolated)
        return await self._evaluate(sandbox, request)

    async def _evaluate(self, sandbox: Held, request: VerifyRequest) -> VerifyResult:
        if request.tests is None:
            execute = partial(self._execute, sandbox)
            return await evaluate(request, execute, isolated=self._backend.isolated)
        result = await run_tests(request.tests, request.verify_id, self._judging(sandbox, request))
        return msgspec.structs.replace(result, environment=sandbox.environment)

    async def _execute(
        self, sandbox: Held, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> ExecResult:
        return await self._hands.execute(sandbox, exec_id, command, timeout_s, limit, options)

    async def _collect(self, sandbox: Held, request: VerifyRequest) -> str | None:
        """Let the task's own commands prepare the evaluation; why that failed, or None."""
        if request.tests is None:
            return None
        return await collect(request.tests, self._judging(sandbox, request))

    def _judging(self, sandbox: Held, request: VerifyRequest) -> Inside:
        return self._inside(sandbox, f"verify.{request.verify_id}")

    def _inside(self, sandbox: Held, prefix: str) -> Inside:
        # A dot is in no caller's id.
        execute = partial(self._execute, sandbox)
        return Inside(self._backend, sandbox.spec, execute, prefix, self._environments.offline)

    async def _separate(self, sandbox: Held, request: VerifyRequest) -> VerifyResult:
        """In a sandbox of its own, which is gone afterwards."""
        made: list[Held] = []
        try:
            return await self._apart(sandbox, request, made)
        except InvalidRequest:
            raise
        except SandboxError as error:
            # Of the one that is evaluated, or only of the one that was made for that?
            self._hands.find(request.sandbox)
            if not await self._backend.alive(request.sandbox):
                raise SandboxGone(f"sandbox {request.sandbox!r} ended while it was evaluated") from error
            return failed(request, f"the work could not be evaluated apart: {error}", isolated=self._backend.isolated)
        finally:
            for one in made:
                await self._gone(one)

    async def _apart(self, sandbox: Held, request: VerifyRequest, made: list[Held]) -> VerifyResult:
        """On a copy, or in the verifier's own environment with artifacts of the work or of a copy.

        ``made`` is filled with the sandboxes that have to be ended.
        """
        own = request.tests.environment if request.tests is not None else None
        live = request.mode == "live"  # then nothing of ours runs where the agent is
        error = None if live else await self._collect(sandbox, request)
        judged = sandbox
        if error is None and (live or own is None):
            judged = self._grading(sandbox, request, clean(sandbox.spec, request.verify_id), sandbox.environment)
            made.append(judged)
            await self._copy(sandbox, judged)
            error = await self._collect(judged, request) if live else None
        if error is not None:
            return failed(request, error, isolated=self._backend.isolated)
        if own is not None:
            judged = await self._own(sandbox, judged, request, own, made)
        return await self._evaluate(judged, request)

    def _grading(
        self, sandbox: Held, request: VerifyRequest, spec: Spec, environment: str, more_s: float = 0.0
    ) -> Held:
        now = monotonic()
        lasting = lasts_s(request) + more_s
        return Held(
            spec=spec,
            owner=request.sandbox,
            labels={**sandbox.labels, "evaluation": request.verify_id},
            created_at=now,
            lease=Lease.begin(now, lasting, lasting),
            environment=environment,
        )

    async def _own(
        self, sandbox: Held, source: Held, request: VerifyRequest, environment: TaskEnvironment, made: list[Held]
    ) -> Held:
        """A fresh sandbox of the verifier's environment, with the artifacts of ``source``."""
        assert request.tests is not None
        name = own_name(sandbox.spec, request.verify_id)
        spec, origin = apart.own(self._environments, self._defaults, name, environment)
        more_s = apart.building_s(environment, origin)
        judged = self._grading(sandbox, request, spec, origin.sentence, more_s)
        made.append(judged)
        await self._hands.make(judged, partial(self._environments.create, spec, environment, origin, {}))
        inside = self._judging(source, request), self._judging(judged, request)
        await apart.carry(request.tests.artifacts, *inside)
        return judged

    async def _copy(self, sandbox: Held, grading: Held) -> None:
        """Make a clean sandbox with what another one holds: its workspace, or all of its root where it has an image."""
        if sandbox.spec.image is None:
            await self._hands.make(grading, partial(self._backend.create, grading.spec, {}))
            await self._backend.copy(sandbox.spec.sandbox, grading.spec)
            return
        snapshot = snapshot_for(grading.spec.sandbox)
        try:
            async with sandbox.keeping:
                await self._backend.snapshot(sandbox.spec, snapshot)
            await self._hands.make(grading, partial(self._backend.fork, snapshot, grading.spec))
        finally:
            await self._backend.drop(snapshot)

    async def _gone(self, sandbox: Held) -> None:
        # What cannot be removed now is removed by the manager's reaper.
        with suppress(InfraError):
            await self._hands.end(sandbox.spec.sandbox)
