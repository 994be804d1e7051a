"""What is written down about a sandbox, so that a service that starts again finds it.

Files appear whole (written beside and renamed). They are not forced to the disk: a machine that loses power loses
its sandboxes too, and the boot id then says that a record is of another boot.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from opengyre.sandbox.core import Spec

T = TypeVar("T")


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """What the backend made (``processes.json``); ``pid`` 0 until it is ready or where there are no namespaces."""

    boot: str
    """Boot id of the machine."""
    token: str
    """Name of the folder in the sandbox's that holds what was made for it: an id may come again, a token does not."""
    slot: int | None
    """Which range of user ids it has; None without a range of its own."""
    isolated: bool
    ready: bool = False
    pid: int = 0
    """Its first process, in the service's pid namespace."""
    started: int = 0
    """Start time of that, in clock ticks since boot."""
    image: bool = False
    """Its root is an overlay over an image."""
    base: str | None = None
    """Path of the image's root folder."""
    layers: tuple[str, ...] = ()
    """Kept layers above the image that its root shows, the lowest first."""
    env: Mapping[str, str] = {}
    """The image's own environment; likewise the next two."""
    workdir: str | None = None
    user: str | None = None
    spool_limit: int = 0
    """Most bytes of one stream of a command's output."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot (``kept.json``)."""

    spec: Spec
    """Of the sandbox that it was taken of."""
    token: str
    """Name of its layer, a folder, or of its records, a file, below the node's ``layers``."""
    size: int
    image: bool
    base: str | None = None
    layers: tuple[str, ...] = ()
    """Kept layers that it stands on, the lowest first, without its own."""
    env: Mapping[str, str] = {}
    workdir: str | None = None
    user: str | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs an exec (``claim``)."""

    pid: int
    started: int
    digest: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor of an exec left (``answer.json``)."""

    exit_code: int | None
    killed_by: str | None
    infra_error: str | None
    gone: bool
    duration_s: float
    refused: str | None = None
    """Why it was not begun: something that was asked for is not in the sandbox."""
    oom: bool = False
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False


def save(path: Path, value: msgspec.Struct) -> None:
    """Write a record whole."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_bytes(msgspec.json.encode(value))
    beside.replace(path)


def load(path: Path, kind: type[T]) -> T | None:
    """Read a record; None where there is none or it cannot be read as one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def boot_id() -> str:
    """Identifies this boot of the machine: process start times and the monotonic clock mean something in it only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
