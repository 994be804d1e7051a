"""A child process of the supervisor: how it is spawned, where it writes, and that it does not outlive its parent.

Invariant: a child is killed by the kernel when the supervisor ends, however that ends (PR_SET_PDEATHSIG, which is not
inherited: what a child starts and detaches, such as a sandbox, goes on and is found again).
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from opengyre.cli.supervisor_plan import Program

KEEP_LOGS = 3
LOG_BYTES = 32 << 20
PR_SET_PDEATHSIG = 1


def rotate(path: Path, keep: int = KEEP_LOGS) -> None:
    """Move `x.log` to `x.1.log`, that to `x.2.log` and so on; the oldest goes."""
    if not path.exists() or path.stat().st_size == 0:
        return
    numbered = [path.with_suffix(f".{i}{path.suffix}") for i in range(1, keep + 1)]
    for older, newer in zip(reversed(numbered), [*reversed(numbered[:-1]), path], strict=True):
        if newer.exists():
            newer.replace(older)


def size(path: Path) -> int:
    """Bytes of a log; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail(path: Path, lines: int = 3, *, start: int = 0, limit: int = 8192) -> list[str]:
    """The last lines of a log, of what was written after `start` bytes."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= end else 0, end - limit))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def die_with(parent: int) -> Callable[[], None] | None:
    """What a child does before it begins, so that the kernel ends it with its parent."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # resolved before the fork; only the call is made after it

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended between the fork and the line above
            os._exit(1)

    return bind


def _open(log: Path) -> int:
    if log.exists() and log.stat().st_size > LOG_BYTES:
        rotate(log)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


async def spawn(program: Program, log: Path) -> asyncio.subprocess.Process:
    """Start it, its output appended to `log`; raises `OSError`. From the main thread only: the bond is to a thread."""
    descriptor = await asyncio.to_thread(_open, log)
    try:
        return await asyncio.create_subprocess_exec(
            *program.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env={**os.environ, **program.environment},
            start_new_session=True,  # the terminal's Ctrl-C is the supervisor's to pass on, in its order
            preexec_fn=die_with(os.getpid()),
        )
    finally:
        os.close(descriptor)
