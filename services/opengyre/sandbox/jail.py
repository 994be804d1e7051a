"""What a sandbox sees: bubblewrap's arguments. Pure but for looking at which system folders there are.

Everything is read-only or a sized tmpfs: an unsized one ends with the kernel taking the sandbox's first process. The
first process is ``sleep`` as pid 1: no signal from inside ends it, and as it ignores SIGCHLD the kernel reaps what is
orphaned to it.
"""

from collections.abc import Mapping
from pathlib import Path

from opengyre.sandbox.core import Spec
from opengyre.sandbox.launch.files import WORKSPACE

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = 1000
LOGS_MB = 16
SHM_MB = 8
_FIRST = ("sleep", "2147483647")
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_BINDS = ("alternatives", "ld.so.cache", "ssl/certs", "localtime")
_ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
DATA = list(_ETC_FILES.values())
FIRST_DATA_FD = 4


def arguments(spec: Spec, marker: str, *, own_ids: bool, binds: Mapping[str, str] | None = None) -> list[str]:
    """Arguments, the name first. ``own_ids``: it is started as root of a user namespace that has a range of ids,
    else it makes one with a single id for itself. ``binds``: path in the sandbox -> folder of the machine.
    """
    args = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not own_ids:
        args += ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    args += ["--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL", "--info-fd", "3"]
    args += ["--clearenv", "--setenv", "PATH", PATH, "--setenv", "GYRE_SANDBOX", marker]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in _TOP:
        top = Path("/", name)
        if top.is_symlink():
            args += ["--symlink", str(top.readlink()), str(top)]
        elif top.exists():
            args += ["--ro-bind", str(top), str(top)]
    args += ["--dir", "/etc", "--dir", "/root", "--dir", "/run", "--dir", "/var"]
    args += ["--symlink", "../tmp", "/var/tmp"]  # noqa: S108 - the sandbox's own
    for offset, name in enumerate(_ETC_FILES):
        args += ["--perms", "0644", "--file", str(FIRST_DATA_FD + offset), f"/etc/{name}"]
    for name in _ETC_BINDS:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    args += ["--proc", "/proc", "--dev", "/dev"]
    args += _tmpfs("/dev/shm", SHM_MB, "1777")  # noqa: S108 - the sandbox's own
    args += _tmpfs(WORKSPACE, spec.workspace_mb, "0755")
    args += _tmpfs("/tmp", spec.workspace_mb, "1777")  # noqa: S108 - the sandbox's own
    args += _tmpfs("/logs", LOGS_MB, "0755")
    for inside, outside in (binds or {}).items():
        for parent in reversed(Path(inside).parents[:-1]):  # what bwrap makes by itself only root may enter
            args += ["--perms", "0755", "--dir", str(parent)]
        args += ["--ro-bind", outside, inside]
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]
    return [*args, "--", *_FIRST]


def _tmpfs(path: str, size_mb: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size_mb << 20), "--tmpfs", path]


def environment(spec: Spec, marker: str, exec_marker: str, home: str) -> dict[str, str]:
    """Environment of a command: nothing of the service's."""
    base = {"PATH": PATH, "HOME": home, "PWD": home, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
    return {**base, **spec.env, "GYRE_SANDBOX": marker, "GYRE_EXEC": exec_marker}


def spool_limit(spec: Spec) -> int:
    """Most bytes of one stream of output, and of any file, in bytes."""
    return max(16, spec.workspace_mb) << 20


def limits(spec: Spec, *, memory_by_cgroup: bool) -> dict[str, int]:
    """Resource limits of a command. Processes count per user, and each sandbox has a user of its own."""
    found = {"NPROC": spec.pids, "FSIZE": spool_limit(spec), "CORE": 0, "NOFILE": 1024, "CPU": 24 * 3600}
    if not memory_by_cgroup:
        found["AS"] = spec.memory_mb << 20
    return found
