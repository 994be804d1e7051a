"""The backend of sandboxes that are containers of a Docker engine on this machine.

Invariants:
- a sandbox's folder and record are there before its container, and go after it; containers carry the label of this
  node's folder, so that a start finds those that nobody knows;
- a live sandbox and its commands depend on no process of ours, only on the engine;
- what the engine cannot end (the tree of one command, a fork bomb) is ended here, so both must be on one machine, and
  the service must see its processes and share a folder with it: `start` tries that and refuses otherwise.

Awaits: an answer of the engine, bounded by `docker_engine.CALL_S`; a command's watch, see `docker_execs`.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiodocker

from opengyre.proto.sandbox import ExecResult
from opengyre.proto.sandbox_jobs import JobStatus, LogPage
from opengyre.sandbox import docker_config, docker_execs, docker_spool
from opengyre.sandbox.allowlist import PORT
from opengyre.sandbox.commands import keep_limit
from opengyre.sandbox.core import (
    PLAIN,
    CannotIsolateError,
    Options,
    SandboxError,
    Spec,
)
from opengyre.sandbox.docker_base import Made
from opengyre.sandbox.docker_engine import engine_errors, to_its_end
from opengyre.sandbox.docker_images import Images
from opengyre.sandbox.owned import own
from opengyre.sandbox.records import load


class Docker(Images):
    """All sandboxes under one folder; a second service on the same folder is refused."""

    async def start(self) -> list[str]:
        """Raises `CannotIsolateError` where there is no engine that can hold sandboxes, with the reason."""
        self._lock = await own(self._root, ("sandboxes", "snapshots", "trash"))
        info = await self._engine.open()
        self._storage = await self._bounds_roots(info)
        await self._sweep()
        await self._look_at_images()
        await self._probe()
        return list(self._live)

    async def _bounds_roots(self, info: Mapping[str, Any]) -> bool:
        """Whether the engine can bound the size of a root; overlay2 can on XFS with project quotas only."""
        status = {str(name): str(value) for name, value in info.get("DriverStatus") or ()}
        if info.get("Driver") in ("btrfs", "zfs", "devicemapper"):
            return True
        return info.get("Driver") == "overlay2" and status.get("Backing Filesystem") == "xfs" and await self._quota()

    async def _quota(self) -> bool:
        name = f"gyre-{self._key}-quota-{secrets.token_hex(4)}"
        config = {"Image": self._image, "Cmd": ["true"], "HostConfig": {"StorageOpt": {"size": "64m"}}}
        try:
            await self._engine.docker.containers.create(config, name=name)
        except aiodocker.DockerError:
            return False
        await self._engine.remove(name)
        return True

    async def _probe(self) -> None:
        probe = Spec(sandbox=f"probe-{os.getpid()}", workspace_mb=1)
        try:
            await self.create(probe, {})
            made = self._record(probe.sandbox)
            if made.container not in _cgroup_of(made.first):
                raise CannotIsolateError("the engine's processes cannot be seen from here")
            done = await self.exec(probe, "probe", "echo here", 30.0, 100)
            if done.stdout != "here\n":
                raise CannotIsolateError(f"the engine does not see the folder {self._root}")
            (await self.listen(probe.sandbox, PORT)).close()
        except SandboxError as error:
            raise CannotIsolateError(
                f"this Docker engine cannot hold sandboxes: {error}; allowed is one on this machine, with the service "
                "as root beside it, not in a container, and the image of sandbox.docker_image"
            ) from error
        finally:
            await self.destroy(probe.sandbox)

    async def stop(self) -> None:
        await self._egress.close_all()
        await self._commands.stop()
        await self._engine.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _sweep(self) -> None:
        """Take up what lives; remove what is half-made, dead or of another boot, and what nobody knows."""
        found: dict[str, str] = {}
        async with engine_errors("a list of containers"):
            label = f'{{"label": ["{docker_config.KEY_LABEL}={self._key}"]}}'
            for container in await self._engine.docker.containers.list(all=1, filters=label):
                found[container.id] = container["State"]
        for folder in sorted((self._root / "sandboxes").iterdir()):
            made = load(folder / "docker.json", Made)
            if made is not None and made.ready and made.boot == self._boot and found.get(made.container) == "running":
                self._live[folder.name] = made
                self._commands.adopt(self._place(folder.name))
        known = {made.container for made in self._live.values()}
        async with engine_errors("the removal of what is left over"):
            for left in set(found) - known:
                await self._engine.remove(left)
        for folder in sorted((self._root / "sandboxes").iterdir()):
            if folder.name not in self._live:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        kept = set(self.snapshots())
        for folder in (self._root / "snapshots").iterdir():
            if folder.name not in kept:
                await self._forget(folder.name)
        for left in (self._root / "trash").iterdir():
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)

    async def alive(self, sandbox: str) -> bool:
        made = self._live.get(sandbox)
        # By its first process: an engine that does not answer is not the sandbox's end.
        return made is not None and made.container in await asyncio.to_thread(_cgroup_of, made.first)

    async def exec(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> ExecResult:
        place = self._place(spec.sandbox)
        self._commands.begin(place, spec, exec_id, command, timeout_s, limit, options)
        return await self._commands.join(place, exec_id)

    async def spawn(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> None:
        place = self._place(spec.sandbox)
        self._commands.begin(place, spec, exec_id, command, timeout_s, limit, options)
        await self._commands.started(place, exec_id)

    async def poll(self, sandbox: str, exec_id: str, wait_s: float = 0.0) -> JobStatus:
        return await self._commands.poll(self._place(sandbox), exec_id, wait_s)

    async def logs(
        self, sandbox: str, exec_id: str, stream: Literal["stdout", "stderr"], offset: int, limit: int
    ) -> LogPage:
        return await asyncio.to_thread(self._commands.logs, self._place(sandbox), exec_id, stream, offset, limit)

    async def kill(self, sandbox: str, exec_id: str, signal: Literal["KILL", "TERM", "INT"] = "KILL") -> None:
        await self._commands.kill(self._place(sandbox), exec_id, signal)

    async def trim(self) -> None:
        """Hold what commands have written to its bound, also where what they left behind writes on."""
        for sandbox, made in list(self._live.items()):
            with suppress(FileNotFoundError):  # it is being removed
                bound = keep_limit(made.spool_limit, self._spool_mb)
                await asyncio.to_thread(docker_spool.trim, self._home(sandbox, made), bound)

    def execs(self, sandbox: str) -> tuple[int, list[str]]:
        return docker_execs.of(self._home(sandbox, self._record(sandbox)))

    async def destroy(self, sandbox: str) -> None:
        await to_its_end(self._unmake(sandbox, keep=False))


def _cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
