"""Content-addressed blobs: files for what must last, Valkey or Redis in front for what is hot.

Invariants: a reference is `sha256:<hex>` of the content, and content is checked against it when it is read; a file is
complete or absent (temporary name, fsync, rename), and one that was damaged is replaced by the next `put` of its
content; the loss or absence of the cache is never an error. What is large is hashed off the loop; what is too large to
be in memory once more is hashed while it is written, piece by piece.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import redis.asyncio as redis
from redis.exceptions import RedisError

from opengyre.shared.durable import sync
from opengyre.shared.settings import CacheSettings

log = logging.getLogger("gyre.blobs")

CACHE_LIMIT = 64 << 20
LARGE = 1 << 20
MESSAGE_LIMIT = 256 << 10
"""Content above this many bytes travels as a blob (design section 3)."""
SLICE: Final = 4 << 20
"""Bytes that are hashed and written at a time."""


class BlobMissingError(LookupError):
    """There is no blob under this reference, or what is there is damaged."""


def reference(content: bytes) -> str:
    """`sha256:<hex>` of the content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def reference_of(path: Path) -> str:
    """`sha256:<hex>` of a file's content; blocks."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written to a file."""

    reference: str
    size: int
    """Bytes."""


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write pieces one after the other to an empty file that is there, and hash them; blocks.

    A piece is let go before the next is asked for, so no more than one of them need be in memory. A file that was
    removed meanwhile, by who gave it up, is not made again: `FileNotFoundError`. Raises `OSError`.
    """
    digest, size, source = hashlib.sha256(), 0, iter(pieces)
    with path.open("r+b") as file:
        while (piece := next(source, None)) is not None:
            for at in range(0, len(piece), SLICE):
                digest.update(piece[at : at + SLICE])
                file.write(piece[at : at + SLICE])
            size += len(piece)
            piece = None  # Or `next` would make another beside it.
    return Written(f"sha256:{digest.hexdigest()}", size)


async def _reference(content: bytes) -> str:
    return await asyncio.to_thread(reference, content) if len(content) > LARGE else reference(content)


class Blobs:
    """The blob store below `root`. Use as `async with Blobs(...)`."""

    def __init__(self, root: Path, cache: CacheSettings) -> None:
        self._root = root
        self._settings = cache
        self._cache: redis.Redis | None = None

    async def __aenter__(self) -> Self:
        if self._settings.url:
            self._cache = redis.Redis.from_url(self._settings.url, socket_timeout=2, socket_connect_timeout=2)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._cache is not None:
            await self._cache.aclose()

    def path(self, ref: str) -> Path:
        """Where the blob's file is or would be."""
        digest = ref.removeprefix("sha256:")
        if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
            raise BlobMissingError(f"{ref!r} is no blob reference: allowed is sha256: and 64 hexadecimal digits")
        return self._root / digest[:2] / digest

    async def put(self, content: bytes, *, durable: bool = True) -> str:
        """Store `content`; return its reference. With `durable` it is on disk when this returns."""
        ref = await _reference(content)
        await asyncio.to_thread(self._write, self.path(ref), content, durable)
        if self._cache is not None and len(content) <= CACHE_LIMIT:
            await self._warm(self._cache, ref, content)
        return ref

    async def put_by(self, write: Callable[[Path], Awaitable[Written]], *, durable: bool = True) -> Written:
        """Store what `write` puts into the empty file that it is given (see `write_pieces`), in whatever process of
        this machine. With `durable` it is on disk when this returns."""
        self._root.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._root, prefix=".tmp-")
        os.close(handle)
        try:
            written = await write(Path(name))
            path = self.path(written.reference)
            await asyncio.to_thread(self._settle, Path(name), path, durable)
        except BaseException:
            # Off the loop: a file of many gigabytes takes a while to remove.
            await asyncio.to_thread(Path(name).unlink, missing_ok=True)
            raise
        if self._cache is not None and written.size <= CACHE_LIMIT:
            await self._warm(self._cache, written.reference, await asyncio.to_thread(path.read_bytes))
        return written

    async def put_file(self, source: Path) -> str:
        """Store the content of a file of any size, which is then gone; it lasts when this returns."""
        ref = await asyncio.to_thread(reference_of, source)
        await asyncio.to_thread(self._move, source, self.path(ref))
        return ref

    async def file(self, ref: str) -> Path:
        """The blob's file, for reading, after a look at its content; raises `BlobMissingError`."""
        path = self.path(ref)
        if not path.exists():
            await asyncio.to_thread(self._write, path, await self.get(ref), False)
        elif await asyncio.to_thread(reference_of, path) != ref:
            raise BlobMissingError(f"the file of blob {ref} is damaged: its content has another checksum")
        return path

    async def get(self, ref: str) -> bytes:
        """The content; raises `BlobMissingError`."""
        path = self.path(ref)
        if self._cache is not None:
            try:
                hot = await self._cache.get(f"gyre:blob:{ref}")
            except (RedisError, OSError) as error:
                log.info("blobs: the cache does not answer (%r); files go on", error)
            else:
                if isinstance(hot, bytes) and await _reference(hot) == ref:
                    return hot
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError as error:
            raise BlobMissingError(f"there is no blob {ref}") from error
        if await _reference(content) != ref:
            raise BlobMissingError(f"the file of blob {ref} is damaged: its content has another checksum")
        return content

    async def discard(self, ref: str) -> None:
        """Forget it; no error if it is not there."""
        if self._cache is not None:
            try:
                await self._cache.delete(f"gyre:blob:{ref}")
            except (RedisError, OSError) as error:
                log.info("blobs: the cache does not answer (%r)", error)
        await asyncio.to_thread(self.path(ref).unlink, missing_ok=True)

    async def _warm(self, cache: redis.Redis, ref: str, content: bytes) -> None:
        try:
            await cache.set(f"gyre:blob:{ref}", content, ex=self._settings.ttl_s)
        except (RedisError, OSError) as error:
            log.info("blobs: the cache does not answer (%r); files go on", error)

    def _settle(self, temporary: Path, path: Path, durable: bool) -> None:
        """Give a complete file of the same file system its name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)

    def _move(self, source: Path, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        os.close(handle)
        try:
            shutil.move(source, name)
            self._settle(Path(name), path, True)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _write(self, path: Path, content: bytes, durable: bool) -> None:
        if path.exists() and path.read_bytes() == content:
            if durable:  # who wrote it may not have asked for that
                sync(path)
                sync(path.parent)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            self._settle(Path(name), path, durable)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
