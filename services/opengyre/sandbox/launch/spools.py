"""The files that commands write to, and the bound on what all of a sandbox's may take.

Standard library only. All of them lie in one folder beside the commands' own: ``<command>.<stream>`` while it runs and
where it is kept; ``left.<command>.<stream>`` where nobody reads it any more, but a process that the command left behind
still holds it. The kernel does not say of a file without a name how large it is, so these keep theirs; whoever passes
empties them.

Invariant: at each end of a command, and at each pass of the service, kept outputs are at most the bound together; the
oldest go first. A command that runs is not among them: it is ended where it alone is too much.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Sequence

STREAMS = ("stdout", "stderr")
FOLDER = "spools"
LEFT = "left."


def to_drop(kept: Sequence[tuple[float, str, int]], running: int, bound: int) -> list[str]:
    """Names of the ended commands whose outputs have to go so that all are at most ``bound`` bytes, the oldest first.

    ``kept``: when each ended, its name, its bytes. ``running``: bytes of those that run, which stay. Pure.
    """
    total = running + sum(size for _, _, size in kept)
    gone = []
    for _, name, size in sorted(kept):
        if total <= bound:
            break
        if size:
            gone.append(name)
            total -= size
    return gone


def name(command: str, stream: str) -> str:
    """Name of a command's file."""
    return f"{command}.{stream}"


def open_folder(where: int) -> int:
    """A descriptor of the folder, made where it is not there; ``where``: of a command's own folder."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"../../{FOLDER}", mode=0o700, dir_fd=where)
    return os.open(f"../../{FOLDER}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where)


def sizes(spools: int) -> dict[str, int]:
    """Bytes on the disk by command; those of what is left behind under its own name each."""
    found: dict[str, int] = {}
    for entry in os.listdir(spools):
        key = entry if entry.startswith(LEFT) else entry.rpartition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            # Blocks, not the length: who holds a file may lengthen it without writing.
            found[key] = found.get(key, 0) + os.stat(entry, dir_fd=spools, follow_symlinks=False).st_blocks * 512
    return found


def trim(spools: int, ended: dict[str, float], bound: int, *, alone: bool = False) -> int:
    """Empty what is left behind and drop what is too much; bytes that remain. ``ended``: when each command ended.

    ``alone``: this process may tell whether a file is held by another one, and remove it where not.
    """
    found = sizes(spools)
    for entry in [key for key in found if key.startswith(LEFT)]:
        if found.pop(entry):
            _empty(spools, entry)
    running = sum(size for command, size in found.items() if command not in ended)
    kept = [(ended[command], command, size) for command, size in found.items() if command in ended]
    for command in to_drop(kept, running, bound):
        found.pop(command)
        give_up(spools, command, alone=alone)
    return sum(found.values())


def give_up(spools: int, command: str, *, alone: bool) -> None:
    """Nobody reads a command's output any more."""
    for stream in STREAMS:
        entry = name(command, stream)
        with contextlib.suppress(FileNotFoundError):
            if alone and not _held(spools, entry):
                os.unlink(entry, dir_fd=spools)
                continue
            os.rename(entry, f"{LEFT}{entry}", src_dir_fd=spools, dst_dir_fd=spools)
            _empty(spools, f"{LEFT}{entry}")


def _empty(spools: int, entry: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(entry, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=spools)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _held(spools: int, entry: str) -> bool:
    """Whether another process has the file open: only where none has is a lease to write given."""
    fd = os.open(entry, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=spools)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # who opens it now would end this process
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)
    return False


def ended(execs: int, commands: Sequence[str]) -> dict[str, float]:
    """When each of these ended, of those that have; ``execs``: a descriptor of the folder of the commands' folders."""
    found = {}
    for command in commands:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found[command] = os.stat(f"{command}/answer.json", dir_fd=execs).st_mtime
    return found
