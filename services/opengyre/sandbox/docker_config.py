"""What a sandbox is to a Docker engine: the container, the environment of its commands, the scripts in it. Pure.

The first process of a container is the engine's own init, which reaps what is orphaned to it; the second holds the
container open. Both are root's. A command is another user's unless an image says otherwise, and has no capability.

Without ``image`` a container looks as a bubblewrap sandbox does: a read-only root and sized tmpfs folders to write to.
With one the root can be written to, and the folders are part of it.

Of an image nothing is needed but ``sh``, ``sleep``, ``cat``, ``head``, ``mkdir``, ``dirname``, ``chmod`` and ``tar``.
"""

from collections.abc import Mapping
from typing import Any

from opengyre.sandbox import allowlist, jail
from opengyre.sandbox.core import Options, Spec

KEY_LABEL = "org.opengyre.key"
SANDBOX_LABEL = "org.opengyre.sandbox"
CONTROL = "/.gyre"
"""Where the files of commands are: a folder of the node, root's, with a folder a command."""
WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/logs")  # noqa: S108 - the sandbox's own
USER = f"{jail.USER}:{jail.USER}"
INLINE_COMMAND = 96 << 10
"""Bytes of a command that fit into one argument (the kernel's bound is 128 KiB); a longer one is a file."""
OWN_PROCESSES = 16
"""Beside the commands' own: init, the holder, what the service runs in it, and the threads of the engine's starter."""
IMAGE_FILE_LIMIT = 4 << 30
"""Bytes of the largest file where the root can be written to."""
# What package managers need where an image's commands are root's; none of it reaches past the container.
IMAGE_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_HOLD = ("sleep", "2147483647")

# The outer shell keeps the exec's own output open and nothing else does, so that the exec ends when its command does,
# whatever the command leaves running. Raising one's own score needs no right: the kernel shall take a payload first.
# A signal to the group is for the command; its status is told all the same.
RUN = """
{ echo 300 > /proc/self/oom_score_adj; } 2>/dev/null
trap : TERM INT
in=/dev/null
[ -e "$1/stdin" ] && in=$1/stdin
if [ -e "$1/command" ]; then
  sh "$1/command" <"$in" >>"$1/stdout" 2>>"$1/stderr"
else
  sh -c "$2" <"$in" >>"$1/stdout" 2>>"$1/stderr"
fi
code=$?
echo $code >"$1/code"
exit $code
"""

# Exit statuses of the scripts below that say something.
CANNOT, NOT_REGULAR = 64, 65
READ = f"""
[ -f "$1" ] || {{ [ -e "$1" ] && exit {NOT_REGULAR}; }}
head -c "$2" -- "$1" || exit {CANNOT}
"""
WRITE = f"""
umask 022
mkdir -p -- "$(dirname -- "$1")" || exit {CANNOT}
if [ -e "$1" ] && [ ! -f "$1" ]; then exit {NOT_REGULAR}; fi
head -c "$2" >"$1" || exit {CANNOT}
chmod -- "$3" "$1" || exit {CANNOT}
"""
PACK = f'cd -- "$1" || exit {CANNOT}; shift; exec tar -c -f - "$@"'
UNPACK = f'umask 022; mkdir -p -- "$1" && cd -- "$1" || exit {CANNOT}; exec tar -x -p -o -f -'


def script(text: str, *arguments: str) -> list[str]:
    """A script as the arguments of an exec."""
    return ["sh", "-c", text, "sh", *arguments]


def run(exec_id: str, command: bytes) -> list[str]:
    """The arguments of a command; what is too long for one is read from its file."""
    inline = command.decode("utf-8", "surrogateescape") if len(command) <= INLINE_COMMAND else ""
    return script(RUN, f"{CONTROL}/{exec_id}", inline)


def spool_limit(spec: Spec) -> int:
    """Most bytes of one stream of output; a flood is what has so many."""
    return jail.spool_limit(spec)


def container(
    spec: Spec, *, key: str, image: str, control: str, binds: Mapping[str, str], storage: bool
) -> dict[str, Any]:
    """The engine's description of a sandbox.

    ``image``: the name of what it is made from. ``control``: the node's folder that is `CONTROL`. ``binds``: path in
    the sandbox -> folder of the node. ``storage``: whether the engine can bound the size of a root.
    """
    host: dict[str, Any] = {
        "Init": True,
        "NetworkMode": "none",
        "Memory": spec.memory_mb << 20,
        "MemorySwap": spec.memory_mb << 20,
        "PidsLimit": spec.pids + OWN_PROCESSES,
        "CapDrop": ["ALL"],
        "CapAdd": [] if spec.image is None else list(IMAGE_CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "OomScoreAdj": 0,
        "ShmSize": jail.SHM_MB << 20,
        "Ulimits": [_ulimit("core", 0), _ulimit("fsize", _file_limit(spec))],
        "Binds": [f"{control}:{CONTROL}", *(f"{outside}:{inside}:ro" for inside, outside in binds.items())],
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
    if spec.image is None:
        host["ReadonlyRootfs"] = True
        host["Tmpfs"] = {
            WORKSPACE: f"{_tmpfs(spec.workspace_mb)},mode=0755",
            "/tmp": f"{_tmpfs(spec.workspace_mb)},mode=1777",  # noqa: S108 - the sandbox's own
            "/logs": f"{_tmpfs(jail.LOGS_MB)},mode=0755",
        }
    elif storage and spec.disk_mb is not None:
        host["StorageOpt"] = {"size": f"{spec.disk_mb}m"}
    if spec.cpus is not None:
        host["NanoCpus"] = int(spec.cpus * 1e9)
    return {
        "Image": image,
        "Hostname": "sandbox",
        "User": "0:0",
        "Entrypoint": list(_HOLD),
        "Cmd": [],
        "Env": [],
        "OpenStdin": False,
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "Labels": {KEY_LABEL: key, SANDBOX_LABEL: spec.sandbox},
        "HostConfig": host,
    }


def _tmpfs(size_mb: int) -> str:
    return f"rw,exec,nosuid,nodev,size={size_mb << 20},uid={jail.USER},gid={jail.USER}"


def _file_limit(spec: Spec) -> int:
    return spool_limit(spec) if spec.image is None else IMAGE_FILE_LIMIT


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def environment(spec: Spec, marker: str, exec_marker: str, options: Options) -> dict[str, str]:
    """Environment of a command: nothing of the service's. With an image, beside what that one says."""
    base = {"TERM": "dumb"}
    if spec.image is None:
        base |= {"PATH": jail.PATH, "HOME": WORKSPACE, "PWD": WORKSPACE, "USER": "agent", "LANG": "C.UTF-8"}
    said = {**allowlist.variables(spec.network), **spec.env, **options.env}
    return {**base, **said, "GYRE_SANDBOX": marker, "GYRE_EXEC": exec_marker}
