"""Files in and out of a sandbox, by a child that has entered it and is its user: no path can lead out of it."""

import io
import json
import os
import signal
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.leader import RefusedError, find_user, read_passwd

Giving = tuple[Callable[[], None], Callable[[], None]]
"""What gives a new sandbox its files: a step with all rights, and one as its user."""
WORKSPACE = "/workspace"
WRITABLE = (WORKSPACE, "/tmp", "/logs")  # noqa: S108 - the sandbox's own


class FileError(Exception):
    """The file could not be read or written; ``kind`` is one of the service's error kinds."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Place:
    """Where a sandbox's files are: its first process (0 where it has no namespaces), its user, its working folder."""

    def __init__(
        self, pid: int, started: int, uid: int | None, cwd: str, user: str | None = None, keep: int = 0
    ) -> None:
        self.pid = pid
        self.started = started
        self.uid = uid
        self.cwd = cwd
        self.user = user
        """Another user of the sandbox, by name or number, instead of ``uid``."""
        self.keep = keep
        """Capabilities in the sandbox that its uid 0 has, as bits."""

    @classmethod
    def of(cls, request: dict) -> "Place":
        place = cls(request["pid"], request["started"], request["uid"], request["cwd"])
        place.user, place.keep = request.get("user"), request.get("keep", 0)
        return place


def inside(
    place: Place,
    work: Callable[[], None],
    *,
    own: bool = False,
    before: Callable[[], None] | None = None,
    result: Callable[[], Any] | None = None,
) -> Any:
    """Call ``work()`` in the sandbox as its user; a `FileError` in it is raised here, and what ``result()`` says there
    afterwards (JSON) is returned.

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
            _become_user(place, own=own)
            work()
            answer = {"ok": None if result is None else result()}
        except RefusedError as error:
            answer = {"error": ["invalid_request", str(error)[:500]]}
        except FileError as error:
            answer = {"error": [error.kind, str(error)[:500]]}
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
            answer = {"error": ["infra_error", str(error)[:500]]}
        try:
            os.write(answer_write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(answer_write)
    with open(answer_read, "rb") as pipe:
        answer = pipe.read()
    status = kernel.wait_status(child)
    if status == 128 + signal.SIGALRM:
        raise FileError("exec_timeout", "the transfer took too long; a smaller one may be quick enough")
    if not answer:
        raise FileError("infra_error", f"the helper in the sandbox ended with status {status}")
    said = json.loads(answer)
    if "error" in said:
        raise FileError(*said["error"])
    return said["ok"]


def _become_user(place: Place, *, own: bool) -> None:
    if own and place.uid is not None:
        for path in WRITABLE:
            os.chown(path, place.uid, place.uid)
    os.umask(0o022)
    uid = gid = place.uid
    if place.user is not None:
        uid, gid, _, _ = find_user(read_passwd(), place.user)
    kernel.drop_privileges(uid, gid, keep=place.keep if uid == 0 else 0)
    kernel.set_undumpable()
    os.chdir(place.cwd)


def write_inside(place: Place, spec: str | None, *, own: bool, records: Giving | None = None) -> None:
    """Give the writable folders to the sandbox's user and write the files that the JSON file ``spec`` maps, and what
    ``records`` gives.
    """
    files: dict[str, str] = {}
    if spec is not None:
        with open(spec, encoding="utf-8") as file:
            files = json.load(file)

    def work() -> None:
        for path, text in files.items():
            write(path, io.BytesIO(text.encode("utf-8", "surrogateescape")), 0o644)

        if records is not None:
            records[1]()

    if files or own or records is not None:
        inside(place, work, own=own, before=None if records is None else records[0])


def write(path: str, data: BinaryIO, mode: int) -> None:
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
            while chunk := data.read(1 << 20):
                view = memoryview(chunk)
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
