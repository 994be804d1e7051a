"""What a bubblewrap sandbox begins with: the machine's own folders, an image, or the files of a snapshot.

Invariants: a snapshot's files never change once it is there; they stay on the disk as long as a snapshot or a sandbox
stands on them, whoever was dropped or destroyed meanwhile, and no longer.

Awaits: a request to the launcher, bounded there.
"""

import asyncio
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.sandbox import disks
from opengyre.sandbox.base import Base, in_thread
from opengyre.sandbox.core import ExecTimeout, InfraError, InvalidRequest, Spec, Stored, unsupported
from opengyre.sandbox.images import Image, Told, size_of
from opengyre.sandbox.records import Kept, Processes, load, save


@dataclass(frozen=True)
class Root:
    """What a sandbox begins with; all None and empty: the machine's own folders."""

    image: str | None = None
    """Path of the root folder."""
    layers: tuple[str, ...] = ()
    records: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None


HOST_ROOT = Root()


class Roots(Base):
    """The part of the backend that is about images and snapshots."""

    def images(self) -> list[str]:
        return self.image_cache.names() if self._mounts else []

    def _root_of(self, spec: Spec) -> Root:
        image = spec.image or ""
        self._can_hold(image)
        if image.startswith("/"):
            return Root(image=self._root_directory(image), user="0")
        found = self.image_cache.get(image)
        if found is None:
            raise self._unknown(image)
        folder, about = found
        return Root(image=str(folder), env=about.env, workdir=about.workdir, user=about.user or "0")

    def _root_directory(self, image: str) -> str:
        if not self._image_roots:
            raise unsupported("root_directories", f"image {image[:100]!r}", "bubblewrap")
        path = self._below("image", image)
        if not path.is_dir():
            raise InvalidRequest(f"image is {image[:200]!r}; allowed is a folder below {self._tops()}")
        return str(path)

    def image_source(self, path: str) -> Path:
        if not self._image_roots:
            raise unsupported("root_directories", f"path {path[:100]!r}", "bubblewrap")
        found = self._below("path", path)
        if not found.exists():
            raise InvalidRequest(f"path is {path[:200]!r}, which is not there; allowed is one below {self._tops()}")
        return found

    def _below(self, field: str, path: str) -> Path:
        found = Path(path).resolve()
        if not any(found.is_relative_to(top) for top in self._image_roots):
            raise InvalidRequest(f"{field} is {path[:200]!r}; allowed is a folder below {self._tops()}")
        return found

    def _tops(self) -> str:
        return ", ".join(map(str, self._image_roots))

    async def image_list(self) -> tuple[list[Stored], int | None]:
        return (await asyncio.to_thread(self.image_cache.info) if self._mounts else []), self.image_cache.limit

    async def add_image(self, image: str, source: Path, told: Told) -> Stored:
        self._can_hold(image)
        return await in_thread(self._add_image, image, source, told)

    def _add_image(self, image: str, source: Path, told: Told) -> Stored:
        about = Image(size=0)
        try:
            if source.is_dir():
                self.image_cache.add_layers(image, [source], about, told)
            else:
                self.image_cache.add_archive(image, source, about, told)
        except OSError as error:
            raise InfraError(f"image {image!r} could not be added: {error}") from error
        return next(one for one in self.image_cache.info() if one.name == image)

    async def remove_image(self, image: str) -> int:
        self._can_hold(image)
        held = {one.name: one.size for one in (await self.image_list())[0]}
        if image not in held or not await in_thread(self.image_cache.remove, image):
            raise self._unknown(image)
        return held[image]

    def _can_hold(self, image: str) -> None:
        if not self._mounts:
            raise unsupported("images", f"image {image[:100]!r}", "bubblewrap")

    def _unknown(self, image: str) -> InvalidRequest:
        known = ", ".join(self.images()) or "none yet"
        return InvalidRequest(f"image is {image[:120]!r}; allowed are those in the cache of this node: {known}")

    def _layer(self, token: str) -> Path:
        return self._root / "layers" / token

    def _layers_of(self, record: Processes) -> list[str]:
        if record.base is None:
            return []
        return [record.base, *(str(self._layer(token)) for token in record.layers)]

    def _disk(self, home: Path, size_mb: int) -> str | None:
        """The file that holds what is written to a root; None where it is to be in memory."""
        if self._no_disks is not None or size_mb <= disks.MEMORY_MB:
            return None
        return str(disks.copy_of_template(self._root / "disks", size_mb, home / "disk"))

    async def _try_disk(self) -> str | None:
        """Why what is written to roots has to be in memory; None where a disk could be made and mounted."""
        if not self._mounts:
            return "roots of images cannot be made here"
        folder = self._root / "disks"
        why = disks.without_tools() or await asyncio.to_thread(disks.without_folder, folder)
        if why is not None:
            return why
        tried = folder / "tried"
        try:
            await in_thread(disks.copy_of_template, folder, disks.TRIED_MB, tried)
            await self._launcher.request("try_disk", disk=str(tried))
        except (InfraError, ExecTimeout) as error:
            return str(error)
        finally:
            tried.unlink(missing_ok=True)
        return None

    async def snapshot(self, spec: Spec, snapshot: str) -> int:
        known = load(self.snapshot_folder(snapshot) / "kept.json", Kept)
        if known is not None:
            return known.size
        if not self._isolated:
            raise unsupported("snapshot", "snapshot", "bubblewrap")
        record = self._record(spec.sandbox)
        token = secrets.token_hex(8)
        layer = self._layer(token)
        self._taking.add(token)
        try:
            await self._launcher.request(
                "snapshot",
                layer=record.image,
                target=str(layer),
                limit=spec.workspace_mb << 20,
                **self._inside(spec.sandbox),
            )
            size = await asyncio.to_thread(_size, layer)
            kept = Kept(
                spec=spec,
                token=token,
                size=size,
                image=record.image,
                base=record.base,
                layers=record.layers,
                env=record.env,
                workdir=record.workdir,
                user=record.user,
            )
            self.snapshot_folder(snapshot).mkdir(exist_ok=True)
            save(self.snapshot_folder(snapshot) / "kept.json", kept)
        except BaseException:
            await in_thread(_delete, layer)
            raise
        finally:
            self._taking.discard(token)
        return size

    def _root_from(self, snapshot: str) -> Root:
        kept = load(self.snapshot_folder(snapshot) / "kept.json", Kept)
        if kept is None:
            raise InvalidRequest(f"snapshot is {snapshot[:120]!r}; allowed is one that was taken and not dropped")
        if not kept.image:
            return Root(records=kept.token)
        layers = (*kept.layers, kept.token)
        return Root(image=kept.base, layers=layers, env=kept.env, workdir=kept.workdir, user=kept.user)

    async def drop(self, snapshot: str) -> bool:
        return await in_thread(self._drop, snapshot)

    def _drop(self, snapshot: str) -> bool:
        folder = self.snapshot_folder(snapshot)
        existed = (folder / "kept.json").exists()
        shutil.rmtree(folder, ignore_errors=True)
        self._drop_unused()
        return existed

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self._root / "snapshots").iterdir() if (path / "kept.json").exists())

    def snapshot_folder(self, snapshot: str) -> Path:
        return self._root / "snapshots" / snapshot

    def in_use(self) -> set[str]:
        bases = {record.base for record in self._records()}
        bases |= {kept.base for kept in self._all_kept()}
        return {Path(base).parent.name for base in bases if base is not None}

    def _records(self) -> list[Processes]:
        # A sandbox is among the live ones before it is not among those that are made any more.
        return [*self._making.values(), *self._live.values()]

    def _all_kept(self) -> list[Kept]:
        found = [load(folder / "kept.json", Kept) for folder in (self._root / "snapshots").iterdir()]
        return [kept for kept in found if kept is not None]

    def _drop_unused(self) -> None:
        """Remove the layers that no snapshot and no sandbox stands on."""
        # In a thread: who takes a snapshot says so first, then there is the layer, then it is kept; so here the other
        # way round, and none is missed that goes from the one to the other meanwhile.
        layers = list((self._root / "layers").iterdir())
        used = set(self._taking)
        for kept in self._all_kept():
            used |= {kept.token, *kept.layers}
        used |= {token for record in self._records() for token in record.layers}
        for layer in layers:
            if layer.name not in used:
                _delete(layer)


def _size(layer: Path) -> int:
    return size_of(layer) if layer.is_dir() else layer.stat().st_size


def _delete(layer: Path) -> None:
    if layer.is_dir():
        shutil.rmtree(layer, ignore_errors=True)
    else:
        layer.unlink(missing_ok=True)
