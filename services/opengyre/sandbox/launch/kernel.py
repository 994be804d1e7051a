"""The system calls that Python 3.11 does not wrap. Linux only; every failure is an `OSError` with its errno."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_EINVAL = 22
_PF_EXITING = 4

_TO_RESET = (
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    signal.SIGUSR1,
)

_libc = ctypes.CDLL(None, use_errno=True)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces of the process behind the pidfd ``fd``; a new pid namespace takes the next child."""
    _check(_libc.setns(fd, flags), "setns")


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def drop_privileges(uid: int | None, gid: int | None, keep: int = 0) -> None:
    """Become ``uid``/``gid`` (where given) with no capability left but the bits of ``keep``, and none to be gained."""
    if gid is not None and uid is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
    # The bounding set is emptied while CAP_SETPCAP is still there; without it there is nothing to bound.
    for capability in range(64):
        if keep >> capability & 1:
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if uid is not None:
        os.setresuid(uid, uid, uid)
    # Kernels without ambient capabilities answer EINVAL.
    if _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) != 0 and ctypes.get_errno() != _EINVAL:
        _check(-1, "prctl(ambient)")
    _set_capabilities(keep)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def _set_capabilities(mask: int) -> None:
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    data = (_CapData * 2)()
    data[0].effective = data[0].permitted = mask & 0xFFFFFFFF
    data[1].effective = data[1].permitted = mask >> 32
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


@contextlib.contextmanager
def files_as(uid: int) -> Iterator[None]:
    """Use files as that user and group, with all rights to them that this process has otherwise."""
    with open("/proc/self/status", encoding="ascii") as file:
        permitted = next(int(line.split()[1], 16) for line in file if line.startswith("CapPrm:"))
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    _set_capabilities(permitted)  # the change of user took those to files
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)
        _set_capabilities(permitted)


def keep_reading_only() -> None:
    """Give up every capability in the user namespace that was entered, but to read files whatever their mode."""
    _set_capabilities(1 << _CAP_DAC_READ_SEARCH)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def set_undumpable() -> None:
    """Hide this process's memory and files from everyone without CAP_SYS_PTRACE."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(dumpable)")


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(subreaper)")


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None where there is none or it is ending.

    A sandbox's first process ends its others before it is gone itself: whoever sees those die must see it as ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING else int(fields[19])


def open_process(pid: int, started: int) -> int:
    """A pidfd of exactly the process that started then; `ProcessLookupError` where it is gone."""
    fd = os.pidfd_open(pid)
    if start_time(pid) != started:
        os.close(fd)
        raise ProcessLookupError(pid)
    return fd


def enter(pid: int, started: int, flags: int = ALL_NAMESPACES) -> None:
    """Enter the namespaces of a sandbox's first process; the next child is born in its pid namespace."""
    fd = open_process(pid, started)
    try:
        setns(fd, flags)
    finally:
        os.close(fd)


def enter_mounts(pid: int, started: int, path: str) -> None:
    """Make a folder that only the machine's root may open, in the mount namespace of that process, the working folder;
    then come back, so that all other paths are the machine's.
    """
    back = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    enter(pid, started, CLONE_NEWNS)
    there = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    setns(back, CLONE_NEWNS)
    os.fchdir(there)
    for fd in (back, there):
        os.close(fd)


def wait_status(pid: int) -> int:
    """Exit code of a child, 128 + signal where one ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def reset_signals() -> None:
    """Default dispositions, nothing blocked: a command must not inherit what Python ignores."""
    signal.set_wakeup_fd(-1)
    for number in _TO_RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
