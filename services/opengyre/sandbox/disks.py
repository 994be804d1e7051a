"""What is written to the root of an image's sandbox: a file system in a sparse file of the node, of a fixed size.

It is at its end when it is full, and what is written at full speed passes the sandbox's memory by: the file is written
without the page cache, which cgroup v1 would charge to the writer without slowing it. Where that cannot be had, it is
in memory, and why is said.

Invariant: a file is there whole or not at all; it goes with its sandbox's folder, its device with the sandbox's mounts.

All functions block; call them in a thread.
"""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from opengyre.sandbox import machine
from opengyre.sandbox.core import InfraError

MEMORY_MB = 16
"""Up to this size it is in memory, where that is quicker to make than a file system in a file."""
TRIED_MB = MEMORY_MB + 1
MKFS_BOUND_S = 20.0


def without_tools() -> str | None:
    """Why this machine can make no disk in a file, as far as looking tells; None where it may be tried."""
    if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        return "no loop device can be made here"
    if shutil.which("mkfs.ext4", path=machine.TOOLS) is None:
        return "mkfs.ext4 is missing; the package e2fsprogs has it"
    return None


def without_folder(folder: Path) -> str | None:
    """Why ``folder`` is none to hold disks."""
    kind = file_system(Path("/proc/self/mountinfo").read_text(), folder.stat().st_dev)
    if kind in ("tmpfs", "ramfs"):
        return f"{folder} is in memory itself ({kind})"
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"{folder} takes no writes past the page cache ({error.strerror})"
    os.close(fd)
    return None


def file_system(mountinfo: str, device: int) -> str:
    """Kind of the file system of that device number, out of the text of /proc/self/mountinfo; nothing where it is not
    in there. Pure.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return ""


def copy_of_template(folder: Path, size_mb: int, target: Path) -> Path:
    """A file with an empty file system of that size, copied from one that is made once for each size in ``folder``."""
    template = folder / f"{size_mb}"
    if not template.exists():
        _make(template, size_mb)
    _copy_sparse(template, target)
    return target


def _make(template: Path, size_mb: int) -> None:
    beside = template.with_name(f"{template.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("wb") as file:
            file.truncate(size_mb << 20)
        # Without a journal: it lives no longer than its sandbox. 7 % for its own tables would be taken from it.
        command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "root_owner=0:0", str(beside)]
        subprocess.run(command, check=True, capture_output=True, timeout=MKFS_BOUND_S, env={"PATH": machine.TOOLS})
        beside.replace(template)
    except (OSError, subprocess.SubprocessError) as error:
        raise InfraError(f"a disk of {size_mb} MiB could not be made: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # no data from here on
                return
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.lseek(new.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(new.fileno(), old.fileno(), at, end - at)
