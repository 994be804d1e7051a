"""The rollout's end of the sandbox service: every request is repeated under its own id until it is answered.

`SandboxLostError` is the end of an episode: the sandbox is gone, or its machine cannot run commands. A service that
does not answer is none: it is waited for, and shown.

Awaits: each is woken by an answer; one attempt is bounded by the command's own timeout and `MARGIN_S`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import (
    SERVICE,
    DestroyRequest,
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
    StatRequest,
    VerifyRequest,
    VerifyResult,
)
from opengyre.proto.sandbox_trees import (
    DropRequest,
    DropResult,
    ForkRequest,
    ForkResult,
    SnapshotInfo,
    SnapshotRequest,
)
from opengyre.proto.task import TaskStep
from opengyre.shared.bus import Bus, RpcFailedError, RpcUnavailableError, call
from opengyre.shared.settings import RolloutSettings, SandboxSettings
from opengyre.shared.waits import Waits

log = logging.getLogger("gyre.rollout.sandboxes")

MARGIN_S = 10.0
PATIENCE_S = 5.0
COPYING_S = 120.0
"""For a snapshot or a fork: as long as a disk takes for the files of a task."""
FAULTS = 5
"""Failures of the machine in a row before its sandbox is given up."""
LOOK_S = 2.0
ABSENT = 2
"""After so many looks that do not find a program running, its answer is asked for again."""
SETUP_S = 600.0
"""As long as a step's setup may take."""
OUTPUT_LIMIT = 64 << 10

Reply = TypeVar("Reply")
Mode = Literal["shared", "separate", "live"]
"""Of `VerifyRequest`."""


class SandboxLostError(Exception):
    """The episode cannot go on in its sandbox."""


class SandboxFaultError(SandboxLostError):
    """The machine of the sandbox failed at what was asked, so often that it is given up."""


class InvalidCommandError(Exception):
    """The sandbox refuses the command itself; the agent is told."""


@dataclass(frozen=True)
class Sandboxes:
    bus: Bus
    waits: Waits
    rollout: RolloutSettings
    limits: SandboxSettings

    async def open(self, dispatch: EpisodeDispatch, owner: str, name: str | None = None) -> SandboxRef:
        """The execution's sandbox, made if it is not there, of its own name or `name`; raises `SandboxLostError`."""
        ttl = float(self.rollout.sandbox_ttl_s)
        spec = SandboxSpec(
            sandbox=name or dispatch.execution,
            owner=owner,
            labels=_labels(dispatch),
            files=dispatch.task.files,
            environment=dispatch.task.environment,
            workspace_mb=self.limits.workspace_mb,
            memory_mb=self.limits.memory_mb,
            pids=self.limits.pids,
            ttl_s=ttl,
            idle_ttl_s=ttl,
        )
        building = dispatch.task.environment
        # The first one of its environment on a node waits for that to be made.
        bound = MARGIN_S if building is None else MARGIN_S + building.longest_s
        ref = await self._ask("any", "create", spec, SandboxRef, bound)
        if ref.environment:
            log.info("sandbox %s: environment: %s", ref.sandbox, ref.environment)
        return ref

    async def check(self, ref: SandboxRef, owner: str) -> None:
        """Renew the lease, if it is there; raises `SandboxLostError`."""
        request = RenewRequest(sandbox=ref.sandbox, owner=owner, ttl_s=float(self.rollout.sandbox_ttl_s))
        await self._ask(ref.node, "renew", request, SandboxRef, MARGIN_S)

    async def execute(self, ref: SandboxRef, exec_id: str, command: str, timeout_s: float) -> ExecResult:
        """Run a command once; raises `SandboxLostError` or `InvalidCommandError`."""
        request = ExecRequest(
            sandbox=ref.sandbox,
            exec_id=exec_id,
            command=command,
            timeout_s=timeout_s,
            output_limit=OUTPUT_LIMIT,
        )
        return await self._ask(ref.node, "exec", request, ExecResult, timeout_s + MARGIN_S)

    async def forward(self, ref: SandboxRef, port: int, url: str) -> None:
        """Let the sandbox's `port` lead to the service at `url`; raises `SandboxLostError`, `InvalidCommandError`."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        request = ForwardRequest(sandbox=ref.sandbox, port=port, host=parts.hostname, target_port=parts.port)
        await self._ask(ref.node, "forward", request, ForwardResult, MARGIN_S)

    async def run_program(self, ref: SandboxRef, exec_id: str, command: str, timeout_s: float) -> ExecResult:
        """Run a command that may take hours; raises as `execute` does.

        The answer is lost with a service that starts again while it waits for the end. So every `LOOK_S` it is seen
        whether the command still runs, and where it does not, its answer is asked for again.
        """
        asking = asyncio.create_task(self.execute(ref, exec_id, command, timeout_s))
        absent = 0
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:
                info = await self._ask(ref.node, "stat", StatRequest(sandbox=ref.sandbox), SandboxInfo, MARGIN_S)
                absent = 0 if exec_id in info.running else absent + 1
                if absent == ABSENT and not asking.done():
                    absent = 0
                    await _cancelled(asking)
                    asking = asyncio.create_task(self.execute(ref, exec_id, command, timeout_s))
            return asking.result()
        finally:
            await _cancelled(asking)

    async def verify(self, ref: SandboxRef, dispatch: EpisodeDispatch, verify_id: str, mode: Mode) -> VerifyResult:
        """Run the task's checks once; raises `SandboxLostError`, `SandboxFaultError` at the first failure of the
        machine, or `InvalidCommandError`."""
        task = dispatch.task
        apart = task.tests is not None and task.tests.separate and mode == "shared"
        request = VerifyRequest(
            sandbox=ref.sandbox,
            verify_id=verify_id,
            checks=task.checks,
            tests=task.tests,
            timeout_s=dispatch.harness.command_timeout_s,
            mode="separate" if apart else mode,
        )
        return await self._ask(ref.node, "verify", request, VerifyResult, verifying_s(dispatch) + MARGIN_S, faults=1)

    async def prepare(self, ref: SandboxRef, prepare_id: str, step: TaskStep) -> str | None:
        """Bring what comes with a step, once; why that cannot be, or None. Raises `SandboxLostError`."""
        if not step.files and step.setup is None and step.healthcheck is None:
            return None
        request = PrepareRequest(
            sandbox=ref.sandbox,
            prepare_id=prepare_id,
            files=step.files,
            setup=step.setup,
            healthcheck=step.healthcheck,
        )
        waiting = step.healthcheck.longest_s if step.healthcheck is not None else 0.0
        try:
            done = await self._ask(ref.node, "prepare", request, PrepareResult, SETUP_S + waiting + MARGIN_S)
        except InvalidCommandError as error:
            return str(error)
        return done.fault

    async def snapshot(self, ref: SandboxRef, name: str) -> None:
        """Keep its files as they are now; raises `SandboxLostError`, or `InvalidCommandError` where its machine keeps
        none."""
        request = SnapshotRequest(sandbox=ref.sandbox, snapshot=name)
        await self._ask(ref.node, "snapshot", request, SnapshotInfo, COPYING_S)

    async def fork(self, snapshot: str, node: str, dispatch: EpisodeDispatch, owner: str, name: str) -> SandboxRef:
        """A sandbox that begins with a snapshot's files; raises `SandboxLostError`, `InvalidCommandError`."""
        ttl = float(self.rollout.sandbox_ttl_s)
        request = ForkRequest(
            snapshot=snapshot,
            sandboxes=(name,),
            owner=owner,
            labels=_labels(dispatch),
            ttl_s=ttl,
            idle_ttl_s=ttl,
        )
        made = await self._ask(node, "fork", request, ForkResult, COPYING_S)
        return made.sandboxes[0]

    async def drop(self, snapshot: str, node: str) -> None:
        """Forget a snapshot; if nobody answers now, its time to live ends it."""
        await self._let_go(node, "drop", DropRequest(snapshot=snapshot), DropResult)

    async def destroy(self, ref: SandboxRef) -> None:
        """Remove it; if nobody answers now, its lease ends it."""
        await self._let_go(ref.node, "destroy", DestroyRequest(sandbox=ref.sandbox), DestroyResult)

    async def _let_go(self, node: str, verb: str, request: msgspec.Struct, reply: type[Reply]) -> None:
        try:
            await call(self.bus, SERVICE, node, verb, request, reply, timeout_s=MARGIN_S, patience_s=PATIENCE_S)
        except (RpcFailedError, RpcUnavailableError) as error:
            log.info("%s is left to its time to live: %s", request, error)

    @contextlib.asynccontextmanager
    async def kept(self, held: Callable[[], SandboxRef], owner: str, *, at_once: bool) -> AsyncIterator[None]:
        """Renew the lease at a third of its time to live, and first `at_once`, for as long as the block lasts, of the
        sandbox that is `held` then."""
        ttl = float(self.rollout.sandbox_ttl_s)

        async def renew() -> None:
            if not at_once:
                await asyncio.sleep(ttl / 3)
            while True:
                ref = held()
                request = RenewRequest(sandbox=ref.sandbox, owner=owner, ttl_s=ttl)
                try:
                    await call(
                        self.bus, SERVICE, ref.node, "renew", request, SandboxRef, timeout_s=5, patience_s=ttl / 3
                    )
                except (RpcFailedError, RpcUnavailableError) as error:
                    # Whether it is really gone shows at the next use, which knows what to do about it.
                    log.warning("sandbox %s could not be renewed: %s", ref.sandbox, error)
                await asyncio.sleep(ttl / 3)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])

    async def _ask(
        self,
        target: str,
        verb: str,
        request: msgspec.Struct,
        reply: type[Reply],
        timeout_s: float,
        *,
        faults: int = FAULTS,
    ) -> Reply:
        failed = 0
        while True:
            try:
                with self.waits.on(f"the sandbox service ({verb})", timeout_s):
                    return await call(
                        self.bus, SERVICE, target, verb, request, reply, timeout_s=timeout_s, patience_s=PATIENCE_S
                    )
            except RpcUnavailableError as error:
                log.warning("%s; trying on", error)
            except RpcFailedError as error:
                if error.kind == "invalid_request":
                    raise InvalidCommandError(str(error)) from error
                if error.kind == "sandbox_gone":
                    raise SandboxLostError(str(error)) from error
                if error.kind != "sandbox_busy":
                    failed += 1
                    if failed >= faults:
                        raise SandboxFaultError(f"{verb} failed {failed} times: {error}") from error
                log.info("sandbox: %s on %s: %s; trying again", verb, target, error)
            await asyncio.sleep(min(0.1 * 2**failed, 2.0))


def _labels(dispatch: EpisodeDispatch) -> dict[str, str]:
    return {"run": dispatch.run, "group": dispatch.group, "execution": dispatch.execution}


def verifying_s(dispatch: EpisodeDispatch) -> float:
    """The longest that one evaluation of a task may take, in seconds."""
    tests = dispatch.task.tests
    if tests is None:
        return dispatch.harness.command_timeout_s * len(dispatch.task.checks)
    return tests.longest_s


async def _cancelled(task: "asyncio.Task[ExecResult]") -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # whoever waited for it has heard it
