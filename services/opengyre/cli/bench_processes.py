"""Programs that a bench starts and ends, the processors that they have, and the time that they take of them.

Invariant: a program ends with the bench, also where that is killed. A terminal's Ctrl-C is the bench's to pass on.

Awaits: a program that was told to end does so within `END_S`, or is killed; `ended` is woken by a program's own end,
and stands beside a block that ends before the program is told to.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from opengyre.cli.stack import StackError
from opengyre.cli.supervisor_child import die_with, tail

END_S = 30.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Program:
    """One that runs. `log`: what it writes, named as the program is."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ended(self) -> NoReturn:
        """Wait until it has ended by itself; raises `StackError` with the last that it said."""
        status = await self.process.wait()
        said = await asyncio.to_thread(tail, self.log, 1)
        why = last_said(said[0]) if said else f"it said nothing; exit status {status}"
        raise StackError(f"the {self.log.stem} of the bench has ended: {why}")


def last_said(line: str) -> str:
    """The sentence of a line of a log: of a structured one its event, of a service's own that it ends with the rest."""
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line.strip()
    return str(fields.get("event") or line) if isinstance(fields, dict) else line


@contextlib.asynccontextmanager
async def beside(*watches: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[None]:
    """Run them beside the block, until it ends; what one of them raises ends the block, in an `ExceptionGroup`."""
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watch) for watch in watches]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()


@contextlib.asynccontextmanager
async def process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[int]:
    """Run `command` for as long as the block lasts; gives its process id."""
    async with program(command, environment, log) as running:
        yield running.pid


@contextlib.asynccontextmanager
async def program(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[Program]:
    """Run `command` for as long as the block lasts."""
    with log.open("ab") as out:
        started = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=out, stderr=out, start_new_session=True, preexec_fn=die_with(os.getpid())
        )
    try:
        yield Program(started, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.terminate()
        try:
            async with asyncio.timeout(END_S):
                await started.wait()
        except TimeoutError:
            started.kill()
            await started.wait()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; raises `OSError` where it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def processor_s(pids: Iterable[int]) -> float:
    """Processor time of these processes so far, without their children's, in steps of a clock's tick (10 ms)."""
    taken = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            taken += (int(fields[11]) + int(fields[12])) * _TICK_S
    return taken


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def child_running(parent: int, module: str) -> tuple[int, list[str]] | None:
    """The child of `parent` whose command line names `module`, and that command line."""
    for pid in _all():
        with contextlib.suppress(OSError):
            if int(_stat(pid)[1]) == parent:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                if module in command:
                    return pid, command
    return None


def of_session(leader: int) -> list[int]:
    """The processes of the session that `leader` leads."""
    found = []
    for pid in _all():
        with contextlib.suppress(OSError):
            if int(_stat(pid)[3]) == leader:
                found.append(pid)
    return found


def place(pids: Iterable[int], processors: Collection[int]) -> None:
    """Have all threads of these processes, and what they start from here on, run on these processors only."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), processors)
