"""The processes of containers as this machine shows them: ending a command with all that it started, counting what the
kernel ended for memory, a socket in a container's network.

An engine ends no more than the one process that it started for a command. What belongs to a command is found as
`opengyre.sandbox.launch.tree` finds it; here the numbers are the machine's, as the engine is on it.
"""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from opengyre.sandbox.cgroups import find_mounts
from opengyre.sandbox.launch import tree

BOUND_S = 5.0
CLONE_NEWNET = 0x40000000
_ARRIVING = "?"  # in no exec id


def pids(container: str) -> set[int]:
    """Processes of the container with that id, by the cgroups that they are in."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if container in (folder / "cgroup").read_text():
                    found.add(int(folder.name))
    return found


def _holders(first: int) -> set[int]:
    """Init and its first child, which hold the container: neither is a command's."""
    try:
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    except OSError:
        children = []
    return {first, *(int(child) for child in children[:1])}


def _table(container: str, spare: set[int]) -> list[tree.Process]:
    own = pids(container)
    rows = [row for pid in own - spare if (row := tree.read_process(pid)) is not None]
    for row in rows:
        if row.marker is None and row.parent not in own:
            # Its parent is the engine's: a command that is only just coming into being, and so not of this one.
            row.marker, row.arriving = _ARRIVING, False
    return rows


def end_command(container: str, first: int, leader: int, marker: str, since: int) -> None:
    """Kill what belongs to a command, and wait until it is gone, for `BOUND_S` at most.

    ``first``: the container's init; ``leader``: the command's first process, 0 where it has ended; ``since``: clock
    ticks since boot at its start.
    """
    spare = _holders(first)
    mine = partial(tree.belonging, leader=leader, marker=marker, since=since)
    tree.end(lambda: _table(container, spare), mine, BOUND_S, _there)


def end_all(container: str, first: int) -> None:
    """Kill every process of a container but what holds it, and wait until all are gone, for `BOUND_S` at most."""
    spare = _holders(first)
    tree.end(lambda: _table(container, spare), lambda table: {row.pid for row in table}, BOUND_S, _there)


def _there(pid: int) -> bool:
    """Also one that has ended and that init, a program, has not come to yet: it counts as one of the processes that the
    container may have.
    """
    return Path(f"/proc/{pid}").exists()


@contextmanager
def stopped(container: str, first: int) -> Iterator[None]:
    """Hold all that commands run in a container, and let it go on afterwards."""
    spare = _holders(first)
    deadline = time.monotonic() + BOUND_S
    held = tree.stop(lambda: _table(container, spare), lambda table: {row.pid for row in table}, deadline)
    try:
        yield
    finally:
        tree.go_on(held)


def signal_group(container: str, leader: int, number: int) -> bool:
    """A signal to the process group of a command's first process; False where that is not in the container."""
    with suppress(ProcessLookupError):
        if leader in pids(container):
            os.killpg(os.getpgid(leader), number)
            return True
    return False


def oom_kills(first: int) -> int:
    """How many processes of the container of ``first`` the kernel has ended for its memory limit, by its cgroup: the
    engine itself tells of its first process only. 0 where that cannot be read.
    """
    try:
        mounts = find_mounts(Path("/proc/self/mountinfo").read_text(), Path(f"/proc/{first}/cgroup").read_text())
    except OSError:
        return 0
    for name, file in (("memory", "memory.oom_control"), ("unified", "memory.events")):
        with suppress(OSError, KeyError, ValueError):
            lines = (mounts[name].own / file).read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def listen(first: int, port: int) -> socket.socket:
    """A socket that listens on the loopback of a container's network; it stays there, whoever holds it."""
    made: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            _enter_network(first)
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(128)
            except OSError:
                listener.close()
                raise
            made.append(listener)
        except OSError as error:
            made.append(error)

    # A network namespace is a thread's own: one that ends with this takes nobody else along.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    [result] = made
    if isinstance(result, OSError):
        raise result
    return result


def _enter_network(first: int) -> None:
    fd = os.open(f"/proc/{first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
