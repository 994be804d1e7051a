"""A copy of one sandbox's workspace in another one: what a clean grading sandbox begins with.

Two processes and a pipe. The reader enters the user and mount namespaces of the source, not its pid namespace: nothing
that runs there sees it or can end it, and all it may do is read. The writer is the target's user. Of what the reader
passes on, the source decides names, bytes, modes and times, nothing else.

- Regular files (with their holes and hard links), folders and symbolic links are copied. A link is copied as its text
  and never followed. Devices, FIFOs and sockets are left out, as is what lies deeper or has a longer path than
  `MAX_DEPTH` and `MAX_PATH` allow.
- All that is copied belongs to the target's user.
- A file that grows meanwhile is copied as long as it was when it was opened. What vanishes meanwhile is left out.
- More than the allowed bytes or `MAX_ENTRIES` entries, or more than `BOUND_S` of time: there is no copy.
"""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.files import WORKSPACE, FileError, Place, inside

BOUND_S = 25
"""Below the bound within which the launcher has to answer."""
MAX_ENTRIES = 500_000
MAX_DEPTH = 256
MAX_PATH = 3900
CHUNK = 1 << 20
PIPE = 1 << 20

END, FOLDER, FILE, SYMLINK, LINK, DATA, LATER, FAULT = range(8)
_HEAD = struct.Struct(">BIqQII")  # kind, mode, mtime in ns, size or offset, length of the name, length of the rest
_READ_ONLY_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Reader:
    """Passes a tree on, one record after another."""

    def __init__(self, emit: Callable[[bytes], object], most_bytes: int) -> None:
        self._emit = emit
        self._room = most_bytes
        self._entries = 0
        self._seen: dict[tuple[int, int], bytes] = {}
        self._folders: list[tuple[bytes, os.stat_result]] = []

    def take(self, root: str) -> None:
        """The whole tree below ``root``; raises `FileError`."""
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack = [(top, b"", iter(self._names(top)))]
        while stack:
            fd, path, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                os.close(fd)
                continue
            # Vanished, or another kind of thing by now: a moment earlier or later it was not there either.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                below = self._entry(fd, name, path + b"/" + name if path else name, len(stack))
                if below is not None:
                    stack.append(below)
        # Modes and times of folders come last, from the innermost: what was written into them has changed the times,
        # and one that may not be entered could not have been filled.
        for path, found in reversed(self._folders):
            self._record(LATER, path, mode=found.st_mode, mtime=found.st_mtime_ns)
        self._record(END)

    @staticmethod
    def _names(fd: int) -> list[bytes]:
        # A folder that changes meanwhile may name an entry twice.
        return sorted(set(map(os.fsencode, os.listdir(fd))))

    def _entry(self, fd: int, name: bytes, path: bytes, depth: int) -> "tuple[int, bytes, Iterator[bytes]] | None":
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise FileError("output_limit", f"the workspace has more than {MAX_ENTRIES} files; allowed are so many")
        if len(path) > MAX_PATH or depth > MAX_DEPTH:
            return None
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            self._record(SYMLINK, path, rest=os.readlink(name, dir_fd=fd), mtime=found.st_mtime_ns)
        elif stat.S_ISDIR(found.st_mode):
            opened = os.open(name, _READ_ONLY_FLAGS | os.O_DIRECTORY, dir_fd=fd)
            self._folders.append((path, found))
            self._record(FOLDER, path)
            return opened, path, iter(self._names(opened))
        elif stat.S_ISREG(found.st_mode):
            self._file(fd, name, path)
        return None

    def _file(self, folder: int, name: bytes, path: bytes) -> None:
        try:
            fd = os.open(name, _READ_ONLY_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a FIFO took its place
                return
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return
            key = (found.st_dev, found.st_ino)
            if key in self._seen:
                self._record(LINK, path, rest=self._seen[key])
                return
            if found.st_nlink > 1:
                self._seen[key] = path
            self._record(FILE, path, mode=found.st_mode, mtime=found.st_mtime_ns, size=found.st_size)
            self._data(fd, found.st_size)
        finally:
            os.close(fd)

    def _data(self, fd: int, size: int) -> None:
        at = 0
        while at < size:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
                end = min(os.lseek(fd, at, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data from here on
                    return
                raise
            while at < end:
                chunk = os.pread(fd, min(CHUNK, end - at), at)
                if not chunk:
                    return
                self._room -= len(chunk)
                if self._room < 0:
                    raise FileError("output_limit", "the workspace holds more than a sandbox of its size can")
                self._record(DATA, rest=chunk, size=at)
                at += len(chunk)

    def _record(
        self, kind: int, path: bytes = b"", *, rest: bytes = b"", mode: int = 0, mtime: int = 0, size: int = 0
    ) -> None:
        self._emit(_HEAD.pack(kind, stat.S_IMODE(mode), mtime, size, len(path), len(rest)) + path + rest)


def fault(error: Exception) -> bytes:
    """The record that ends a stream whose reader failed."""
    kind = error.kind if isinstance(error, FileError) else "infra_error"
    text = f"{kind} {error}".encode("utf-8", "replace")[:500]
    return _HEAD.pack(FAULT, 0, 0, 0, 0, len(text)) + text


def put(source: BinaryIO) -> None:
    """Make in the working folder, which is empty, what a stream of records tells; raises `FileError`."""
    os.umask(0)
    last: tuple[int, int, int] | None = None  # descriptor, mtime, size of the file that is being written
    while True:
        head = source.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise FileError("infra_error", "the copy of the workspace ended before its end")
        kind, mode, mtime, size, name_length, rest_length = _HEAD.unpack(head)
        path, rest = source.read(name_length), source.read(rest_length)
        if kind == DATA:
            assert last is not None
            _write(last[0], rest, size)
            continue
        if last is not None:
            _close(*last)
            last = None
        if kind == END:
            return
        if kind == FAULT:
            name, _, text = rest.decode("utf-8", "replace").partition(" ")
            raise FileError(name, f"the workspace could not be copied: {text}")
        if kind == FILE:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
            os.fchmod(fd, mode)
            last = (fd, mtime, size)
        elif kind == FOLDER:
            os.mkdir(path, 0o700)
        elif kind == SYMLINK:
            os.symlink(rest, path)
            os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
        elif kind == LINK:
            os.link(rest, path, follow_symlinks=False)
        else:
            os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
            os.chmod(path, mode)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _close(fd: int, mtime: int, size: int) -> None:
    try:
        os.ftruncate(fd, size)
        os.utime(fd, ns=(mtime, mtime))
    finally:
        os.close(fd)


def copy(source: Place, target: Place, most_bytes: int, cgroups: list[str]) -> None:
    """Copy the workspace of one sandbox into the empty one of another, whose memory it then is; raises `FileError`.

    Called in a process that is given up afterwards.
    """
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in cgroups]
    outgoing, incoming = _pipe()
    reader = os.fork()
    if reader == 0:
        os.close(outgoing)
        _read(source, incoming, most_bytes)
    os.close(incoming)

    def join() -> None:
        for fd in joins:
            os.write(fd, b"0")

    def work() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(BOUND_S)
        with open(outgoing, "rb", closefd=False) as stream:
            put(stream)

    try:
        inside(target, work, before=join)
    finally:
        os.close(outgoing)  # a reader that is not done ends by this
        os.waitpid(reader, 0)


def _pipe() -> tuple[int, int]:
    outgoing, incoming = os.pipe()
    with contextlib.suppress(OSError):  # over the machine's allowance; then it is a small one
        fcntl.fcntl(incoming, fcntl.F_SETPIPE_SZ, PIPE)
    return outgoing, incoming


def _read(source: Place, incoming: int, most_bytes: int) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(BOUND_S)
        with open(incoming, "wb") as stream:
            try:
                kernel.enter(source.pid, source.started, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
                kernel.keep_reading_only()
                kernel.set_undumpable()
                Reader(stream.write, most_bytes).take(WORKSPACE)
            except BrokenPipeError:
                pass  # the writer has its own reason
            except (OSError, FileError) as error:
                stream.write(fault(error))
    finally:
        os._exit(0)
