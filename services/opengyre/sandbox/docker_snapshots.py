"""Snapshots of containers: the engine's commit of a root that can be written to, an archive of the folders that are
tmpfs. Both are files only: what runs is held meanwhile, goes on afterwards, and is no part of them.

A snapshot's folder holds ``snapshot.json``, written last, and perhaps ``files.tar``; its image is tagged with its id.

Awaits: the engine's commit and the end of the packing program, each bounded.
"""

import asyncio
import shutil
from pathlib import Path

import aiodocker
import msgspec

from opengyre.sandbox import docker_config, docker_host, docker_tar
from opengyre.sandbox.core import InvalidRequest, Spec
from opengyre.sandbox.docker_engine import NOT_FOUND, engine_errors, to_its_end
from opengyre.sandbox.docker_making import Making
from opengyre.sandbox.docker_spool import Place
from opengyre.sandbox.records import load, save

COMMIT_S = 300.0


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """``snapshot.json``."""

    image: str | None
    """What a root that can be written to is kept as."""
    archive: bool
    """Whether there is an archive of the folders."""
    size: int


class Snapshots(Making):
    """The part of the backend that is about snapshots."""

    def snapshots(self) -> list[str]:
        folder = self._root / "snapshots"
        return sorted(path.name for path in folder.iterdir() if (path / "snapshot.json").exists())

    def snapshot_folder(self, snapshot: str) -> Path:
        return self._root / "snapshots" / snapshot

    @property
    def _repository(self) -> str:
        return f"gyre-snapshot-{self._key}"

    def _kept(self, snapshot: str) -> Kept:
        kept = load(self.snapshot_folder(snapshot) / "snapshot.json", Kept)
        if kept is None:
            raise InvalidRequest(f"snapshot {snapshot!r} is not here; allowed: {', '.join(self.snapshots()) or 'none'}")
        return kept

    async def snapshot(self, spec: Spec, snapshot: str) -> int:
        kept = load(self.snapshot_folder(snapshot) / "snapshot.json", Kept)
        if kept is not None:
            return kept.size
        place = self._place(spec.sandbox)
        folder = self.snapshot_folder(snapshot)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            kept = await to_its_end(self._take(spec, place, snapshot))
            save(folder / "snapshot.json", kept)
        except BaseException:
            await to_its_end(self._forget(snapshot))
            raise
        return kept.size

    async def _take(self, spec: Spec, place: Place, snapshot: str) -> Kept:
        image = None
        size = 0
        if spec.image is not None:
            image = f"{self._repository}:{snapshot}"
            async with engine_errors(f"snapshot {snapshot!r}", spec.sandbox), asyncio.timeout(COMMIT_S):
                # The engine holds what runs.
                await self._engine.container(place.container).commit(repository=self._repository, tag=snapshot)
                size = (await self._engine.docker.images.inspect(image))["Size"]
                size -= (await self._engine.docker.images.inspect(spec.image))["Size"]
            return Kept(image=image, archive=False, size=max(0, size))
        archive = self.snapshot_folder(snapshot) / "files.tar"
        names = [folder.lstrip("/") for folder in docker_config.FOLDERS]
        held = docker_host.stopped(place.container, place.first)
        await asyncio.to_thread(held.__enter__)
        try:
            await self._pack(place, "/", names, archive, self._max_snapshot_mb << 20, f"snapshot {snapshot!r}")
        finally:
            await asyncio.to_thread(held.__exit__, None, None, None)
        return Kept(image=None, archive=True, size=docker_tar.size_of(archive))

    async def _forget(self, snapshot: str) -> None:
        async with engine_errors(f"the removal of snapshot {snapshot!r}"):
            try:
                await self._engine.docker.images.delete(f"{self._repository}:{snapshot}", force=True)
            except aiodocker.DockerError as error:
                if error.status != NOT_FOUND:
                    raise
        await asyncio.to_thread(shutil.rmtree, self.snapshot_folder(snapshot), ignore_errors=True)

    async def drop(self, snapshot: str) -> bool:
        there = self.snapshot_folder(snapshot).exists()
        if there:
            await to_its_end(self._forget(snapshot))
        return there

    async def fork(self, snapshot: str, spec: Spec) -> None:
        await self._from(self._kept(snapshot), snapshot, spec)

    async def _from(self, kept: Kept, snapshot: str, spec: Spec, token: str | None = None) -> None:
        await self._make(spec, {}, kept.image, token)
        if kept.archive:
            await self._unpack(self._place(spec.sandbox), "/", self.snapshot_folder(snapshot) / "files.tar")

    async def restore(self, spec: Spec, snapshot: str) -> None:
        kept = self._kept(snapshot)
        token = self._record(spec.sandbox).token
        await to_its_end(self._unmake(spec.sandbox, keep=True))
        await self._from(kept, snapshot, spec, token)
