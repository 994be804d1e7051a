"""Processes that are not our children: waiting for them, ending them, finding them by their marker."""

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from opengyre.sandbox.launch import kernel, tree
from opengyre.sandbox.launch.tree import SANDBOX_MARKER

GONE_BOUND_S = 15.0
KILL_BOUND_S = 3.0


async def ended(pid: int, started: int, timeout_s: float) -> bool:
    """Wait for the end of the process that started then, by pidfd; False where the time was over first."""
    try:
        fd = kernel.open_process(pid, started)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: over.done() or over.set_result(None))
    try:
        async with asyncio.timeout(timeout_s):
            await over
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return True


def kill(pid: int, started: int) -> None:
    """SIGKILL to exactly that process, if it is still there."""
    send(pid, started, signal.SIGKILL)


def send(pid: int, started: int, number: signal.Signals) -> None:
    """A signal to exactly that process, if it is still there."""
    with suppress(ProcessLookupError):
        fd = kernel.open_process(pid, started)
        try:
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def wait_gone(pid: int, started: int) -> None:
    """Wait for its end, for a bounded time."""
    with suppress(ProcessLookupError):
        fd = kernel.open_process(pid, started)
        try:
            select.select([fd], [], [], GONE_BOUND_S)
        finally:
            os.close(fd)


def kill_by_marker(matches: Callable[[str], bool]) -> None:
    """Kill every process that carries a sandbox's marker in its environment or, as bubblewrap itself does, in its
    arguments, if ``matches`` says so of the marker's value; round after round until there is none and nobody is
    arriving, whose marker cannot be read yet. For `KILL_BOUND_S` seconds at most.
    """
    deadline = time.monotonic() + KILL_BOUND_S
    while True:
        found, arriving = _look()
        mine = [pid for pid, value in found if matches(value)]
        for pid in mine:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not (mine or arriving) or time.monotonic() >= deadline:
            return
        time.sleep(0.001)


def _marked() -> list[tuple[int, str]]:
    return _look()[0]


def _look() -> tuple[list[tuple[int, str]], bool]:
    """Pids with their markers, and whether some process is becoming a program just now."""
    found, arriving = [], False
    for row in tree.read_table(SANDBOX_MARKER):
        value = row.marker or _argument(row.pid)
        if value is not None:
            found.append((row.pid, value))
        arriving = arriving or row.arriving
    return found, arriving


def _argument(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(1 << 16).split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    key = SANDBOX_MARKER.encode()
    return words[words.index(key) + 1].decode("utf-8", "replace") if key in words[:-1] else None
