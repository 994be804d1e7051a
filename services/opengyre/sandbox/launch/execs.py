"""One command: its monitor, outside the sandbox, which starts its leader inside (see `leader`).

The monitor claims the exec's folder before anything else, so that of two monitors for one exec id only one goes on:
a command runs once. It is a session of its own and needs nobody: it holds the deadline, kills the tree, and writes
``answer.json`` by rename. Whoever wants the answer waits for the monitor's end and reads that file; where it is
missing, the monitor was killed and the outcome is unknown.

Output goes to files (see `spools`), not pipes: a background child that keeps them open holds nobody, and the size limit
of a file is the hard bound on a flood. Where the answer does not hold all of it the files are kept, as long as all that
are kept of a sandbox are at most ``keep_limit`` bytes; the oldest go first. A command whose output alone brings those
that run above that is ended as for a flood: the one with the most.

A monitor takes three signals from the service: SIGTERM (kill the tree; the answer says ``kill``), SIGUSR1 and SIGINT
(pass SIGTERM or SIGINT on to the leader's process group). They are taken from before the claim on.

Files of an exec's folder: ``claim`` (monitor's pid and start time, digest of the command), ``answer.json``.
"""

import contextlib
import json
import os
import select
import signal
import time

from opengyre.sandbox.launch import kernel, spools
from opengyre.sandbox.launch.leader import Leader
from opengyre.sandbox.launch.output import join_text, split_sizes
from opengyre.sandbox.launch.tree import kill_tree, now_ticks

TICK_S = 0.5
LOOK = 1 << 20
"""Bytes of output from which on a command looks at what all take: the one with the most has to."""
_PASSED_ON = {signal.SIGUSR1: signal.SIGTERM, signal.SIGINT: signal.SIGINT}


class Start:
    """What the monitor needs to start and watch a leader; paths are of the host, opened before the namespaces are
    entered.
    """

    def __init__(self, request: dict) -> None:
        self.leader = Leader(request)
        self.timeout_s: float = request["timeout_s"]
        self.no_output_s: float | None = request.get("no_output_s")
        self.output_limit: int = request["output_limit"]
        self.spool_limit: int = request["spool_limit"]
        self.keep_limit: int = request["keep_limit"]
        self.command = os.path.basename(request["folder"])
        self.pid: int = request["pid"]
        self.started: int = request["started"]
        self.marker: str = request["marker"]
        self.isolated: bool = request["isolated"]
        self.cgroups: list[str] = request["cgroups"]
        self.oom_files: list[str] = request.get("oom_files", [])


def take_signals() -> int:
    """Make the service's signals readable: one byte each, its number, from the descriptor returned."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, *_PASSED_ON):
        signal.signal(number, lambda *_: None)
    return readable


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


def monitor(where: int, start: Start, signals: int) -> None:
    """Run the command to its end and leave ``answer.json`` in the folder ``where``. Never raises."""
    began = time.monotonic()
    answer: dict = {"exit_code": None, "killed_by": None, "infra_error": None, "refused": None, "gone": False}
    files: list[int] = []
    oom_files: list[int] = []
    room: _Room | None = None
    try:
        room = _Room(where, start)
        oom_files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in start.oom_files]
        before = _oom_kills(oom_files)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        names = [spools.name(start.command, stream) for stream in spools.STREAMS]
        files.extend(os.open(name, flags, 0o600, dir_fd=room.spools) for name in names)
        _run(start, files, began, answer, signals, room)
        answer["oom"] = _oom_kills(oom_files) > before
    except (ProcessLookupError, FileNotFoundError):
        answer["gone"] = True
    except OSError as error:
        answer["infra_error"] = f"the command could not be started: {error}"
    answer["duration_s"] = time.monotonic() - began
    whole = True
    for name, fd in zip(spools.STREAMS, files, strict=False):
        text, total, truncated, all_of_it = _collect(fd, start)
        answer[name], answer[f"{name}_bytes"], answer[f"{name}_truncated"] = text, total, truncated
        whole = whole and all_of_it
    for fd in files:
        os.close(fd)
    try:
        _write(where, "answer.tmp", json.dumps(answer).encode("utf-8", "replace"))
        os.rename("answer.tmp", "answer.json", src_dir_fd=where, dst_dir_fd=where)
        if room is not None:
            room.leave(whole)
    except OSError:
        return  # destroyed meanwhile: there is nobody to answer


class _Room:
    """What the outputs of this sandbox's commands may take together. By descriptors, opened before the namespaces are
    entered.
    """

    def __init__(self, where: int, start: Start) -> None:
        self.spools = spools.open_folder(where)
        self._execs = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where)
        self._command = start.command
        self._bound = start.keep_limit

    def exceeded(self) -> bool:
        """Whether this command has to end, once what can be dropped is: it runs, and has written the most."""
        found = spools.sizes(self.spools)
        if sum(found.values()) <= self._bound or self._trim() <= self._bound:
            return False
        found = spools.sizes(self.spools)
        return found.get(self._command, 0) >= max(found.values(), default=0)

    def leave(self, whole: bool) -> None:
        """This command has ended. ``whole``: its answer holds all of its output."""
        if whole:
            spools.give_up(self.spools, self._command, alone=True)
        if len(os.listdir(self.spools)) > 0:
            self._trim()

    def _trim(self) -> int:
        ended = spools.ended(self._execs, list(spools.sizes(self.spools)))
        return spools.trim(self.spools, ended, self._bound, alone=True)


def _oom_kills(files: list[int]) -> int:
    """Processes that the kernel took from the sandbox for its memory limit so far."""
    found = 0
    for fd in files:
        for line in os.pread(fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                found += int(line.split()[1])
    return found


def _collect(fd: int, start: Start) -> tuple[str, int, bool, bool]:
    total = os.fstat(fd).st_size
    head, tail = split_sizes(total, start.output_limit)
    first, last = os.pread(fd, head, 0), os.pread(fd, tail, total - tail) if tail else b""
    text = join_text(first, last, total)
    truncated = total > head + tail or total >= start.spool_limit
    return text, total, truncated, total == head and text.encode("utf-8", "replace") == first


def _run(start: Start, files: list[int], began: float, answer: dict, signals: int, room: _Room) -> None:
    joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in start.cgroups]
    if start.isolated:
        kernel.enter(start.pid, start.started)
    since = now_ticks() if start.isolated else None
    failed, report = os.pipe()
    leader = os.fork()
    if leader == 0:
        start.leader.become(files, joins, report)
    os.close(report)
    with open(failed, "rb") as pipe:
        reason = pipe.read()  # ends when the leader has become the shell
    if reason:
        os.waitpid(leader, 0)
        kind, _, text = reason.decode("utf-8", "replace").partition("\n")
        if kind == "invalid_request":
            answer["refused"] = text
        else:
            answer["infra_error"] = f"the command could not be started: {text}"
        return
    killed_by = _watch(start, files, began, leader, signals, room)
    if killed_by is not None:
        kill_tree(leader, start.marker, since)
    code = kernel.wait_status(leader)
    if killed_by is None and _flooded(start, files):
        killed_by = "output"
        kill_tree(0, start.marker, since)
    answer["killed_by"] = killed_by
    answer["exit_code"] = code if killed_by is None else None


def _flooded(start: Start, files: list[int]) -> bool:
    return any(os.fstat(fd).st_size >= start.spool_limit for fd in files)


def _watch(start: Start, files: list[int], began: float, leader: int, signals: int, room: _Room) -> str | None:
    """Wait for the leader; the reason why it has to be killed, or None where it ended by itself."""
    pidfd = os.pidfd_open(leader)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(signals, select.POLLIN)
    tick = TICK_S if start.no_output_s is None else min(TICK_S, start.no_output_s / 4)
    written, at = 0, began
    while True:
        now = time.monotonic()
        left = began + start.timeout_s - now
        ready = {fd for fd, _ in poller.poll(max(1, int(min(left, tick) * 1000)) if left > 0 else 0)}
        if pidfd in ready:  # first: who comes late to look, on a busy machine, ends nothing that has ended by itself
            return None
        if left <= 0:
            return "timeout"
        if signals in ready and _told(signals, leader):
            return "kill"
        if _flooded(start, files):
            return "output"
        if sum(os.fstat(fd).st_size for fd in files) > LOOK and room.exceeded():
            return "output"
        if start.no_output_s is not None:
            size, now = sum(os.fstat(fd).st_size for fd in files), time.monotonic()
            if size != written:
                written, at = size, now
            if now - at >= start.no_output_s:
                return "no_output"


def _told(signals: int, leader: int) -> bool:
    """Whether to kill; pass other signals on."""
    told = set(os.read(signals, 4096))
    if signal.SIGTERM in told:
        return True
    for number in told & set(_PASSED_ON):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, _PASSED_ON[signal.Signals(number)])
    return False
