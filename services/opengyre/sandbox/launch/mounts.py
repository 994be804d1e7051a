"""The root of a sandbox that has an image: an overlay over id-mapped layers, in a mount namespace of its own.

Nothing is mounted on the machine itself: the child that becomes bubblewrap has a private copy of its mounts, whose
only other member is this process while it works, and what bubblewrap then binds into the sandbox lives as long as the
sandbox's first process. So there is nothing to unmount afterwards.

Layers and what is written keep ids from 0 on the disk; an id-mapped mount shows them as the sandbox's own range, so one
image serves all sandboxes. The overlay writes as whoever mounts it, and that has to be somebody in this range.

What is written goes to a tmpfs of the allowed size, or to a file system in a sparse file of that size where loop
devices are to be had; both are at their end when they are full. Its raw folder is bound into the sandbox as well, for
snapshots, where only the machine's root may open it.
"""

import ctypes
import fcntl
import os
import struct

from opengyre.sandbox.launch import kernel

POINT = "/run/opengyre"
ROOT, STORE, MAPPED = f"{POINT}/root", f"{POINT}/store", f"{POINT}/mapped"
HIDDEN = "/dev/.layer"

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 0x1, 0x4, 0x00100000
_MS_NOSUID, _MS_NODEV, _MS_NOATIME, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x400, 0x4000, 0x40000
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 0x4C82, 0x4C0A, 4, 16
_OPTIONS = "xino=off,index=off,metacopy=off,redirect_dir=off,volatile"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2)."""
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {kind}")


def own_mounts() -> None:
    """A private copy of this process's mounts: what happens there is seen nowhere else."""
    kernel.unshare(kernel.CLONE_NEWNS)
    mount("none", "/", "none", _MS_REC | _MS_PRIVATE, "")


def mapped(source: str, target: str, userns: int, *, read_only: bool) -> None:
    """Show the folder ``source`` at ``target`` with the ids of a user namespace."""
    tree = _check(
        _libc.syscall(_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC), f"open_tree {source}"
    )
    try:
        wanted = _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
        attributes = struct.pack("=QQQQ", wanted, 0, 0, userns)
        _check(
            _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes)),
            f"id-mapped mount of {source}",
        )
        _check(
            _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH), "move_mount"
        )
    finally:
        os.close(tree)


def assemble(child: int, base: int, layers: list[str], disk_mb: int, disk: str | None) -> None:
    """Mount the root of the sandbox whose bubblewrap ``child`` will become, in that process's mount namespace, which
    this process enters and stays in. ``base``: what its uid 0 is on the machine. ``layers``: folders, the lowest first.
    ``disk``: a file with a file system for what is written; None takes memory.
    """
    userns = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    mounts = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(mounts, kernel.CLONE_NEWNS)
    if disk is None:
        mount("tmpfs", STORE, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_mb}m,mode=0700,nr_inodes={disk_mb * 256}")
    else:
        mount_disk(disk)
    for name in ("upper", "work"):
        os.mkdir(f"{STORE}/{name}", 0o755)
    mapped(STORE, MAPPED, userns, read_only=False)
    # One folder of mount points for the layers, in memory, so that the options are short and hold no odd characters.
    mount("tmpfs", f"{POINT}/layers", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    for number, layer in enumerate(layers):
        os.mkdir(f"{POINT}/layers/{number}")
        mapped(layer, f"{POINT}/layers/{number}", userns, read_only=True)
    os.chdir(POINT)
    lower = ":".join(f"layers/{number}" for number in reversed(range(len(layers))))
    options = f"lowerdir={lower},upperdir=mapped/upper,workdir=mapped/work,{_OPTIONS}"
    with kernel.files_as(base):
        mount("overlay", ROOT, "overlay", _MS_NODEV, options)
    os.chdir("/")
    for fd in (userns, mounts):
        os.close(fd)


def mount_disk(disk: str) -> None:
    """Mount the file system in the file ``disk`` where what is written goes; it ends with this mount namespace."""
    mount(loop_device(disk), STORE, "ext4", _MS_NOSUID | _MS_NODEV | _MS_NOATIME, "")
    os.chmod(STORE, 0o700)


def loop_device(file: str) -> str:
    """A loop device on a file; it lets go of itself when nobody has it mounted any more."""
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(64):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = f"/dev/loop{number}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # struct loop_config: fd, block size, then struct loop_info64 with its flags at 52.
            config = (
                struct.pack("=II", backing, 0)
                + bytes(52)
                + struct.pack("=I", _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO)
                + bytes(240)
            )
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != 16:  # EBUSY: another was first
                    raise
                continue
            # Open until this process ends, which is after it was mounted: else it would let go at once.
            return path
        raise OSError(16, "no loop device is free")
    finally:
        os.close(control)
        os.close(backing)
