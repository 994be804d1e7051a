"""What a sandbox sees: bubblewrap's arguments. Pure but for looking at which system folders there are.

Everything is read-only or a sized tmpfs: an unsized one ends with the kernel taking the sandbox's first process. The
first process is ``sleep`` as pid 1: no signal from inside ends it, and as it ignores SIGCHLD the kernel reaps what is
orphaned to it.
"""

from collections.abc import Mapping
from pathlib import Path

from opengyre.sandbox.core import Spec
from opengyre.sandbox.launch import mounts
from opengyre.sandbox.launch.files import WORKSPACE

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = 1000
# What uid 0 of a sandbox with a range of ids may, in its user namespace only: what `useradd`, `chown` and package
# managers need. None of them mounts, traces or makes devices.
ROOT_CAPABILITIES = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10, 18, 31))
LOGS_MB = 16
SHM_MB = 8
DISK_MB = 1024
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
IMAGE_FILES = {name: _ETC_FILES[name] for name in ("hosts", "hostname")}
FIRST_DATA_FD = 4


def arguments(spec: Spec, marker: str, *, own_ids: bool, binds: Mapping[str, str] | None = None) -> list[str]:
    """Arguments, the name first. ``own_ids``: it is started as root of a user namespace that has a range of ids,
    else it makes one with a single id for itself. ``binds``: path in the sandbox -> folder of the machine.
    """
    args = _head(marker, own_ids=own_ids)
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
    args += _binds(binds)
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]
    return [*args, "--", *_FIRST]


def image_arguments(marker: str, binds: Mapping[str, str] | None = None) -> list[str]:
    """Arguments for a sandbox whose root is mounted at `mounts.ROOT`; it has a range of ids."""
    args = [*_head(marker, own_ids=True), "--bind", mounts.ROOT, "/"]
    for path, mode in ((WORKSPACE, "0755"), ("/logs", "0755"), ("/tmp", "1777")):  # noqa: S108 - the sandbox's own
        args += ["--perms", mode, "--dir", path]
    for offset, name in enumerate(IMAGE_FILES):
        args += ["--perms", "0644", "--file", str(FIRST_DATA_FD + offset), f"/etc/{name}"]
    args += ["--proc", "/proc", "--dev", "/dev"]
    args += _tmpfs("/dev/shm", SHM_MB, "1777")  # noqa: S108 - the sandbox's own
    args += ["--bind", mounts.STORE, mounts.HIDDEN]
    args += _binds(binds)
    return [*args, "--remount-ro", "/dev", "--chdir", "/", "--", *_FIRST]


def _head(marker: str, *, own_ids: bool) -> list[str]:
    args = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not own_ids:
        args += ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    args += ["--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL", "--info-fd", "3"]
    args += ["--clearenv", "--setenv", "PATH", PATH, "--setenv", "GYRE_SANDBOX", marker]
    return args


def _binds(binds: Mapping[str, str] | None) -> list[str]:
    args = []
    for inside, outside in (binds or {}).items():
        for parent in reversed(Path(inside).parents[:-1]):  # what bwrap makes by itself only root may enter
            args += ["--perms", "0755", "--dir", str(parent)]
        args += ["--ro-bind", outside, inside]
    return args


def _tmpfs(path: str, size_mb: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size_mb << 20), "--tmpfs", path]


def environment(env: Mapping[str, str], marker: str, exec_marker: str, home: str | None) -> dict[str, str]:
    """Environment of a command: nothing of the service's. ``home`` None: of the user that the command gets."""
    base = {"PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
    if home is not None:
        base |= {"HOME": home, "USER": "agent"}
    return {**base, **env, "GYRE_SANDBOX": marker, "GYRE_EXEC": exec_marker}


def disk_mb(spec: Spec) -> int:
    """Size of all that is written to the root of a sandbox with an image, in MiB."""
    return DISK_MB if spec.disk_mb is None else spec.disk_mb


def spool_limit(spec: Spec) -> int:
    """Most bytes of one stream of output, and of any file, in bytes."""
    return max(16, spec.workspace_mb) << 20


def limits(spec: Spec, *, memory_by_cgroup: bool) -> dict[str, int]:
    """Resource limits of a command. Processes count per user, and each sandbox has a user of its own."""
    largest = spool_limit(spec) if spec.image is None else max(spool_limit(spec), disk_mb(spec) << 20)
    found = {"NPROC": spec.pids, "FSIZE": largest, "CORE": 0, "NOFILE": 1024, "CPU": 24 * 3600}
    if not memory_by_cgroup:
        found["AS"] = spec.memory_mb << 20
    return found
