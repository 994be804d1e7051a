"""The leader of a command: from a fork of its monitor, already in the sandbox's namespaces, to its shell."""

import os
import resource
import stat

from opengyre.sandbox.launch import kernel

ARGV_LIMIT = 96 * 1024
PASSWD_LIMIT = 1 << 20
_SHELL = "/bin/sh"


class RefusedError(Exception):
    """What was asked for is not there in the sandbox; the sentence names the field."""


def find_user(passwd: str, user: str) -> tuple[int, int, str, str]:
    """``(uid, gid, name, home)`` of a name, a number or ``user:group`` with numbers, out of the text of
    /etc/passwd; a number needs no line there. Pure; raises `RefusedError`.
    """
    name, _, group = user.partition(":")
    rows = [line.split(":") for line in passwd.splitlines() if line.count(":") >= 6]
    for row in rows:
        if (row[0] == name or row[2] == name) and row[2].isdigit() and row[3].isdigit():
            uid, gid, known, home = int(row[2]), int(row[3]), row[0], row[5] or "/"
            break
    else:
        if not name.isdigit():
            raise RefusedError(f"user is {user[:100]!r}; allowed is a name of the sandbox's /etc/passwd or a number")
        uid, gid, known, home = int(name), int(name), name, "/"
    if group:
        if not group.isdigit():
            raise RefusedError(f"user is {user[:100]!r}; allowed after the colon is a number")
        gid = int(group)
    if max(uid, gid) > 65534:
        raise RefusedError(f"user is {user[:100]!r}; allowed are ids of at most 65534")
    return uid, gid, known, home


def read_passwd() -> str:
    """Text of the sandbox's /etc/passwd, whatever the sandbox made of it."""
    try:
        fd = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.read(fd, PASSWD_LIMIT).decode("utf-8", "replace")
    finally:
        os.close(fd)


class Leader:
    """What the leader needs; paths are the sandbox's."""

    def __init__(self, request: dict) -> None:
        self.command: str = request["command"] if "command" in request else _read(request["command_file"])
        # Opened now: the service removes the file when the command is claimed.
        path: str | None = request.get("stdin_file")
        self.stdin = -1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.env: dict[str, str] = request["env"]
        self.uid: int | None = request["uid"]
        self.user: str | None = request.get("user")
        self.keep: int = request.get("keep", 0)
        self.cwd: str = request["cwd"]
        self.limits: dict[str, int] = request["limits"]
        self.isolated: bool = request["isolated"]

    def become(self, spools: list[int], joins: list[int], report: int) -> None:
        """Does not return. A failure is written to ``report``: the kind of error, a line end, the sentence."""
        try:
            # Descriptor 3 from the first step on: whatever fails is told there.
            self.stdin = os.dup(self.stdin) if 0 <= self.stdin <= 3 else self.stdin
            spools = [os.dup(fd) if fd <= 3 else fd for fd in spools]
            joins = [os.dup(fd) if fd <= 3 else fd for fd in joins]
            if report != 3:
                os.dup2(report, 3, inheritable=False)
            self._become(spools, joins)
        except RefusedError as error:
            os.write(3, f"invalid_request\n{error}".encode("utf-8", "replace")[:500])
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
            os.write(3, f"infra_error\n{error}".encode("utf-8", "replace")[:500])
        os._exit(126)

    def _become(self, spools: list[int], joins: list[int]) -> None:
        kernel.reset_signals()
        os.setsid()
        for fd in joins:
            os.write(fd, b"0")
        os.dup2(self.stdin if self.stdin >= 0 else os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(spools[0], 1)
        os.dup2(spools[1], 2)
        os.closerange(4, 1 << 16)
        if self.isolated:
            # The kernel shall take a payload before it takes a sandbox's first process.
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"300")
            os.close(fd)
        os.umask(0o022)
        uid, gid, env = self.uid, self.uid, self.env
        if self.user is not None:
            uid, gid, name, home = find_user(read_passwd(), self.user)
            env = {"HOME": home, "USER": name, **env}
        # The limit on processes counts per user, so it is set when this is the sandbox's user.
        kernel.drop_privileges(uid, gid, keep=self.keep if uid == 0 else 0)
        for name, value in self.limits.items():
            which = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(which)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (most, most))
        try:
            os.chdir(self.cwd)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise RefusedError(
                f"cwd is {self.cwd[:200]!r}, which cannot be entered ({error.strerror}); allowed is a folder "
                "of the sandbox"
            ) from error
        os.execve(_SHELL, _argv(self.command), {"PWD": self.cwd, **env})  # noqa: S606 - this is the shell


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


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
