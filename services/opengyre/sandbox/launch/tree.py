"""Killing what an exec started, and all that runs in a sandbox.

A process may leave its session, its parent and its environment behind, so none of these alone finds it. What belongs
to an exec is: its descendants, its session, what carries its marker, and, in a sandbox of its own, whatever started
after it and does not carry the marker of another exec. A process that is becoming another program has no environment
for a moment, neither its own nor another's: what its age would decide waits for the next round.

First all are stopped, round after round until none is new (a stopped process does not fork, and the limit on processes
bounds the rounds), then all are killed, and their ends are waited for, so that who hears of it finds nothing of theirs:
no process, no port, no writer of a file.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable

MARKER = "GYRE_EXEC"
SANDBOX_MARKER = "GYRE_SANDBOX"
BOUND_S = 3.0
_PF_KTHREAD = 0x00200000


class Process:
    """A row of /proc as the caller's pid namespace shows it. ``arriving``: it is becoming a program just now, so that
    nobody can say yet whose marker it carries.
    """

    __slots__ = ("arriving", "marker", "parent", "pid", "session", "started")

    def __init__(
        self, pid: int, parent: int, session: int, started: int, marker: str | None, *, arriving: bool = False
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.started = started
        self.marker = marker
        self.arriving = arriving


def belonging(table: list[Process], leader: int, marker: str, since: int | None) -> set[int]:
    """Pids of the processes that belong to the exec with that marker; ``leader`` 0 where its number is not known. Pure.

    ``since``: start of the exec in clock ticks, where the table holds one sandbox only, so that age and the lack of
    another's marker decide as well.
    """
    mine = {row.pid for row in table if row.marker == marker or (leader and leader in (row.pid, row.session))}
    if since is not None:
        young = (row for row in table if row.started >= since and row.pid != 1)
        mine |= {row.pid for row in young if row.marker is None and not row.arriving}
    grown = True
    while grown:
        more = {row.pid for row in table if row.parent in mine and row.pid not in mine}
        grown = bool(more)
        mine |= more
    return mine - {1}


def read_table(variable: str = MARKER) -> list[Process]:
    """All processes that this process sees, but itself and the dead; the marker is the value of ``variable``."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [row for pid in pids if pid != own and (row := read_process(pid, variable)) is not None]


def read_process(pid: int, variable: str = MARKER) -> Process | None:
    """The row of a process, None where there is none, it is dead or nobody may look at it."""
    try:
        fields = _proc(pid, "stat").rpartition(b")")[2].split()
        if not fields or fields[0] in (b"Z", b"X"):
            return None
        # Of a process that is becoming a program both are empty; one without an environment has a command line. The
        # environment is read again after that: the process may have arrived in between.
        environ = _proc(pid, "environ")
        arriving = not environ and not int(fields[6]) & _PF_KTHREAD and not _proc(pid, "cmdline")
        environ = environ or _proc(pid, "environ")
    except (FileNotFoundError, ProcessLookupError):
        return None
    key = variable.encode() + b"="
    values = [item[len(key) :].decode("utf-8", "replace") for item in environ.split(b"\0") if item.startswith(key)]
    marker = values[0] if values else None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), marker, arriving=arriving and not environ)


def _proc(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 21)
    except PermissionError:
        return b""


def now_ticks() -> int:
    """This moment in the unit of a process's start time."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _kill_all_of(leader: int, marker: str, since: int | None, variable: str = MARKER) -> None:
    end(lambda: read_table(variable), lambda table: belonging(table, leader, marker, since), BOUND_S)


def stop(look: Callable[[], list[Process]], choose: Callable[[list[Process]], set[int]], deadline: float) -> set[int]:
    """Stop what ``choose`` takes of a table, until none of it is new and nobody is arriving, and return its pids. Ends
    with the first round after ``deadline`` (``time.monotonic()``), in which who is arriving counts as unmarked.
    """
    stopped: set[int] = set()
    late = False
    while not late:
        table = look()
        # Not before the first round, however late that is on a machine that is busy.
        late = time.monotonic() >= deadline
        if late:
            for row in table:
                row.arriving = False
        new = choose(table) - stopped
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
        if not new and not any(row.arriving and row.pid not in stopped for row in table):
            break
        if not new:
            time.sleep(0.001)
    return stopped


def end(
    look: Callable[[], list[Process]],
    choose: Callable[[list[Process]], set[int]],
    bound_s: float,
    there: Callable[[int], bool] | None = None,
) -> None:
    """`stop`, then kill what was stopped, and wait until it is gone; for ``bound_s`` seconds at most. ``there``: how a
    process is told that is not gone, where one that nobody has waited for is not.
    """
    deadline = time.monotonic() + bound_s
    stopped = stop(look, choose, deadline)
    for pid in stopped:
        _signal(pid, signal.SIGKILL)
    while any((there or runs)(pid) for pid in stopped) and time.monotonic() < deadline:
        time.sleep(0.002)


def kill_tree(leader: int, marker: str, since: int | None) -> None:
    """Kill an exec's processes. Called by its monitor, whose next child is born in the sandbox's pid namespace.

    ``leader`` is the monitor's child, 0 where it has ended.
    """
    if leader:
        _signal(leader, signal.SIGSTOP)
    helper = os.fork()
    if helper == 0:
        try:
            # In a pid namespace of its own the leader has another number; there the marker finds it.
            _kill_all_of(0 if since is not None else leader, marker, since)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)
    if leader:
        _signal(leader, signal.SIGKILL)


def stop_everything() -> list[int]:
    """Stop every process of this pid namespace but the first and the caller, round after round until none is new;
    those that were not stopped before.
    """
    own, held = os.getpid(), set()
    deadline = time.monotonic() + BOUND_S
    while new := [pid for pid in _going() if pid not in (1, own) and pid not in held]:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        held.update(new)
        if time.monotonic() >= deadline:
            break
    return sorted(held)


def _going() -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _state(pid) not in (b"", b"T", b"t", b"Z", b"X")]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    return _state(pid) not in (b"", b"Z", b"X")


def _state(pid: int) -> bytes:
    """As /proc says it; nothing where there is no such process."""
    try:
        return _proc(pid, "stat").rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return b""


def go_on(pids: Iterable[int]) -> None:
    """Let them run again."""
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def kill_everything() -> None:
    """Kill every process that this process may signal in its pid namespace, except the first one and itself, and wait
    for their ends, for a bounded time.
    """
    own, deadline = os.getpid(), time.monotonic() + BOUND_S
    try:
        os.kill(-1, signal.SIGKILL)  # one step for the kernel: nothing can fork its way out of it
    except ProcessLookupError:
        return
    while [pid for pid in _going() if pid not in (1, own)] and time.monotonic() < deadline:
        time.sleep(0.002)


def kill_marked(sandbox: str) -> None:
    """Kill every process whose environment marks it as the sandbox's, with its descendants."""
    _kill_all_of(0, sandbox, None, SANDBOX_MARKER)
