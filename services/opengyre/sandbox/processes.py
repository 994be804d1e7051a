"""Processes that are not our children: waiting for them, ending them, finding them by their marker."""

import asyncio
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress

from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.tree import SANDBOX_MARKER

GONE_BOUND_S = 15.0


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
    arguments, if ``matches`` says so of the marker's value; round after round until there is none.
    """
    for _ in range(20):
        found = [pid for pid, value in _marked() if matches(value)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                words = file.read(65536).split(b"\0")
            with open(f"/proc/{name}/cmdline", "rb") as file:
                arguments = file.read(65536).split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        key = SANDBOX_MARKER.encode()
        value = next((word[len(key) + 1 :] for word in words if word.startswith(key + b"=")), None)
        if value is None and key in arguments[:-1]:
            value = arguments[arguments.index(key) + 1]
        if value is not None:
            found.append((int(name), value.decode("utf-8", "replace")))
    return found
