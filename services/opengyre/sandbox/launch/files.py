"""Files in and out of a sandbox, by a child that has entered it and is its user: no path can lead out of it."""

import json
import os
import stat
from collections.abc import Callable

from opengyre.sandbox.launch import kernel

WORKSPACE = "/workspace"
WRITABLE = (WORKSPACE, "/tmp", "/logs")  # noqa: S108 - the sandbox's own


class FileError(Exception):
    """The file could not be read or written; ``kind`` is one of the service's error kinds."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Place:
    """Where a sandbox's files are: its first process (0 where it has no namespaces), its user, its working folder."""

    def __init__(self, pid: int, started: int, uid: int | None, cwd: str) -> None:
        self.pid = pid
        self.started = started
        self.uid = uid
        self.cwd = cwd

    @classmethod
    def of(cls, request: dict) -> "Place":
        return cls(request["pid"], request["started"], request["uid"], request["cwd"])


def inside(
    place: Place, work: Callable[[], None], *, own: bool = False, before: Callable[[], None] | None = None
) -> None:
    """Call ``work()`` in the sandbox as its user; a `FileError` in it is raised here.

    Called in a process that is given up afterwards: it stays in the sandbox's namespaces. ``own``: the writable
    folders are given to the user first. ``before`` is called by the same process while it has all its rights.
    """
    if place.pid:
        kernel.enter(place.pid, place.started)
    answer_read, answer_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(answer_read)
            if before is not None:
                before()
            if own and place.uid is not None:
                for path in WRITABLE:
                    os.chown(path, place.uid, place.uid)
            os.umask(0o022)
            kernel.drop_privileges(place.uid, place.uid)
            kernel.set_undumpable()
            os.chdir(place.cwd)
            work()
        except FileError as error:
            os.write(answer_write, json.dumps([error.kind, str(error)[:500]]).encode())
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
            os.write(answer_write, json.dumps(["infra_error", str(error)[:500]]).encode())
        finally:
            os._exit(0)
    os.close(answer_write)
    with open(answer_read, "rb") as pipe:
        answer = pipe.read()
    status = kernel.wait_status(child)
    if answer:
        kind, message = json.loads(answer)
        raise FileError(kind, message)
    if status != 0:
        raise FileError("infra_error", f"the helper in the sandbox ended with status {status}")


def write_inside(place: Place, spec: str | None, *, own: bool) -> None:
    """Give the writable folders to the sandbox's user and write the files that the JSON file ``spec`` maps."""
    files: dict[str, str] = {}
    if spec is not None:
        with open(spec, encoding="utf-8") as file:
            files = json.load(file)

    def work() -> None:
        for path, text in files.items():
            write(path, text.encode("utf-8", "surrogateescape"), 0o644)

    if files or own:
        inside(place, work, own=own)


def write(path: str, data: bytes, mode: int) -> None:
    """Write a regular file, making its folders."""
    try:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileError("invalid_request", f"path {path!r} is not a regular file")
            os.ftruncate(fd, 0)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    except OSError as error:
        raise FileError("invalid_request", f"path {path!r} cannot be written: {error.strerror}") from error


def read(path: str, limit: int, into: int) -> None:
    """Copy a regular file of at most ``limit`` bytes to the descriptor ``into``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError("invalid_request", f"path {path!r} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileError("invalid_request", f"path {path!r} is not a regular file")
        done = 0
        while chunk := os.read(fd, min(1 << 20, limit + 1 - done)):
            done += len(chunk)
            if done > limit:
                raise FileError("output_limit", f"path {path!r} is larger than the limit of {limit} bytes")
            os.write(into, chunk)
    finally:
        os.close(fd)
