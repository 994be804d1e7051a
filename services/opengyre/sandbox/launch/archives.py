"""Directories in and out of a sandbox as plain tar archives, by a child that has entered it and is its user.

What is special (devices, FIFOs, sockets) is left out and counted. An archive may write only below the folder it is
unpacked into: what Python's ``data`` filter refuses (absolute names, ``..``, links that lead out) is refused whole.
Everything that is imported is imported before the sandbox is entered: afterwards the files of the machine are gone.
"""

import contextlib
import errno
import os
import signal
import stat
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from opengyre.sandbox.launch.files import FileError

BOUND_S = 25
"""Below the bound within which the launcher has to answer."""
MAX_ENTRIES = 500_000
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class _Capped:
    """A file to write to that takes at most ``limit`` bytes."""

    def __init__(self, fd: int, limit: int, path: str) -> None:
        self._fd = fd
        self._left = self._limit = limit
        self._path = path

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise FileError("output_limit", f"path {self._path!r} needs an archive of more than {self._limit} bytes")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        return len(data)


class _Padded:
    """A file that is read for as long as it was, whatever became of it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = os.read(self._fd, size - len(data))
            if not chunk:
                return data + bytes(size - len(data))
            data += chunk
        return data


def bound() -> None:
    """End this process where it takes too long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(BOUND_S)


def pack(path: str, into: int, limit: int) -> tuple[int, int]:
    """Archive of the directory ``path`` to the descriptor ``into``; entries, and special files left out."""
    entries = skipped = 0
    links: dict[tuple[int, int], str] = {}
    try:
        # Format GNU: long names and large numbers without a second header for each.
        with tarfile.open(fileobj=_Capped(into, limit, path), mode="w|", format=tarfile.GNU_FORMAT) as tar:  # type: ignore[call-overload] - write() is all that is used
            for inside, name in _walk(path):
                # What vanishes meanwhile was not there a moment later either.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    added = _add(tar, inside, name, links)
                    entries += added
                    skipped += not added
                if entries + skipped > MAX_ENTRIES:
                    raise FileError("output_limit", f"path {path!r} has more than {MAX_ENTRIES} entries")
    except OSError as error:
        raise FileError("invalid_request", f"path {path!r} cannot be read: {error.strerror}") from error
    return entries, skipped


def _walk(top: str) -> Iterator[tuple[str, str]]:
    """Paths below ``top``, a folder before what is in it, with their names in the archive."""
    if not stat.S_ISDIR(os.lstat(top).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    stack = [("", iter(sorted(os.listdir(top))))]
    while stack:
        below, names = stack[-1]
        name = next(names, None)
        if name is None:
            stack.pop()
            continue
        inner = f"{below}{name}"
        path = f"{top}/{inner}"
        yield path, inner
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                stack.append((f"{inner}/", iter(sorted(os.listdir(path)))))


def _add(tar: tarfile.TarFile, path: str, name: str, links: dict[tuple[int, int], str]) -> bool:
    info = tarfile.TarInfo(name)
    found = os.lstat(path)
    fd = -1
    if stat.S_ISREG(found.st_mode):
        fd = os.open(path, _OPEN)
    try:
        if fd >= 0:
            found = os.fstat(fd)
        info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
        if stat.S_ISREG(found.st_mode) and fd >= 0:
            key = (found.st_dev, found.st_ino)
            if key in links:
                info.type, info.linkname = tarfile.LNKTYPE, links[key]
                tar.addfile(info)
                return True
            if found.st_nlink > 1:
                links[key] = name
            info.size = found.st_size
            tar.addfile(info, _Padded(fd))  # type: ignore[arg-type] - read() is all that is used
        elif stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        elif stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            tar.addfile(info)
        else:
            return False
        return True
    finally:
        if fd >= 0:
            os.close(fd)


def unpack(source: BinaryIO, path: str) -> tuple[int, int]:
    """The archive into the directory ``path``, which is made; entries, and special files left out."""
    entries = skipped = 0
    folders: list[tuple[str, tarfile.TarInfo]] = []
    try:
        os.makedirs(path, exist_ok=True)
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    skipped += 1
                    continue
                entries += 1
                if entries + skipped > MAX_ENTRIES:
                    raise FileError("output_limit", f"the archive has more than {MAX_ENTRIES} entries")
                if member.name.startswith("/"):  # the filter would only cut that off
                    raise FileError("invalid_request", f"the archive has the absolute name {member.name[:200]!r}")
                checked = tarfile.data_filter(member, path)
                tar.extract(checked, path, set_attrs=not member.isdir(), numeric_owner=True, filter="fully_trusted")
                if member.isdir():
                    folders.append((os.path.join(path, checked.name), member))
        for folder, member in reversed(folders):  # from the innermost: one that may not be entered could not be filled
            os.utime(folder, (member.mtime, member.mtime), follow_symlinks=False)
            os.chmod(folder, member.mode & 0o777 | 0o700)
    except tarfile.FilterError as error:
        raise FileError("invalid_request", f"the archive would write outside of {path!r}: {error}") from error
    except tarfile.TarError as error:
        raise FileError("invalid_request", f"the archive cannot be read as a plain tar archive: {error}") from error
    except OSError as error:
        raise FileError("invalid_request", f"the archive cannot be unpacked into {path!r}: {error.strerror}") from error
    return entries, skipped
