"""What every part of the Docker backend shares: where a sandbox's things are, and which ones live."""

import hashlib
import itertools
import socket as sockets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import msgspec

from opengyre.proto.sandbox import Capabilities, NetworkUse
from opengyre.sandbox import docker_config
from opengyre.sandbox.commands import SPOOL_MB
from opengyre.sandbox.core import SandboxGone, Spec
from opengyre.sandbox.docker_engine import Engine
from opengyre.sandbox.docker_execs import Commands
from opengyre.sandbox.docker_spool import Place
from opengyre.sandbox.egress import Egress
from opengyre.sandbox.records import boot_id


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What the backend made (``docker.json``); ``container`` is empty until the engine has answered."""

    boot: str
    token: str
    """Name of the folder in the sandbox's that holds what was made for it: an id may come again, a token does not."""
    ready: bool = False
    container: str = ""
    first: int = 0
    """Number of its init on this machine."""
    user: str = docker_config.USER
    cwd: str = docker_config.WORKSPACE
    spool_limit: int = 0
    """Most bytes of one stream of a command's output."""


class DockerBase(ABC):
    """All sandboxes under one folder."""

    def __init__(
        self,
        root: Path,
        *,
        socket: Path,
        image: str,
        binds: Mapping[str, str] | None = None,
        max_snapshot_mb: int = 1024,
        spool_mb: int = SPOOL_MB,
    ) -> None:
        """``socket``: the engine's. ``image``: what a sandbox shows whose spec names none. ``binds``: folders of this
        machine that every sandbox shows, read-only, by their paths in it. ``max_snapshot_mb``: of files outside images.
        """
        self._root = root.resolve()
        self._image = image
        self._binds = dict(binds or {})
        self._max_snapshot_mb = max_snapshot_mb
        self._spool_mb = spool_mb
        self._key = hashlib.sha256(str(self._root).encode()).hexdigest()[:10]
        self._boot = boot_id()
        self._egress = Egress(self.listen)
        self._engine = Engine(socket)
        self._commands = Commands(self._engine)
        self._live: dict[str, Made] = {}
        self._making: dict[str, Made] = {}
        self._numbers = itertools.count()
        self._storage = False
        self._images: list[str] = []
        self._lock = -1

    @property
    def isolated(self) -> bool:
        return True

    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return Capabilities(
            backend="docker",
            isolated=True,
            network_none=True,
            network_allowlist=True,
            fork=True,
            snapshot=True,
            disk_limit=self._storage,
            cpu_limit=True,
            memory_limit=True,
            pids_limit=True,
            images=True,
            root_directories=False,
            background=True,
            users=True,
        )

    @abstractmethod
    async def listen(self, sandbox: str, port: int) -> sockets.socket: ...

    async def connect(self, spec: Spec) -> None:
        """Open the way out of a sandbox with an allow-list, unless it is open."""
        await self._egress.open(spec)

    def network(self, sandbox: str) -> NetworkUse | None:
        """What it did with its way out; None where that is not open."""
        return self._egress.use(sandbox)

    def unenforced(self) -> list[str]:
        """Sentences: what a spec asks for and this engine cannot hold."""
        if self._storage:
            return []
        return ["workspace_mb of a sandbox with an image (this engine's storage driver has no limit on a root's size)"]

    def folder(self, sandbox: str) -> Path:
        """Where everything about a sandbox is written; others may keep files of their own in it."""
        return self._root / "sandboxes" / sandbox

    def marker(self, sandbox: str) -> str:
        """Value of GYRE_SANDBOX in everything that belongs to it."""
        return f"{self._key}.{sandbox}"

    def images(self) -> list[str]:
        """Names that a spec's ``image`` may have, as of the last look."""
        return list(self._images)

    def _name(self, sandbox: str, made: Made) -> str:
        return f"gyre-{self._key}-{sandbox}-{made.token}"

    def _home(self, sandbox: str, made: Made) -> Path:
        return self.folder(sandbox) / made.token

    def _record(self, sandbox: str) -> Made:
        made = self._live.get(sandbox)
        if made is None:
            raise SandboxGone(f"sandbox {sandbox!r} is not here: it was destroyed, expired or never made")
        return made

    def _place(self, sandbox: str) -> Place:
        return self._place_of(sandbox, self._record(sandbox))

    def _place_of(self, sandbox: str, made: Made) -> Place:
        return Place(
            sandbox=sandbox,
            home=self._home(sandbox, made),
            container=made.container,
            first=made.first,
            marker=self.marker(sandbox),
            user=made.user,
            cwd=made.cwd,
        )

    def _temporary(self, sandbox: str) -> Path:
        return self.folder(sandbox) / f"io-{next(self._numbers)}"
