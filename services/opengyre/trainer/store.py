"""Checkpoints: the trainer's durable state, one directory a version.

`v000012/` holds the folder `state` (tensors, see `checkpoint`), the files of the model directory that are no weights,
`record.json` and the marker `STABLE`. It appears by one rename, complete and synced: that rename is the commit of
update 12. A second trainer that would commit the same version finds the name taken. Needs no torch: who commits writes
the files.
"""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from opengyre.proto.task import GroupConsumed
from opengyre.proto.update import Committed
from opengyre.shared.durable import sync
from opengyre.weights.write import version_directory

RECORD: Final = "record.json"
STABLE: Final = "STABLE"


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message names the file."""


class CommittedElsewhereError(Exception):
    """Another trainer committed this version: stop."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit decided, so that it can be announced again after a crash."""

    run: str
    version: int
    published: int
    """The last version that was published."""
    frontier: tuple[str, ...] = ()
    """Every group of which all executions were consumed or dropped, sorted."""
    partial: tuple[str, ...] = ()
    """Executions that were consumed or dropped, of groups of which others were not, sorted."""
    committed: Committed | None = None
    consumed: tuple[GroupConsumed, ...] = ()
    """Of the executions of this version's update."""
    finished: bool = False
    blobs: tuple[str, ...] = ()
    """Of this version's update: gradients and members, which nobody needs once the commit is told."""
    checksums: dict[str, str] = {}
    """File -> SHA-256."""


class Store:
    """The checkpoints of one run, below `root`."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def directory(self, version: int) -> Path:
        return version_directory(self.root, version)

    def versions(self) -> list[int]:
        """Ascending; a directory without the marker is not one of them."""
        return sorted(int(found.name[1:]) for found in self.root.glob("v[0-9]*") if (found / STABLE).exists())

    def latest(self) -> Record | None:
        """The record of the last commit, None before the first. Raises `CheckpointError`."""
        versions = self.versions()
        if not versions:
            return None
        path = self.directory(versions[-1]) / RECORD
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"checkpoint file {path} cannot be used: {error}") from error

    def check(self, record: Record) -> None:
        """Verify every file of the record's checkpoint; raises `CheckpointError` naming the first that differs."""
        for name, expected in record.checksums.items():
            path = self.directory(record.version) / name
            try:
                found = _digest(path)
            except OSError as error:
                raise CheckpointError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
            if found != expected:
                raise CheckpointError(f"checkpoint file {path} is damaged: its content has another checksum")

    def commit(self, record: Record, write: Callable[[Path], None]) -> Record:
        """Make the version durable, with the files that `write` puts into the directory that it is given; return the
        record as stored. Raises `CommittedElsewhereError`.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.root))
        try:
            write(temporary)
            record = msgspec.structs.replace(record, checksums=_seal(temporary))
            for name, content in ((RECORD, msgspec.json.encode(record)), (STABLE, b"")):
                (temporary / name).write_bytes(content)
                sync(temporary / name)
            sync(temporary)
            target = self.directory(record.version)
            try:
                temporary.rename(target)
            except OSError as error:
                if target.exists():
                    raise CommittedElsewhereError(f"version {record.version} of {record.run} is committed") from error
                raise
            if self.versions()[-1] > record.version:
                # The other trainer went on, and has pruned its checkpoint of this version: the name was free again.
                shutil.rmtree(target, ignore_errors=True)
                raise CommittedElsewhereError(f"version {record.version} of {record.run} is long committed")
            sync(self.root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return record

    def clean(self) -> None:
        """Remove what interrupted commits left behind; only the one trainer that leads may call it."""
        for leftover in self.root.glob(".tmp-*"):
            _clear(leftover)

    def prune(self, needed: Iterable[int] = ()) -> None:
        """Keep the newest checkpoints, and those that are `needed`."""
        kept = set(needed)
        for version in self.versions()[: -self._keep]:
            if version not in kept:
                remove(self.directory(version))


def remove(directory: Path) -> None:
    """Remove a version's directory, so that no reader sees half of it under its name."""
    hidden = directory.with_name(f".tmp-{directory.name}")
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def prune_weights(root: Path, keep: set[int]) -> None:
    """Remove the versions of weights below the newest that are not in `keep`."""
    found = sorted(int(path.name[1:]) for path in root.glob("v[0-9]*"))
    for version in found[:-1]:
        if version not in keep:
            remove(version_directory(root, version))


def clean_weights(root: Path) -> None:
    """Remove what interrupted writes and removals left there; only the one trainer that leads may call it."""
    for leftover in (*root.glob(".tmp-v[0-9]*"), *root.glob(".v[0-9]*")):
        _clear(leftover)


def _clear(leftover: Path) -> None:
    """Remove it under another name: who led before, and does not know yet that it does no more, may be about to give
    it a version's, and would name what is half removed."""
    hidden = Path(tempfile.mkdtemp(prefix=".tmp-v0-", dir=leftover.parent))
    with contextlib.suppress(FileNotFoundError):  # it has a version's name already
        leftover.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _seal(directory: Path) -> dict[str, str]:
    """Sync every file below `directory`, and the folders; file -> SHA-256."""
    found: dict[str, str] = {}
    for path in sorted(directory.rglob("*")):
        sync(path)
        if path.is_file():
            found[path.relative_to(directory).as_posix()] = _digest(path)
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
