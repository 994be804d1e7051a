"""Programs that a bench starts and ends, the processors that they have, and the time that they take of them.

Awaits: a program that was told to end does so within `END_S`, or is killed.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path

END_S = 30.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> AsyncIterator[int]:
    """Run `command` for as long as the block lasts; gives its process id."""
    with log.open("ab") as out:
        started = await asyncio.create_subprocess_exec(*command, env=environment, stdout=out, stderr=out)
    try:
        yield started.pid
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
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), processors)
