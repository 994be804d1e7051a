"""What `gyre bench router` measures: an engine's host, the rollout service and a broker, each a process of its own.

Executions run an agent that is a program; the program is this process, and so is their sandbox, which only says that it
runs. So nothing but model calls is done.

Awaits: the services' readiness and each execution's agent, `READY_S` at most. A program that ends by itself and a host
that refuses the version wake the bench, and end it with the reason.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from opengyre.chat.open import open_renderer
from opengyre.cli.bench_model import write_policy
from opengyre.cli.bench_processes import beside, child_running, of_session, program
from opengyre.cli.stack import StackError
from opengyre.proto import ids, subjects
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import Harness, RunSpec, Scoring
from opengyre.proto.sandbox import (
    CheckResult,
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    ForwardRequest,
    ForwardResult,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    StatRequest,
    VerifyRequest,
    VerifyResult,
)
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.weights import WeightsPublished, WeightsRefused
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.rollout.prompt import Renderer
from opengyre.shared import embedded
from opengyre.shared.bus import Bucket, Bus, Endpoint, bootstrap, follow, serving

RUN = "bench"
NODE = "bench"
CONTEXT = 4096
READY_S = 300.0
SAY_S = 5.0
"""Between signs of life while services start."""


@dataclass(frozen=True)
class Where:
    """`processes`: name -> process ids. `engine`: URL of the engine's own endpoint, and the model's name there."""

    bus: Bus
    sandboxes: "Sandboxes"
    endpoints: Endpoints
    renderer: Renderer
    rollout: str
    host: str
    engine: str
    model: str
    processes: Mapping[str, Sequence[int]]


class Sandboxes:
    """A node whose programs run until they are told to end."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[str, tuple[str, asyncio.Event]] = {}
        self._gone: set[str] = set()
        self._changed = asyncio.Condition()

    async def running(self, executions: Sequence[str], *, count: int) -> None:
        """Wait until so many of them run their program."""
        async with asyncio.timeout(READY_S), self._changed:
            await self._changed.wait_for(lambda: sum(name in self._running for name in executions) == count)

    async def end(self, executions: Sequence[str]) -> None:
        """End their programs, and wait until they have ended themselves."""
        for name in executions:
            self._running[name][1].set()
        async with asyncio.timeout(READY_S), self._changed:
            await self._changed.wait_for(lambda: self._gone.issuperset(executions))

    async def _create(self, spec: SandboxSpec) -> SandboxRef:
        return SandboxRef(sandbox=spec.sandbox, node=NODE, isolated=True, expires_in_s=spec.ttl_s)

    async def _execute(self, request: ExecRequest) -> ExecResult:
        over = asyncio.Event()
        async with self._changed:
            self._running[request.sandbox] = (request.exec_id, over)
            self._changed.notify_all()
        try:
            await over.wait()
        finally:
            async with self._changed:
                del self._running[request.sandbox]
                self._changed.notify_all()
        return ExecResult(
            exec_id=request.exec_id, exit_code=0, stdout="", stderr="", stdout_bytes=0, stderr_bytes=0,
            stdout_truncated=False, stderr_truncated=False, timed_out=False, duration_s=0.0, isolated=True,
        )  # fmt: skip

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        parts = tuple(CheckResult(name=check.name, passed=1.0, weight=check.weight) for check in request.checks)
        return VerifyResult(verify_id=request.verify_id, parts=parts, passed=len(parts), total=len(parts), valid=True)

    async def _renew(self, request: RenewRequest) -> SandboxRef:
        return SandboxRef(sandbox=request.sandbox, node=NODE, isolated=True)

    async def _forward(self, request: ForwardRequest) -> ForwardResult:
        return ForwardResult(port=request.port)

    async def _stat(self, request: StatRequest) -> SandboxInfo:
        held = self._running.get(request.sandbox)
        running = () if held is None else (held[0],)
        return SandboxInfo(
            sandbox=request.sandbox, node=NODE, owner="", labels={}, isolated=True, age_s=0.0, expires_in_s=60.0,
            execs=len(running), running=running,
        )  # fmt: skip

    async def _destroy(self, request: DestroyRequest) -> DestroyResult:
        async with self._changed:
            self._gone.add(request.sandbox)
            self._changed.notify_all()
        return DestroyResult(sandbox=request.sandbox, existed=True)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator["Sandboxes"]:
        own = {
            "exec": Endpoint(ExecRequest, self._execute),
            "verify": Endpoint(VerifyRequest, self._verify),
            "renew": Endpoint(RenewRequest, self._renew),
            "forward": Endpoint(ForwardRequest, self._forward),
            "stat": Endpoint(StatRequest, self._stat),
            "destroy": Endpoint(DestroyRequest, self._destroy),
        }
        async with (
            serving(self._bus, "sandbox", "any", {"create": Endpoint(SandboxSpec, self._create)}),
            serving(self._bus, "sandbox", NODE, own),
        ):
            try:
                yield self
            finally:
                for _, over in self._running.values():
                    over.set()


def dispatch(number: int, calls: int, tokens: int) -> EpisodeDispatch:
    """An execution that makes so many calls of so many tokens each."""
    group = ids.group_id(RUN, number)
    execution = ids.execution_id(group, 0)
    return EpisodeDispatch(
        run=RUN, group=group, execution=execution, members=(execution,), version=0, seed=number,
        task=TaskSpec(
            task=f"t{number}", instruction="talk", checks=(Check(name="talked", command="true", weight=1.0),)
        ),
        harness=Harness(
            agent="program", program="talk", max_turns=calls + 1, max_tokens=tokens, context_tokens=CONTEXT,
            time_budget_s=3600.0,
        ),
        scoring=Scoring(grading="shared"),
        min_members=1,
    )  # fmt: skip


def _make_version(folder: Path) -> WeightsPublished:
    """Version 0 of a small policy that was never trained, and the run's model directory."""
    from opengyre.weights.write import version_directory, write_version

    directory = folder / "model"
    tensors = write_policy(directory, CONTEXT)
    extra = {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}
    manifest = write_version(
        tensors, version_directory(folder / "state" / "weights" / RUN, 0),
        run=RUN, version=0, parent=None, step=0, extra=extra,
    )  # fmt: skip
    return WeightsPublished(run=RUN, manifest=manifest)


@contextlib.asynccontextmanager
async def stack(engine: str, most: int, folder: Path, say: Callable[[str], None]) -> AsyncIterator[Where]:
    """Everything, ready, for up to `most` executions at a time; its files lie in `folder`.

    Raises an `ExceptionGroup` of a `TimeoutError` where it does not become ready, and of a `StackError` with the reason
    where a program of it ends or the host refuses the version.
    """
    port = embedded.free_port()
    url = f"nats://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GYRE_BUS__URL": url,
        "GYRE_STATE_DIR": str(folder / "state"),
        "GYRE_LOG__LEVEL": "warning",
        "GYRE_ROLLOUT__MAX_EPISODES": str(2 * most),
        "GYRE_HOST__ENGINE": engine,
        "GYRE_HOST__CAPACITY": str(most),
        "GYRE_HOST__TOKENS_PER_S": "100",
        "GYRE_HOST__DRY_SWITCH": "false",
        "GYRE_HOST__VLLM_CONTEXT": str(CONTEXT),
    }
    python = [sys.executable, "-m"]
    say(f"starts a broker, a host with engine {engine} and the rollout service")
    published = await asyncio.to_thread(_make_version, folder)
    nats = program(embedded.nats_command(folder / "nats", port), environment, folder / "broker.log")
    async with (
        nats as broker,
        beside(broker.ended()),
        Bus(url, "bench") as bus,
        Sandboxes(bus).up() as sandboxes,
    ):
        await bootstrap(bus)
        await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, RunSpec(run=RUN, model=str(folder / "model")))
        await bus.publish(subjects.weights(RUN, "published"), published)
        async with (
            program([*python, "opengyre.host"], environment, folder / "host.log") as host,
            program([*python, "opengyre.rollout"], environment, folder / "rollout.log") as rollout,
            beside(host.ended(), rollout.ended()),
        ):
            async with beside(refused(bus), _tell(engine, say)):
                host_url, rollout_url = await _ready(bus)
            pids = {"broker": broker.pid, "rollout": rollout.pid, "host": host.pid, "client": os.getpid()}
            where = Where(
                bus, sandboxes, Endpoints(load_secret(folder / "state")),
                await asyncio.to_thread(open_renderer, folder / "model"), rollout_url, host_url, host_url, RUN,
                {name: [pid] for name, pid in pids.items()},
            )  # fmt: skip
            yield _with_vllm(where, host.pid) if engine == "vllm" else where


async def refused(bus: Bus) -> NoReturn:
    """Wait until a host refuses the bench's version; raises `StackError` with what it says."""
    async for stored in follow(bus, subjects.WEIGHTS, subjects.weights(RUN, "refused")):
        event = stored.readable()
        if isinstance(event, WeightsRefused):
            raise StackError(f"the host of the bench does not serve: {event.error}")
    raise AssertionError("a stream that is followed has no end")


async def _tell(engine: str, say: Callable[[str], None]) -> NoReturn:
    """Signs of life, until it is cancelled."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(SAY_S)
        say(f"the host starts (engine {engine}): {loop.time() - began:.0f} s")


def _with_vllm(where: Where, host: int) -> Where:
    """vLLM's own server is the engine."""
    found = child_running(host, "gyre_vllm_launch")
    assert found is not None, "its host serves, so it runs"
    server, command = found
    port = command[len(command) - 1 - command[::-1].index("--port") + 1]
    processes = {**where.processes, "vllm": of_session(server)}
    return replace(where, engine=f"http://127.0.0.1:{port}", model="policy", processes=processes)


async def _ready(bus: Bus) -> tuple[str, str]:
    """URLs of the host and of the rollout service."""
    async with (
        asyncio.timeout(READY_S),
        Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
        Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as services,
    ):
        while not any(status.state is HostState.ROLLOUT for status in hosts.values.values()):
            await hosts.changed(1.0)
        while True:
            for status in services.values.values():
                if status.service == "rollout" and status.ready:
                    return next(iter(hosts.values.values())).url, status.url
            await services.changed(1.0)
