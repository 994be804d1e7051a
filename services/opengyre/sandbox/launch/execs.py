"""One command: its monitor (outside the sandbox) and its leader (the shell inside).

The monitor claims the exec's folder before anything else, so that of two monitors for one exec id only one goes on:
a command runs once. It is a session of its own and needs nobody: it holds the deadline, kills the tree, and writes
``answer.json`` by rename. Whoever wants the answer waits for the monitor's end and reads that file; where it is
missing, the monitor was killed and the outcome is unknown.

Output goes to files, not pipes: a background child that keeps them open holds nobody, and the size limit of a file
is the hard bound on a flood.

Files of an exec's folder: ``claim`` (monitor's pid and start time, digest of the command), ``stdout`` and ``stderr``
while it runs, ``answer.json``.
"""

import contextlib
import json
import os
import resource
import select
import time

from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.output import join_text, split_sizes
from opengyre.sandbox.launch.tree import kill_tree, now_ticks

TICK_S = 0.5
ARGV_LIMIT = 96 * 1024
_SHELL = "/bin/sh"


class Start:
    """What the monitor needs to start a leader; paths are of the host, opened before the namespaces are entered."""

    def __init__(self, request: dict) -> None:
        self.command: str = request["command"] if "command" in request else _read(request["command_file"])
        self.timeout_s: float = request["timeout_s"]
        self.output_limit: int = request["output_limit"]
        self.spool_limit: int = request["spool_limit"]
        self.env: dict[str, str] = request["env"]
        self.pid: int = request["pid"]
        self.started: int = request["started"]
        self.uid: int | None = request["uid"]
        self.cwd: str = request["cwd"]
        self.limits: dict[str, int] = request["limits"]
        self.marker: str = request["marker"]
        self.isolated: bool = request["isolated"]
        self.cgroups: list[str] = request["cgroups"]


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def claim(folder: str, digest: str) -> int | None:
    """Take an exec's folder for this process. A descriptor of it, or None where somebody has it.

    `FileNotFoundError` where the sandbox was destroyed.
    """
    with contextlib.suppress(FileExistsError):
        # Not with its parents: where those are gone, so is the sandbox, though one of the same id may be there again.
        os.mkdir(folder, mode=0o700)
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mine = f"claim.{os.getpid()}"
    text = json.dumps({"pid": os.getpid(), "started": kernel.start_time(os.getpid()), "digest": digest})
    _write(where, mine, text.encode())
    try:
        # A link, unlike a rename, fails where the name is taken, and the file is whole when it appears.
        os.link(mine, "claim", src_dir_fd=where, dst_dir_fd=where)
    except FileExistsError:
        return None
    finally:
        os.unlink(mine, dir_fd=where)
    return where


def _write(where: int, name: str, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=where)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def monitor(where: int, start: Start) -> None:
    """Run the command to its end and leave ``answer.json`` in the folder ``where``. Never raises."""
    began = time.monotonic()
    answer = {"exit_code": None, "killed_by": None, "infra_error": None, "gone": False}
    spools: list[int] = []
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        spools.extend(os.open(name, flags, 0o600, dir_fd=where) for name in ("stdout", "stderr"))
        _run(start, spools, began, answer)
    except ProcessLookupError:
        answer["gone"] = True
    except OSError as error:
        answer["infra_error"] = f"the command could not be started: {error}"
    answer["duration_s"] = time.monotonic() - began
    for name, fd in zip(("stdout", "stderr"), spools, strict=False):
        answer[name], answer[f"{name}_bytes"], answer[f"{name}_truncated"] = _collect(fd, start)
    try:
        _write(where, "answer.tmp", json.dumps(answer).encode("utf-8", "replace"))
        os.rename("answer.tmp", "answer.json", src_dir_fd=where, dst_dir_fd=where)
        for name in ("stdout", "stderr"):
            os.unlink(name, dir_fd=where)
    except FileNotFoundError:
        return  # destroyed meanwhile: there is nobody to answer


def _collect(fd: int, start: Start) -> tuple[str, int, bool]:
    total = os.fstat(fd).st_size
    head, tail = split_sizes(total, start.output_limit)
    text = join_text(os.pread(fd, head, 0), os.pread(fd, tail, total - tail) if tail else b"", total)
    return text, total, total > head + tail or total >= start.spool_limit


def _run(start: Start, spools: list[int], began: float, answer: dict) -> None:
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in start.cgroups]
    if start.isolated:
        kernel.enter(start.pid, start.started)
    since = now_ticks() if start.isolated else None
    failed, report = os.pipe()
    leader = os.fork()
    if leader == 0:
        _lead(start, spools, joins, report)
    os.close(report)
    with open(failed, "rb") as pipe:
        reason = pipe.read()  # ends when the leader has become the shell
    if reason:
        os.waitpid(leader, 0)
        answer["infra_error"] = f"the command could not be started: {reason.decode('utf-8', 'replace')}"
        return
    killed_by = _watch(start, spools, began, leader)
    if killed_by is not None:
        kill_tree(leader, start.marker, since)
    code = kernel.wait_status(leader)
    if killed_by is None and _flooded(start, spools):
        killed_by = "output"
        kill_tree(0, start.marker, since)
    answer["killed_by"] = killed_by
    answer["exit_code"] = code if killed_by is None else None


def _flooded(start: Start, spools: list[int]) -> bool:
    return any(os.fstat(fd).st_size >= start.spool_limit for fd in spools)


def _watch(start: Start, spools: list[int], began: float, leader: int) -> str | None:
    """Wait for the leader; the reason why it has to be killed, or None where it ended by itself."""
    pidfd = os.pidfd_open(leader)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    while True:
        left = began + start.timeout_s - time.monotonic()
        if left <= 0:
            return "timeout"
        if poller.poll(max(1, int(min(left, TICK_S) * 1000))):
            return None
        if _flooded(start, spools):
            return "output"


def _lead(start: Start, spools: list[int], joins: list[int], report: int) -> None:
    try:
        kernel.reset_signals()
        os.setsid()
        for fd in joins:
            os.write(fd, b"0")
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(spools[0], 1)
        os.dup2(spools[1], 2)
        os.dup2(report, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        if start.isolated:
            # The kernel shall take a payload before it takes a sandbox's first process.
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"300")
            os.close(fd)
        os.umask(0o022)
        # The limit on processes counts per user, so it is set when this is the sandbox's user.
        kernel.drop_privileges(start.uid, start.uid)
        for name, value in start.limits.items():
            which = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(which)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (most, most))
        os.chdir(start.cwd)
        os.execve(_SHELL, _argv(start.command), start.env)  # noqa: S606 - this is the shell
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
        os.write(3, str(error).encode("utf-8", "replace")[:500])
    os._exit(126)


def _argv(command: str) -> list[str | bytes]:
    data = command.encode("utf-8", "surrogateescape")
    if len(data) <= ARGV_LIMIT:
        return ["sh", "-c", data]
    # Longer than the kernel takes as one argument. The memory file belongs to the sandbox's user, so that it can be
    # opened again through /proc.
    fd = os.memfd_create("command", 0)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return ["sh", f"/proc/self/fd/{fd}"]
