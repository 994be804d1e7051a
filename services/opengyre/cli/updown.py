"""`gyre up` and `gyre down`: the embedded stack, before a terminal or detached.

Detached, a supervisor of its own session runs `gyre up` with its output in `<state>/logs/supervisor.log`; the command
waits for `stack.json` to say that everything runs, or that the supervisor has ended, within a bound.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from opengyre.cli import stack as stacks
from opengyre.cli.stack import Stack, StackError
from opengyre.cli.supervisor_child import rotate, tail
from opengyre.cli.supervisor_plan import EngineName
from opengyre.cli.up import READY_S, Options, Running, check, end_leftovers, end_sandboxes, running
from opengyre.shared.settings import Settings, load

DOWN_S = 120.0
"""Bound of an orderly end: five stages of at most 25 s each, rarely more than 3 in all."""
console = Console(stderr=True, highlight=False)

StateDir = Annotated[
    Path | None, typer.Option(help="Directory of the stack's state; default: setting state_dir (.gyre).")
]


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)


def up(
    hosts: Annotated[int, typer.Option(min=1, max=10_000, help="GPU hosts to stand in for.")] = 2,
    state_dir: StateDir = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the REST API.")] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="tiny trains for real, a process a host; vllm serves by vLLM; emulated only takes time. "
            "Default: host.engine."
        ),
    ] = None,
    host_processes: Annotated[int, typer.Option(min=1, max=64, help="Processes that emulated hosts share.")] = 1,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything runs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --detach: print stack.json.")] = False,
) -> None:
    """Start the embedded stack: NATS, Valkey and the seven services, on free loopback ports.

    Example: gyre up --hosts 2 --detach

    Example: gyre up --hosts 32 --engine emulated
    """
    settings = load()
    chosen = engine or settings.host.engine
    options = Options(state_dir or settings.state_dir, hosts, port, chosen, host_processes)
    if stacks.owner(options.state_dir.absolute()) is None:  # else it is said below that a stack runs already
        check(options, settings)
    if detach:
        try:
            stack = _detached(options)
        except KeyboardInterrupt:
            console.print(
                f"the stack in {options.state_dir} goes on starting; `gyre down` stops it", markup=False, soft_wrap=True
            )
            raise typer.Exit(130) from None
        if json:
            print(msgspec.json.encode(stack).decode())
        else:
            console.print(
                f"the stack runs at [bold]{stack.gateway}[/] (API key in {options.state_dir}/{stacks.FILE})",
                soft_wrap=True,
            )
    else:
        asyncio.run(_foreground(options, settings))


def down(
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was ended.")] = False,
) -> None:
    """Stop the embedded stack. Its state stays; the next `gyre up` goes on from it.

    Example: gyre down
    """
    directory = stacks.directory(state_dir)
    stopped, leftovers = stop(directory)
    if json:
        print(msgspec.json.encode({"stopped": stopped, "leftovers": leftovers}).decode())
    elif stopped or leftovers:
        console.print(f"the stack in {directory} is stopped", soft_wrap=True)
    else:
        console.print(f"no stack runs in {directory}", soft_wrap=True)


def stop(directory: Path) -> tuple[bool, list[str]]:
    """End the stack of `directory` with all its processes; whether one ran, and what was left of an earlier one."""
    if not directory.exists():
        return False, []
    pid = stacks.owner(directory)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not _gone(directory, pid, DOWN_S):
            console.print(f"the supervisor (process {pid}) did not end within {DOWN_S:g} s and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if not _gone(directory, pid, 10):
                raise StackError(f"process {pid} cannot be ended; it holds the lock of {directory}")
    leftovers = end_leftovers(directory)
    with stacks.Lock(directory):
        leftovers += asyncio.run(end_sandboxes(directory))
    return pid is not None, leftovers


def _gone(directory: Path, pid: int, bound_s: float) -> bool:
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        if stacks.owner(directory) != pid:
            return True
        time.sleep(0.05)
    return False


def _detached(options: Options) -> Stack:
    state = options.state_dir.absolute()
    with stacks.Lock(state):  # says at once when a stack runs already
        logs = state / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / "supervisor.log"
        rotate(log)
    command = [sys.executable, "-m", "opengyre.cli", "up", "--hosts", str(options.hosts), "--state-dir", str(state)]
    command += ["--engine", options.engine, "--host-processes", str(options.host_processes)]
    if options.port is not None:
        command += ["--port", str(options.port)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + READY_S + 10
    there: Stack | None = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StackError(last_words(log) or f"the supervisor ended with status {process.returncode}")
        there = stacks.read(state)
        if there is not None and there.supervisor_pid == process.pid and there.ready:
            process.returncode = 0  # it goes on without us
            return there
        time.sleep(0.05)
    process.returncode = 0
    lacking = there.missing if there is not None else {}
    what = "; ".join(f"{name}: {why}" for name, why in lacking.items()) or "no sign of the supervisor"
    raise StackError(f"not everything runs after {READY_S + 10:g} s ({what}); logs are in {logs}, `gyre down` stops it")


def last_words(log: Path) -> str:
    """Why a supervisor ended: its sentence where it has said one, else the end of its log."""
    lines = tail(log, 3)
    said = [line.removeprefix("gyre: ") for line in lines if line.startswith("gyre: ")]
    return said[-1] if said else " / ".join(lines)


async def _foreground(options: Options, settings: Settings) -> None:
    stopping = asyncio.Event()
    install_signals(stopping)
    async with running(options, settings, lambda line: console.print(line, markup=False)) as run:
        if console.is_terminal:
            await _show(run, stopping)
        else:
            await _tell(run, stopping)
        console.print("stopping")


def install_signals(stopping: asyncio.Event) -> None:
    """The first signal asks for an orderly end; the second ends this process, and the kernel its children."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


async def _tell(run: Running, stopping: asyncio.Event) -> None:
    ready = asyncio.create_task(run.wait_ready())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            lacking = ready.result()
            said = "; ".join(f"{name}: {why}" for name, why in lacking.items()) or f"ready at {run.stack.gateway}"
            console.print(said, markup=False)
        await stop
    finally:
        ready.cancel()
        stop.cancel()


async def _show(run: Running, stopping: asyncio.Event) -> None:
    with Live(_table(run), console=console, auto_refresh=False) as live:
        while not stopping.is_set():
            await run.supervisor.changed(1.0)
            live.update(_table(run), refresh=True)


def _table(run: Running) -> Table:
    table = Table(title=f"OpenGyre at {run.stack.gateway}", title_justify="left")
    for column in ("process", "state", "pid", "restarts", "waits for"):
        table.add_column(column)
    for name, child in run.supervisor.children.items():
        pid = str(child.pid or "")
        table.add_row(name, child.life.state.value, pid, str(child.life.restarts or ""), child.missing or "")
    return table
