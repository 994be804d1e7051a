"""Unit tests do no I/O: one that writes a file, opens a connection or starts a process fails, by an audit hook."""

import os
import sys
from collections.abc import Iterator

import pytest

OUTSIDE = {"socket.connect", "socket.bind", "subprocess.Popen", "os.posix_spawn"}
FILES = {"os.mkdir", "os.rename", "os.remove"}
NOT_THE_TESTS = ("__pycache__", ".hypothesis", "/dev/null", "torchinductor")
"""Python's byte code, hypothesis' examples, the null device, and what torch makes when it is first used."""
_running: list[str] = []


class IoInUnitTestError(AssertionError):
    """A unit test touched the outside."""


def _audit(event: str, args: tuple[object, ...]) -> None:
    if not _running:
        return
    writes = event in FILES
    if event == "open":
        flags = args[2]
        writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event in OUTSIDE or (writes and not any(part in str(args[0]) for part in NOT_THE_TESTS)):
        raise IoInUnitTestError(f"{_running[-1]}: {event} {args[:2]!r}: I/O belongs to tests/integration")


sys.addaudithook(_audit)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if "unit" in item.path.parts:
        _running.append(item.name)
    yield
    _running.clear()
