"""What every part of the bubblewrap backend shares: where a sandbox's things are, which ones live, the launcher.

Awaits: `in_thread` is woken by the end of its work, and is not left before that.
"""

import asyncio
import hashlib
import itertools
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from opengyre.proto.sandbox import Capabilities, NetworkUse
from opengyre.sandbox import jail
from opengyre.sandbox.cgroups import Cgroups
from opengyre.sandbox.commands import SPOOL_MB
from opengyre.sandbox.core import SandboxGone, Spec
from opengyre.sandbox.egress import Egress
from opengyre.sandbox.images import Images
from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.files import WORKSPACE
from opengyre.sandbox.launcher import Launcher
from opengyre.sandbox.records import Processes, boot_id

NOBODY = 65534
T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work in a thread. Where the caller is cancelled, its end is waited for before that goes on: what
    undoes the work must not run beside it.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class Base(ABC):
    """All sandboxes under one folder."""

    def __init__(
        self,
        root: Path,
        *,
        isolated: bool = True,
        binds: Mapping[str, str] | None = None,
        image_roots: Sequence[Path] = (),
        image_cache_mb: int = 4096,
        images_beside: Path | None = None,
        spool_mb: int = SPOOL_MB,
    ) -> None:
        """``binds``: folders of this machine that every sandbox shows, read-only, by their paths in it.
        ``image_roots``: where the root directories that a spec may name have to lie. ``images_beside``: the folder of
        another cache, whose images may be named too.
        """
        self._root = root.resolve()
        limit = image_cache_mb << 20
        beside = None if images_beside is None else Images(images_beside, limit)
        self.image_cache = Images(self._root / "images", limit, self.in_use, beside)
        self._image_roots = [path.resolve() for path in image_roots]
        self._spool_mb = spool_mb
        self._mounts = False
        self._no_disks: str | None = "start() looks"
        self._binds = dict(binds or {})
        self._isolated = isolated
        self._own_ids = isolated and os.geteuid() == 0
        self._key = hashlib.sha256(str(self._root).encode()).hexdigest()[:10]
        self._launcher = Launcher(self._root / "launcher.log")
        self._egress = Egress(self.listen)
        self._boot = boot_id()
        self._live: dict[str, Processes] = {}
        self._making: dict[str, Processes] = {}
        self._taking: set[str] = set()
        """Layers of snapshots that are being taken."""
        self._slots: dict[int, str] = {}
        """Ranges of user ids in use, with the token of whose they are."""
        self._numbers = itertools.count()
        self._bwrap = ""
        self._lock = -1
        self._cgroups: Cgroups | None = None

    @property
    def isolated(self) -> bool:
        return self._isolated

    @property
    def _groups(self) -> Cgroups:
        assert self._cgroups is not None, "start() makes them"
        return self._cgroups

    @abstractmethod
    def in_use(self) -> set[str]:
        """Names of the cached images that a sandbox or a snapshot stands on."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    async def listen(self, sandbox: str, port: int) -> socket.socket: ...

    async def connect(self, spec: Spec) -> None:
        """Open the way out of a sandbox with an allow-list, unless it is open."""
        await self._egress.open(spec)

    def network(self, sandbox: str) -> NetworkUse | None:
        """What it did with its way out; None where that is not open."""
        return self._egress.use(sandbox)

    def folder(self, sandbox: str) -> Path:
        """Where everything about a sandbox is written; others may keep files of their own in it."""
        return self._root / "sandboxes" / sandbox

    def _home(self, sandbox: str, record: Processes) -> Path:
        return self.folder(sandbox) / record.token

    def marker(self, sandbox: str) -> str:
        """Value of GYRE_SANDBOX in everything that belongs to it."""
        return f"{self._key}.{sandbox}"

    def _is_live(self, record: Processes) -> bool:
        if not record.ready or record.boot != self._boot or record.isolated != self._isolated:
            return False
        return not record.isolated or kernel.start_time(record.pid) == record.started

    def _uid(self, record: Processes | None = None) -> int | None:
        if self._own_ids:
            return 0 if record is not None and record.image else jail.USER
        return NOBODY if not self._isolated and os.geteuid() == 0 else None

    def _plain(self, sandbox: str) -> Path:
        return Path(tempfile.gettempdir()) / f"gyre-{self._key}-{sandbox}"

    def _place(self, sandbox: str, path: str) -> str:
        """An absolute path of the sandbox as its processes see it."""
        return path if self._isolated else f"{self._plain(sandbox)}{path}"

    def _record(self, sandbox: str) -> Processes:
        record = self._live.get(sandbox)
        if record is None:
            raise SandboxGone(f"sandbox {sandbox!r} is not here: it was destroyed, expired or never made")
        return record

    def _temporary(self, sandbox: str) -> Path:
        return self.folder(sandbox) / f"io-{next(self._numbers)}"

    def _inside(self, sandbox: str) -> dict[str, Any]:
        record = self._record(sandbox)
        return {
            "sandbox": sandbox,
            "pid": record.pid,
            "started": record.started,
            "uid": self._uid(record),
            "keep": jail.ROOT_CAPABILITIES,
            "cwd": "/" if record.image else self._place(sandbox, WORKSPACE),
        }
