"""Reading and verifying versions of weights; needs no torch.

A version is a directory with its files and `manifest.json`. The directory appears by one rename, complete or not at
all, so a reader never sees half a version. Its files never change.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

import msgspec

from opengyre.proto.weights import Manifest, ShardFile

MANIFEST_FILE: Final = "manifest.json"
INDEX_FILE: Final = "model.safetensors.index.json"
_CHUNK: Final = 1 << 20


class WeightsError(Exception):
    """A version that cannot be used or written. `file` is the path that is the reason."""

    def __init__(self, message: str, file: Path) -> None:
        super().__init__(message)
        self.file = file


class MissingFileError(WeightsError):
    """A file of the version does not exist."""


class ChecksumError(WeightsError):
    """A file of the version is not what the manifest says."""


class VersionExistsError(WeightsError):
    """The directory holds another version."""


def describe(path: Path) -> ShardFile:
    """Name, SHA-256 and size of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return ShardFile(name=path.name, sha256=digest.hexdigest(), bytes=size)


def read(directory: Path) -> Manifest:
    """The manifest of the version in `directory`, with `directory` as it is found now. Verifies nothing else."""
    path = directory / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist; a version of weights has a {MANIFEST_FILE}", path) from None
    except msgspec.MsgspecError as error:
        raise ChecksumError(f"{path} is not a manifest: {error}", path) from error
    return msgspec.structs.replace(manifest, directory=str(directory))


def verify(manifest: Manifest) -> None:
    """Check every file against the manifest, and that it lists all shards; raises a `WeightsError` that names the first
    that differs or lacks."""
    directory = Path(manifest.directory)
    for wanted in manifest.files:
        path = directory / wanted.name
        if not path.is_file():
            raise MissingFileError(f"version {manifest.version}: {path} does not exist", path)
        found = describe(path)
        if found.bytes != wanted.bytes:
            raise ChecksumError(
                f"version {manifest.version}: {path} has {found.bytes} bytes; the manifest says {wanted.bytes}", path
            )
        if found.sha256 != wanted.sha256:
            raise ChecksumError(
                f"version {manifest.version}: {path} has the SHA-256 {found.sha256[:12]}...; "
                f"the manifest says {wanted.sha256[:12]}...",
                path,
            )
    _check_shards(manifest, directory)


def _check_shards(manifest: Manifest, directory: Path) -> None:
    """A shard that is there and not listed would be loaded unchecked."""
    listed = {file.name for file in manifest.files}
    if not any(name.endswith(".safetensors") for name in listed):
        raise MissingFileError(f"version {manifest.version}: the manifest lists no safetensors file", directory)
    if INDEX_FILE not in listed:
        return
    path = directory / INDEX_FILE
    try:
        shards = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ChecksumError(f"version {manifest.version}: {path} has no weight_map: {error}", path) from error
    if missing := sorted(shards - listed):
        raise MissingFileError(
            f"version {manifest.version}: the manifest lacks the shard {missing[0]}, which {INDEX_FILE} names",
            directory / missing[0],
        )


def damaged(directory: Path) -> list[str]:
    """Names of the files in a version's directory that are not what its manifest says, the manifest first; all of it
    hangs on the manifest, so one that cannot be read is the only name."""
    try:
        manifest = read(directory)
    except WeightsError:
        return [MANIFEST_FILE]
    return [wanted.name for wanted in manifest.files if not _is(directory / wanted.name, wanted)]


def _is(path: Path, wanted: ShardFile) -> bool:
    return path.is_file() and describe(path) == wanted
