"""What the outputs of a sandbox's commands take on the node: bounded together, whoever holds the files."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.sandbox import processes
from opengyre.sandbox.commands import SPOOL_MB
from opengyre.sandbox.docker import Docker
from support import both_backends, eventually
from support.both_backends import Box, Node

pytestmark = pytest.mark.sandbox
MB = 1 << 20


@pytest.fixture(params=both_backends.BOTH)
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    async with both_backends.started(request.param, tmp_path / "n") as made:
        yield made


@pytest.fixture
async def box(node: Node) -> Box:
    await node.create("s")
    return Box(node, "s")


def taken(node: Node) -> int:
    """Bytes on the disk of all that the node keeps, and of the files without a name that its sandboxes hold."""
    total = 0
    for folder, _, names in os.walk(node.root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a monitor clears up just after it has answered
                total += (Path(folder) / name).lstat().st_blocks * 512
    seen = set()
    for pid, marker in processes._marked():
        if not marker.startswith(node.backend._key):
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            for link in Path(f"/proc/{pid}/fd").iterdir():
                found = link.stat()
                if found.st_nlink == 0 and (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total


def holding(node: Node) -> int:
    """How many processes of the sandboxes have written all that they wanted; looked at from outside."""
    found = [pid for pid, marker in processes._marked() if marker.startswith(node.backend._key)]
    return sum(b"sleep\x00121" in command(pid) for pid in found)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def test_outputs_of_ended_commands_are_bounded_together_and_the_oldest_go_first(box: Box) -> None:
    for number in range(6):
        done = await box.run("head -c 15728640 /dev/zero | tr '\\0' x", exec_id=f"e{number}", limit=1000)
        assert (done.stdout_bytes, done.stdout_truncated) == (15 * MB, True)
    await box.run("echo short", exec_id="short")
    await box.node.backend.trim()
    assert 15 * MB <= taken(box.node) <= (SPOOL_MB + 1) * MB
    first = await box.node.backend.logs("s", "e0", "stdout", 0, 5000)
    assert (first.complete, first.written, first.running) == (False, 15 * MB, False)
    assert f"[... {15 * MB - 1000} bytes left out ...]".encode() in first.data
    assert first.total == len(first.data) == first.next_offset
    last = await box.node.backend.logs("s", "e5", "stdout", -3, 5000)
    assert (last.complete, last.written, last.total, last.data) == (True, None, 15 * MB, b"xxx")
    short = await box.node.backend.logs("s", "short", "stdout", 0, 5000)
    assert (short.complete, short.data) == (True, b"short\n")


async def test_abuse_what_commands_leave_behind_fills_no_disk(box: Box) -> None:
    """Each leaves a process that writes as much as it may to the output of its command, after the command's end."""
    go = "while [ ! -e go ]; do sleep 0.1; done; head -c 15728640 /dev/zero; exec sleep 121"
    for number in range(12):
        done = await box.run(f"({go}) & echo {number}", exec_id=f"e{number}")
        assert done.stdout == f"{number}\n"
    await box.run("touch go")
    await eventually(lambda: holding(box.node) == 12, 120.0)
    assert taken(box.node) > 2 * SPOOL_MB * MB, "nobody has looked at it yet"
    await box.node.backend.trim()
    assert holding(box.node) == 12, "the files are still held"
    assert taken(box.node) <= (SPOOL_MB + 1) * MB
    page = await box.node.backend.logs("s", "e1", "stdout", 0, 100)
    assert page.data[:2] == b"1\n"


async def test_commands_that_run_are_bounded_together_and_the_one_with_the_most_ends(box: Box) -> None:
    if isinstance(box.node.backend, Docker):
        pytest.skip("a running command in a container is bounded by itself")
    text = "head -c {} /dev/zero; head -c {} /dev/zero >&2; while [ ! -e go ]; do sleep 0.1; done"
    for number in range(4):
        await box.node.backend.spawn(box.spec, f"r{number}", text.format(8 * MB, 4 * MB), 250.0, 1000)

    async def quiet() -> bool:
        return await box.count("head") == 0

    await eventually(quiet, 60.0)
    await box.node.backend.spawn(box.spec, "most", text.format(15 * MB, 14 * MB), 250.0, 1000)
    async with asyncio.timeout(90):
        while (status := await box.node.backend.poll("s", "most", 10.0)).running:
            pass
    assert status.result is not None
    assert status.result.killed_by == "output"
    await box.run("touch go")
    for number in range(4):
        done = (await box.node.backend.poll("s", f"r{number}", 30.0)).result
        assert done is not None
        assert (done.exit_code, done.stdout_bytes, done.stderr_bytes) == (0, 8 * MB, 4 * MB)
    assert taken(box.node) <= (SPOOL_MB + 1) * MB
