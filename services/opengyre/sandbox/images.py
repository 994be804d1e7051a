"""The cache of root file systems on a node: what the names in a spec's ``image`` stand for.

Invariants: an image is there whole or not at all (made beside, renamed); all together are at most as large as allowed,
the ones that were not used for longest go first, those that a sandbox or a snapshot needs never; ids on the disk are
the image's own. Files appear with their owners only where this process is root.

All methods block; call them in a thread.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from opengyre.sandbox import image_archive
from opengyre.sandbox.check import image_name
from opengyre.sandbox.core import InvalidRequest, SandboxBusy, Stored
from opengyre.sandbox.records import load, save

BLOCK = 4096
Told = Callable[[int], None]


def _not_told(_: int) -> None:
    """For who need not know how far it is."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """``image.json``: what a sandbox of it takes over where its spec is silent."""

    size: int
    """Bytes of its files."""
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    binds: dict[str, str] = {}
    """Folders of the node that its sandboxes show, read-only, by their paths in it."""


class Images:
    """All images below one folder, of at most ``limit`` bytes together."""

    def __init__(
        self,
        root: Path,
        limit: int,
        in_use: Callable[[], Collection[str]] = frozenset,
        beside: "Images | None" = None,
    ) -> None:
        """``in_use`` tells the names of those that have to stay. ``beside``: another cache, whose images are these
        here too once they are used.
        """
        self._root = root
        self.limit = limit
        self._in_use = in_use
        self._beside = beside

    def names(self) -> list[str]:
        """Those that are there, and beside."""
        return sorted({*self._names(), *(self._beside.names() if self._beside is not None else ())})

    def _names(self) -> list[str]:
        if not self._root.is_dir():
            return []
        found = (path for path in self._root.iterdir() if not path.name.startswith("."))
        return sorted(path.name for path in found if (path / "image.json").exists())

    def get(self, name: str) -> tuple[Path, Image] | None:
        """Its root folder and what it says of itself; it counts as used now."""
        folder = self._root / image_name(name)
        image = load(folder / "image.json", Image) or self._borrowed(name)
        if image is None:
            return None
        # The system's own stamps are too coarse to tell two uses apart.
        now = time.time_ns()
        os.utime(folder / "image.json", ns=(now, now))
        return folder / "rootfs", image

    def _borrowed(self, name: str) -> Image | None:
        """What is beside, made one of these: it stays whatever becomes of the other cache."""
        found = self._beside.get(name) if self._beside is not None else None
        if found is None:
            return None
        source, about = found

        def fill(rootfs: Path, step: Told) -> None:
            _apply(source, rootfs, step, link=True)

        try:
            image = self._add(name, fill, about, _not_told)
        except FileNotFoundError:
            return None
        if source.is_dir():
            return image
        self.remove(name)  # it was being removed there, so this may be a part of it
        return None

    def info(self) -> list[Stored]:
        """All of its own, by name."""
        in_use = self._in_use()
        return [one for name in self._names() if (one := self._stored(name, name in in_use)) is not None]

    def _stored(self, name: str, in_use: bool) -> Stored | None:
        record = self._root / name / "image.json"
        image = load(record, Image)
        try:
            used_at = record.stat().st_mtime
        except FileNotFoundError:  # removed meanwhile
            return None
        return Stored(name=name, size=image.size if image is not None else 0, used_at=used_at, in_use=in_use)

    def add_archive(self, name: str, archive: Path, about: Image, told: Told = _not_told) -> Image:
        """An image from a tar archive of its root, as ``docker export`` writes it. ``told`` the bytes of each file."""

        def fill(rootfs: Path, step: Told) -> None:
            image_archive.unpack(name, archive, rootfs, step)

        return self._add(name, fill, about, told)

    def add_layers(self, name: str, layers: list[Path], about: Image, told: Told = _not_told) -> Image:
        """An image from folders, each with only what differs from the one before; the first is whole."""

        def fill(rootfs: Path, step: Told) -> None:
            for layer in layers:
                _apply(layer, rootfs, step)

        return self._add(name, fill, about, told)

    def _add(self, name: str, fill: Callable[[Path, Told], None], about: Image, told: Told) -> Image:
        folder, beside = self._root / image_name(name), self._root / f".{image_name(name)}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        total = 0

        def step(size: int) -> None:
            nonlocal total
            total += size
            self._fits(name, total)  # before it is written: an archive may hold far more than it is long
            told(size)

        try:
            (beside / "rootfs").mkdir(parents=True)
            fill(beside / "rootfs", step)
            if not about.binds:
                image_archive.check_root(name, beside / "rootfs")
            image = msgspec.structs.replace(about, size=size_of(beside / "rootfs"))
            self._fits(name, image.size)
            save(beside / "image.json", image)
            self._make_room(image.size, name)
            if folder.exists():
                self.remove(name)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return image

    def _fits(self, name: str, size: int) -> None:
        if size > self.limit:
            raise InvalidRequest(
                f"image {name!r} holds {size} bytes or more; allowed are {self.limit} (sandbox.image_cache_mb)"
            )

    def _make_room(self, size: int, place_of: str) -> None:
        """``place_of``: the name that it takes; one that has it now goes once there is room."""
        self._idle(place_of)
        in_use = self._in_use()
        found = []
        for name in self._names():
            if name == place_of:
                continue
            record = self._root / name / "image.json"
            image = load(record, Image)
            found.append((record.stat().st_mtime_ns, name, image.size if image is not None else 0))
        total = size + sum(one[2] for one in found)
        for _, name, held in sorted(found):
            if total <= self.limit:
                return
            if name not in in_use:
                self.remove(name)
                total -= held
        if total > self.limit:
            raise SandboxBusy(f"the image cache is full of images in use; allowed are {self.limit} bytes")

    def remove(self, name: str) -> bool:
        """Forget an image; False where there is none."""
        folder = self._root / image_name(name)
        trash = self._root / f".{name}.{os.getpid()}.gone"
        self._idle(name)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return False
        try:
            self._idle(name)  # who begins to use it says so first, and then looks whether it is there
        except SandboxBusy:
            trash.rename(folder)
            raise
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def _idle(self, name: str) -> None:
        if name in self._in_use():
            raise SandboxBusy(f"image {name!r} is in use; destroy its sandboxes and snapshots first")

    def sweep(self) -> None:
        """Remove what a process that ended left half-made."""
        if self._root.is_dir():
            for left in self._root.iterdir():
                if left.name.startswith("."):
                    shutil.rmtree(left, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, in whole blocks, one of several links to a file once."""
    total, seen = 0, set()
    for top, _, names in os.walk(folder):
        for name in names:
            found = Path(top, name).lstat()
            if found.st_nlink == 1 or (found.st_dev, found.st_ino) not in seen:
                total += -(-found.st_size // BLOCK) * BLOCK
                seen.add((found.st_dev, found.st_ino))
    return total


def _apply(layer: Path, rootfs: Path, step: Told, *, link: bool = False) -> None:
    """Put what a layer changes into a folder: overlay's whiteouts remove, opaque folders begin empty. ``link``: files
    are the layer's own, where both are on one disk.
    """
    for top, names, files in os.walk(layer):
        below = rootfs / Path(top).relative_to(layer)
        if _opaque(top) and below.is_dir():
            for one in below.iterdir():
                _delete(one)
        for name in [*names, *files]:
            source, target = Path(top, name), below / name
            found = source.lstat()
            if source.is_char_device() and found.st_rdev == 0:
                _delete(target)
            elif source.is_dir() and not source.is_symlink():
                if target.is_symlink() or not target.is_dir():
                    _delete(target)
                    target.mkdir()
                shutil.copystat(source, target)
                os.chown(target, found.st_uid, found.st_gid)
            elif source.is_file() or source.is_symlink():
                _delete(target)
                step(found.st_size if source.is_file() and not source.is_symlink() else 0)
                if link and _linked(source, target):
                    continue
                shutil.copy2(source, target, follow_symlinks=False)
                os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
                if not source.is_symlink():
                    target.chmod(found.st_mode & 0o7777)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
