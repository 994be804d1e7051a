"""Writing versions of weights.

Atomic and durable: files are written and synced in a temporary directory beside the version's, which is then renamed
and its parent synced. Repeating a write that was done returns the same manifest, and puts right, file by file, what is
damaged; a directory that holds anything else is refused. Deterministic: equal tensors make equal bytes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from opengyre.proto.weights import Manifest, ShardFile
from opengyre.shared.durable import sync
from opengyre.weights.manifest import (
    MANIFEST_FILE,
    ChecksumError,
    MissingFileError,
    VersionExistsError,
    damaged,
    describe,
    read,
)

SHARD_BYTES: Final = 4 << 30


def version_directory(root: Path, version: int) -> Path:
    """Where version `version` of a run lies, below the run's directory of weights."""
    return root / f"v{version:06d}"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_shard(path: Path, shard: dict[str, Tensor]) -> None:
    save_file(shard, path, metadata={"format": "pt"})  # from where the tensors are: no copy of them in memory
    path.chmod(0o644)  # it makes files that only their owner may read
    sync(path)


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_tensors(tensors: Mapping[str, Tensor], directory: Path, limit: int) -> None:
    shards = _shards(tensors, limit)
    if len(shards) == 1:
        _write_shard(directory / "model.safetensors", shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / name, shard)
        places.update(dict.fromkeys(shard, name))
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    _write(directory / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())


def write_version(
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    run: str,
    version: int,
    parent: int | None,
    step: int,
    extra: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Write `tensors` as safetensors, with `extra` files (name -> content: config, tokenizer), as `directory`.

    Returns the manifest, which lies in the directory too. Raises `VersionExistsError` if the directory holds anything
    but this very version, damaged or not. A tensor larger than `shard_bytes` gets a shard of its own.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        _write_tensors(tensors, temporary, shard_bytes)
        for name, content in (extra or {}).items():
            _write(temporary / name, content)
        files: tuple[ShardFile, ...] = tuple(describe(path) for path in sorted(temporary.iterdir()))
        manifest = Manifest(run=run, version=version, parent=parent, step=step, directory=str(directory), files=files)
        _write(temporary / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest)))
        sync(temporary)
        try:
            temporary.rename(directory)
        except OSError as error:
            if not directory.exists():
                raise
            return _same(directory, manifest, temporary, error)
        sync(directory.parent)
        return manifest
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _same(directory: Path, wanted: Manifest, fresh: Path, error: OSError) -> Manifest:
    """The manifest of a version that was written before, if it is the wanted one. `fresh` holds the same anew."""
    try:
        found = read(directory)
    except MissingFileError:
        found = None
    except ChecksumError:
        # Nothing but a version of ours has a manifest there: this one is damaged.
        found = wanted
        (fresh / MANIFEST_FILE).replace(directory / MANIFEST_FILE)
    if found is None or found != wanted:
        raise VersionExistsError(
            f"{directory} exists and is not version {wanted.version} of {wanted.run} with these weights", directory
        ) from error
    for name in damaged(directory):
        (fresh / name).replace(directory / name)
    sync(directory)
    return found
