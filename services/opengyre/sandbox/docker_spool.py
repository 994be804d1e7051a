"""What is kept of a command in a container: its records, and the files that it writes to.

The files are the node's, and the container sees their folder. In it a root of an image may do anything, so they are
opened without following a link, and read only if regular.
"""

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from opengyre.proto.sandbox import ExecResult
from opengyre.sandbox import docker_config, docker_host
from opengyre.sandbox.core import Options
from opengyre.sandbox.launch import spools
from opengyre.sandbox.launch.output import join_text, split_sizes

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where commands of a sandbox are."""

    sandbox: str
    home: Path
    """Folder of the node with ``execs`` (records) and ``spool`` (the container's `docker_config.CONTROL`)."""
    container: str
    first: int
    """Number of the container's init on this machine."""
    marker: str
    user: str
    cwd: str


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """``begun.json``."""

    digest: str
    began: float
    """On the monotonic clock."""
    since: int
    """The same in clock ticks since boot."""
    timeout_s: float
    limit: int
    spool_limit: int
    no_output_timeout_s: float | None
    oom_kills: int
    engine_exec: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """``ended.json``: one of the three is set."""

    result: ExecResult | None = None
    infra_error: str | None = None
    gone: bool = False


def overdue(begun: Begun, now: float, written: tuple[int, int], grew_at: float) -> str | None:
    """Why a running command has to be killed, None where it may go on. Pure; ``grew_at``: last time of new output."""
    if now - begun.began >= begun.timeout_s:
        return "timeout"
    if max(written) >= begun.spool_limit:
        return "output"
    if begun.no_output_timeout_s is not None and now - grew_at >= begun.no_output_timeout_s:
        return "no_output"
    return None


def _open(home: Path, exec_id: str, name: str, access: int = os.O_RDONLY) -> int:
    """A descriptor of a command's file, which must be a regular one: in its folder a root of an image may do anything.

    `FileNotFoundError` where it is none.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(home / "spool" / exec_id, flags | os.O_DIRECTORY)
    try:
        fd = os.open(name, flags | access | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        raise FileNotFoundError(name) from error
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(name)
    return fd


def size(home: Path, exec_id: str, name: str) -> int:
    """Bytes of a command's output by now."""
    try:
        fd = _open(home, exec_id, name)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def read(home: Path, exec_id: str, name: str, offset: int, limit: int) -> bytes:
    """A piece of a command's output."""
    try:
        fd = _open(home, exec_id, name)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def sizes(home: Path, exec_id: str) -> tuple[int, int]:
    """Bytes of both streams by now."""
    return size(home, exec_id, "stdout"), size(home, exec_id, "stderr")


def trim(home: Path, bound: int) -> None:
    """Hold the outputs of all commands of a sandbox to the bound: those of the ones that ended first are dropped."""
    running, kept = 0, []
    for folder in (home / "execs").iterdir():
        taken = sum(_taken(home, folder.name, stream) for stream in STREAMS)
        try:
            kept.append(((folder / "ended.json").stat().st_mtime, folder.name, taken))
        except FileNotFoundError:
            running += taken
    for exec_id in spools.to_drop(kept, running, bound):
        _dropped(home, exec_id).touch()
        for stream in STREAMS:
            with suppress(FileNotFoundError):
                fd = _open(home, exec_id, stream, os.O_WRONLY)
                try:
                    os.ftruncate(fd, 0)
                finally:
                    os.close(fd)


def _taken(home: Path, exec_id: str, stream: str) -> int:
    """Bytes on the disk, whatever the length."""
    try:
        fd = _open(home, exec_id, stream)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def is_dropped(home: Path, exec_id: str) -> bool:
    """Whether the full output is not kept any more."""
    return _dropped(home, exec_id).exists()


def _dropped(home: Path, exec_id: str) -> Path:
    return home / "execs" / exec_id / "dropped"


def prepare(home: Path, exec_id: str, command: bytes, options: Options) -> None:
    """The files of a command, which its user, whoever that is, may write to but not replace."""
    folder = home / "spool" / exec_id
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    for name in (*STREAMS, "code"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    if len(command) > docker_config.INLINE_COMMAND:
        (folder / "command").write_bytes(command)
    if options.stdin is not None:
        (folder / "stdin").write_bytes(options.stdin)


def collect(place: Place, exec_id: str, begun: Begun, code: int | None, killed_by: str | None) -> ExecResult:
    """What a command that has ended did. ``killed_by``: why it was ended, if it was."""
    text: dict[str, str] = {}
    found = sizes(place.home, exec_id)
    cut: dict[str, bool] = {}
    for name, total in zip(STREAMS, found, strict=True):
        head, tail = split_sizes(total, begun.limit)
        first = read(place.home, exec_id, name, 0, head)
        last = read(place.home, exec_id, name, total - tail, tail) if tail else b""
        text[name] = join_text(first, last, total)
        cut[name] = total > head + tail or total >= begun.spool_limit
    if killed_by is None and max(found) >= begun.spool_limit:
        killed_by = "output"
    return ExecResult(
        exec_id=exec_id,
        exit_code=code if killed_by is None else None,
        stdout=text["stdout"],
        stderr=text["stderr"],
        stdout_bytes=found[0],
        stderr_bytes=found[1],
        stdout_truncated=cut["stdout"],
        stderr_truncated=cut["stderr"],
        timed_out=killed_by == "timeout",
        killed_by=killed_by,
        duration_s=time.monotonic() - begun.began,
        isolated=True,
        oom=docker_host.oom_kills(place.first) > begun.oom_kills,
    )
