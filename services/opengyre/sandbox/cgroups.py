"""Control groups, where this process may make any: memory, processes and CPU time by v1 or v2, atomic kill by v2.

Each sandbox has a folder of its name under one of ours, below the cgroup that the service itself is in, so that a
limit put on the service holds for its sandboxes too. Whatever is under our folder and belongs to no live sandbox is
left over.
"""

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("gyre.sandbox")

REMOVE_BOUND_S = 15.0
PERIOD_US = 100_000


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy: where, whether v2, and the service's own cgroup in it."""

    own: Path
    v2: bool


def find_mounts(mountinfo: str, own_cgroup: str) -> dict[str, Mount]:
    """``memory``, ``pids``, ``cpu`` (v1) and ``unified`` (v2), out of the texts of /proc/self/mountinfo and
    /proc/self/cgroup. Pure.
    """
    own = {names or "unified": path for _, names, path in map(_fields, own_cgroup.splitlines())}
    found: dict[str, Mount] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = [*right.split(), "", "", ""][:3]
        if kind == "cgroup2":
            found["unified"] = Mount(_below(point, root, own.get("unified", "/")), True)
        elif kind == "cgroup":
            for controller in {"memory", "pids", "cpu"} & set(options.split(",")):
                path = next((path for names, path in own.items() if controller in names.split(",")), "/")
                found[controller] = Mount(_below(point, root, path), False)
    return found


def _fields(line: str) -> tuple[str, str, str]:
    number, names, path = line.split(":", 2)
    return number, names, path


def _below(point: str, root: str, own: str) -> Path:
    """The service's own cgroup as seen through a mount of ``root``; the mount's top where it is not below that."""
    if root != "/" and own.startswith(root):
        own = own[len(root) :]
    return Path(point) / own.lstrip("/")


class Cgroups:
    """Folders of all sandboxes under one key."""

    def __init__(self, key: str) -> None:
        self._tops: list[Mount] = []
        self.memory = False
        self.pids = False
        self.cpu = False
        # Made for a sandbox only where it has a limit of that.
        self._for_cpus: set[Path] = set()
        try:
            mounts = find_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        except OSError:
            mounts = {}
        for name, mount in sorted(mounts.items()):
            top = (mount.own if mount.own.is_dir() else mount.own.parent) / f"gyre-{key}"
            try:
                top.mkdir(exist_ok=True)
            except OSError:
                continue
            if name == "unified":
                self._delegate(top)
            given = self._controls(top)
            self.memory = self.memory or (top / "memory.limit_in_bytes").exists() or "memory" in given
            self.pids = self.pids or name == "pids" or "pids" in given
            if name == "cpu":
                self._for_cpus.add(top)
            self.cpu = self.cpu or (top / "cpu.cfs_quota_us").exists() or "cpu" in given
            self._tops.append(Mount(top, mount.v2))
        self.kill = any(top.v2 and (top.own / "cgroup.events").exists() for top in self._tops)

    @staticmethod
    def _delegate(top: Path) -> None:
        for folder in (top.parent, top):
            for controller in ("memory", "pids", "cpu"):
                # Refused where the controller is bound to v1 or the cgroup holds processes; then there is none to use.
                with contextlib.suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{controller}")

    @staticmethod
    def _controls(top: Path) -> list[str]:
        try:
            return (top / "cgroup.subtree_control").read_text().split()
        except OSError:
            return []

    def make(self, sandbox: str, memory_mb: int, pids: int | None = None, cpus: float | None = None) -> None:
        """Folders with their limits; None sets none."""
        limits: dict[str, int | str] = {
            "memory.limit_in_bytes": memory_mb << 20,
            "memory.memsw.limit_in_bytes": memory_mb << 20,
            "memory.max": memory_mb << 20,
            "memory.swap.max": 0,
        }
        if pids is not None:
            limits["pids.max"] = pids
        if cpus is not None:
            limits["cpu.cfs_quota_us"] = max(1000, int(cpus * PERIOD_US))
            limits["cpu.max"] = f"{max(1000, int(cpus * PERIOD_US))} {PERIOD_US}"
        for top in self._tops:
            if cpus is None and top.own in self._for_cpus:
                continue
            folder = top.own / sandbox
            folder.mkdir(exist_ok=True)
            for name, value in limits.items():
                if (folder / name).exists():
                    (folder / name).write_text(str(value))

    def joins(self, sandbox: str, *, limits_only: bool, cpus: bool = False) -> list[str]:
        """Files that a process writes "0" to; ``cpus``: its CPU time is limited. ``limits_only``: not those that are
        there to find and kill what is in them, for what lives in the sandbox's pid namespace and dies with that.
        """
        folders = [top.own / sandbox for top in self._tops if cpus or top.own not in self._for_cpus]
        if limits_only:
            names = ["memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"]
            folders = [folder for folder in folders if any((folder / name).exists() for name in names)]
        return [str(folder / "cgroup.procs") for folder in folders]

    def oom_files(self, sandbox: str) -> list[str]:
        """Files with a line ``oom_kill N``: how many processes of it the kernel took for its memory limit."""
        names = ("memory.oom_control", "memory.events")
        files = [top.own / sandbox / name for top in self._tops for name in names]
        return [str(file) for file in files if file.exists()]

    def names(self) -> set[str]:
        """Sandboxes that have a folder."""
        return {path.name for top in self._tops for path in top.own.iterdir() if path.is_dir()}

    def remove(self, sandbox: str) -> bool:
        """Kill what is in it and remove it; False where it would not go within the bound."""
        return all([_remove(top.own / sandbox) for top in self._tops])  # noqa: C419 - each shall be tried

    def close(self) -> None:
        """Remove our own folders, where nothing is left in them."""
        for top in self._tops:
            with contextlib.suppress(OSError):
                top.own.rmdir()


def _remove(folder: Path) -> bool:
    deadline = time.monotonic() + REMOVE_BOUND_S
    while folder.exists():
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                log.warning("sandbox: cgroup %s cannot be removed yet", folder)
                return False
            _kill(folder)
            time.sleep(0.002)
    return True


def _kill(folder: Path) -> None:
    kill = folder / "cgroup.kill"
    with contextlib.suppress(OSError):
        if kill.exists():
            kill.write_text("1")
            return
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
