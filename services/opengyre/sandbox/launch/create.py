"""Starting a sandbox: user namespace, bubblewrap, first files; and undoing all of it where one step fails.

The order matters. The child that becomes bubblewrap is written down (``bwrap.pid``) while it still waits for a byte
to go on, so that a sweep can find it; it joins its cgroups before it loses the right to; it has an empty environment,
because the first process of the sandbox shows the one that bubblewrap was started with. Its report of the first
process's pid is read to the closing brace: ended early, the pipe would break and leave a process that waits for ever.
"""

import json
import os
import select
import signal
import time

from opengyre.sandbox.launch import kernel, mounts, snapshots
from opengyre.sandbox.launch.files import WORKSPACE, Place, write_inside

BOUND_S = 20.0
IDS = 65536
FIRST = b"sleep\0"


class CreateError(Exception):
    """The sandbox could not be made; the sentence says which step failed."""


def create(request: dict) -> dict:
    """Make a sandbox; ``{pid, started}`` of its first process, 0 where it has none. A failure leaves nothing of it."""
    folder: str = request["folder"]
    _record(folder, "creator.pid", {"pid": os.getpid(), "started": kernel.start_time(os.getpid())})
    if request["plain"] is not None:
        place = Place(0, 0, request["uid"], request["plain"])
        write_inside(place, request["files_from"], own=False)
        return {"pid": 0, "started": 0}
    # Descriptors, not numbers: this process ends up in the sandbox's namespaces, where the numbers mean others.
    made: list[int] = []
    try:
        return _create(request, folder, made)
    except BaseException:
        for pidfd in reversed(made):
            _kill(pidfd)
        raise


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


def _create(request: dict, folder: str, made: list[int]) -> dict:
    deadline = time.monotonic() + BOUND_S
    go_read, go_write = os.pipe()
    born_read, born_write = os.pipe()
    info_read, info_write = os.pipe()
    # In memory that the sandbox pays for: its first process keeps it, and root of an image can make that one write.
    log = os.memfd_create("bwrap.log", os.MFD_CLOEXEC)
    child = os.fork()
    if child == 0:
        for fd in (go_write, born_read, info_read):
            os.close(fd)
        _become_bwrap(request, go_read, born_write, info_write, log)
    for fd in (go_read, born_write, info_write):
        os.close(fd)
    started = kernel.start_time(child) or 0
    made.append(os.pidfd_open(child))
    _record(folder, "bwrap.pid", {"pid": child, "started": started})
    if _read_until(born_read, b"\n", deadline) != b"\n":
        raise CreateError(f"the namespace for the sandbox's users could not be made: {_log(log)}")
    base: int | None = request["base"]
    if base is not None:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
                file.write(f"0 {base} {IDS}\n")
    if request["layers"] and base is not None:
        try:
            mounts.assemble(child, base, request["layers"], request["disk_mb"], request["disk"])
        except OSError as error:
            raise CreateError(f"the root of the sandbox could not be mounted: {error}") from error
    os.write(go_write, b"g")
    info = _read_until(info_read, b"}", deadline)
    try:
        pid = int(json.loads(info)["child-pid"])
    except (ValueError, KeyError) as error:
        raise CreateError(f"bubblewrap did not start: {_log(log)}") from error
    first_started = kernel.start_time(pid) or 0
    try:
        made.append(os.pidfd_open(pid))
        _wait_ready(pid, first_started, log, deadline)
        _spare(pid)
    except (FileNotFoundError, ProcessLookupError) as error:  # it ended between two looks
        raise CreateError(f"bubblewrap could not set the sandbox up: {_log(log)}") from error
    # Bubblewrap's own process has nothing more to do: it would only wait for the first process, and take memory.
    _kill(made.pop(0))
    place = Place(pid, first_started, request["uid"], WORKSPACE, keep=request["keep"])
    records = None
    if request["records"] is not None:
        records = snapshots.giving(request["records"], request["limits_by"])
    write_inside(place, request["files_from"], own=request["base"] is not None, records=records)
    os.waitpid(child, 0)
    return {"pid": pid, "started": first_started}


def _spare(pid: int) -> None:
    """Let the kernel take anything else first when memory ends; only root may."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("-999")
    except PermissionError:
        return


def _record(folder: str, name: str, value: dict) -> None:
    with open(f"{folder}/{name}.tmp", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}")


def _log(log: int) -> str:
    return os.pread(log, 500, 0).decode("utf-8", "replace").strip() or "it said nothing"


def _read_until(fd: int, end: bytes, deadline: float) -> bytes:
    """Read a pipe until ``end`` was seen, its end, or the deadline."""
    data = b""
    while end not in data:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise CreateError(f"the sandbox was not ready after {BOUND_S:g} s")
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        data += chunk
    return data


def _wait_ready(pid: int, started: int, log: int, deadline: float) -> None:
    """Wait until the first process is what it shall be: bubblewrap becomes it as its last step.

    There is no event for this: a shell in between could say so, but shells set SIGCHLD back to its default.
    """
    while time.monotonic() < deadline:
        if kernel.start_time(pid) != started:
            raise CreateError(f"bubblewrap could not set the sandbox up: {_log(log)}")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(len(FIRST)) == FIRST:
                return
        time.sleep(0.0005)
    raise CreateError(f"the sandbox was not ready after {BOUND_S:g} s")


def _become_bwrap(request: dict, go: int, born: int, info: int, log: int) -> None:
    try:
        kernel.reset_signals()
        # Ignored from here on, through bubblewrap, to the first process: so the kernel reaps orphans.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.setsid()
        for path in request["cgroups"]:
            with open(path, "w", encoding="ascii") as file:
                file.write("0")
        binary = os.open(request["bwrap"], os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(log, 2)
        if request["layers"]:
            mounts.own_mounts()
        if request["base"] is not None:
            kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(born, b"\n")
        if os.read(go, 1) != b"g":
            os._exit(1)
        if request["base"] is not None:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            # No user namespaces of its own: they would give a payload capabilities to try the kernel with.
            with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
                file.write("0")
        null = os.open("/dev/null", os.O_RDONLY)
        high = [os.dup(fd) if fd < 10 else fd for fd in (null, info, binary)]
        targets = {0: high[0], 1: high[0], 3: high[1]}
        for target, source in targets.items():
            os.dup2(source, target)
        data_fds = _data_fds(request["data"], first=4)
        os.dup2(high[2], 4 + data_fds, inheritable=False)
        os.closerange(5 + data_fds, 1 << 16)
        os.execve(4 + data_fds, request["args"], {})  # noqa: S606 - there is no shell to want
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
        os.write(2, str(error).encode("utf-8", "replace")[:500])
    os._exit(126)


def _data_fds(contents: list[str], first: int) -> int:
    """Put each text behind the next descriptor from ``first``, for bubblewrap to copy into the sandbox."""
    made = []
    for text in contents:
        fd = os.memfd_create("data", os.MFD_CLOEXEC)
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        made.append(fd)
    high = [os.dup(fd) if fd < first + len(made) else fd for fd in made]
    for offset, fd in enumerate(high):
        os.dup2(fd, first + offset)
    return len(made)
