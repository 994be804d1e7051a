"""`gyre stream replay`: a stretch of a stream again, in its own time or faster, to a terminal, a file or a processor.

Awaits: the broker, the pace (a message's offset in the recording over the speed, from the start of the replay), and
the processor's end (`PROCESSOR_S`).
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from opengyre.cli.stack import StackError
from opengyre.cli.stream_lines import record
from opengyre.proto import subjects
from opengyre.shared.bus import Stored

PROCESSOR_S = 600.0


async def paced(messages: AsyncIterator[Stored], speed: float | None) -> AsyncIterator[Stored]:
    """The messages at `speed` times their own pace; None: as fast as they come."""
    loop = asyncio.get_running_loop()
    began: float | None = None
    first = 0.0
    async for stored in messages:
        if speed is not None:
            if began is None:
                began, first = loop.time(), stored.timestamp
            due = began + max(0.0, stored.timestamp - first) / speed
            await asyncio.sleep(max(0.0, due - loop.time()))
        yield stored


async def to_terminal(messages: AsyncIterator[Stored], show: Callable[[Stored], None]) -> int:
    """Show each as it comes; return how many."""
    count = 0
    async for stored in messages:
        show(stored)
        count += 1
    return count


async def to_file(messages: AsyncIterator[Stored], stream: str, path: Path) -> int:
    """Write records as JSON lines; the file is complete or absent."""
    count = 0
    with replacing(path) as out:
        async for stored in messages:
            out.write(msgspec.json.encode(record(stream, stored)) + b"\n")
            count += 1
    return count


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when it is whole; raises `StackError`."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise StackError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


async def to_processor(messages: AsyncIterator[Stored], out: BinaryIO, state_dir: Path | None = None) -> int:
    """Feed a fresh trajectory processor and copy the groups that it makes to `out`; return how many events it got.
    What it says of events that it passes over goes to stderr. `state_dir`: of the stack whose blobs it reads, if not
    that of the settings."""
    environment = dict(os.environ) if state_dir is None else {**os.environ, "GYRE_STATE_DIR": str(state_dir)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "opengyre.trajectory.replay",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    count = 0
    try:
        assert process.stdin is not None
        stdin = process.stdin

        async def feed() -> None:
            nonlocal count
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it says itself why it ended
                async for stored in messages:
                    stdin.write(msgspec.json.encode(record(subjects.TRAJ, stored)) + b"\n")
                    await stdin.drain()
                    count += 1
            stdin.close()

        async with asyncio.timeout(PROCESSOR_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            groups = tasks.create_task(_all(process.stdout))
            complaint = tasks.create_task(_all(process.stderr))
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = complaint.result().decode("utf-8", "replace").strip().splitlines()
    if status != 0:
        raise StackError(said[-1] if said else f"the processor ended with status {status}")
    # The last line is its count.
    for line in said[:-1]:
        print(line, file=sys.stderr)
    out.write(groups.result())
    out.flush()
    return count


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    return await stream.read()
