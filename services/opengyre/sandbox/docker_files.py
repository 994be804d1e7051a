"""Files in and out of containers, by a program in each that is the sandbox's user: no path can lead out of it, and what
that user may not read is not read.

Bytes go through the program's standard input and output, never through its arguments, whose length is bounded. The
engine's own archives would be root's and see no tmpfs.

Awaits: the end of the program, bounded by `docker_engine.CALL_S` or `TRANSFER_S`.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from opengyre.sandbox import docker_config, docker_host, docker_tar, jail
from opengyre.sandbox.core import InfraError, InvalidRequest, OutputLimit, Packed, SandboxGone, Spec
from opengyre.sandbox.docker_base import DockerBase
from opengyre.sandbox.docker_config import NOT_REGULAR, WORKSPACE
from opengyre.sandbox.docker_spool import Place

TRANSFER_S = 600.0
HEADROOM = 64 << 20
"""Bytes of an archive beside its content."""


class _Sink:
    """A file that takes at most so many bytes; one more is an `OutputLimit`."""

    def __init__(self, target: Path, limit: int, what: str) -> None:
        self._file = target.open("wb")
        self._left = limit
        self._words = f"{what} is larger than the limit of {limit} bytes"

    def __call__(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise OutputLimit(self._words)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


class Files(DockerBase):
    """The part of the backend that is about files."""

    async def _helper(
        self,
        place: Place,
        argv: Sequence[str],
        sink: Callable[[bytes], object] = lambda _: None,
        source: Callable[[int], bytes] | None = None,
        user: str | None = None,
    ) -> tuple[int, str]:
        environment = {"PATH": jail.PATH, "GYRE_SANDBOX": place.marker, "GYRE_EXEC": "service"}
        return await self._engine.run(
            place.sandbox,
            place.container,
            argv,
            sink,
            user=user or place.user,
            environment=environment,
            source=source,
            bound_s=TRANSFER_S,
        )

    async def read(self, sandbox: str, path: str, limit: int) -> bytes:
        target = self._temporary(sandbox)
        try:
            await self.read_to(sandbox, path, target, limit)
            return await asyncio.to_thread(target.read_bytes)
        finally:
            target.unlink(missing_ok=True)

    async def read_to(self, sandbox: str, path: str, target: Path, limit: int) -> None:
        place = self._place(sandbox)
        # One more than allowed, so that a file that is as long as that is told from a longer one.
        argv = docker_config.script(docker_config.READ, path, str(limit + 1))
        sink = _Sink(target, limit, f"path {path!r}")
        try:
            code, said = await self._helper(place, argv, sink)
        finally:
            sink.close()
        _check(path, "read", code, said)

    async def write(self, sandbox: str, path: str, data: bytes, mode: int) -> None:
        self._record(sandbox)
        source = self._temporary(sandbox)
        try:
            await asyncio.to_thread(source.write_bytes, data)
            await self.write_from(sandbox, path, source, mode)
        finally:
            source.unlink(missing_ok=True)

    async def write_from(self, sandbox: str, path: str, source: Path, mode: int) -> None:
        place = self._place(sandbox)
        argv = docker_config.script(docker_config.WRITE, path, str(docker_tar.size_of(source)), f"{mode:o}")
        with source.open("rb") as reading:
            code, said = await self._helper(place, argv, source=reading.read)
        _check(path, "written", code, said)

    async def put(self, sandbox: str, path: str, archive: Path, user: str | None = None) -> Packed:
        place = self._place(sandbox)
        plain = self._temporary(sandbox)
        try:
            what = f"the archive for {path!r}"
            packed = await asyncio.to_thread(
                docker_tar.filter_file, archive, plain, limit=docker_tar.size_of(archive), what=what, strict=True
            )
            await self._unpack(place, path, plain, user)
        finally:
            plain.unlink(missing_ok=True)
        return packed

    async def _unpack(self, place: Place, path: str, archive: Path, user: str | None = None) -> None:
        argv = docker_config.script(docker_config.UNPACK, path)
        with archive.open("rb") as reading:
            code, said = await self._helper(place, argv, source=reading.read, user=user)
        _check(path, "written", code, said)

    async def get(self, sandbox: str, path: str, archive: Path, limit: int) -> Packed:
        return await self._pack(self._place(sandbox), path, ["."], archive, limit, f"path {path!r}")

    async def _pack(
        self,
        place: Place,
        path: str,
        names: Sequence[str],
        archive: Path,
        limit: int,
        what: str,
        user: str | None = None,
    ) -> Packed:
        raw = self._temporary(place.sandbox)
        argv = docker_config.script(docker_config.PACK, path, *names)
        try:
            sink = _Sink(raw, limit + HEADROOM, what)
            try:
                code, said = await self._helper(place, argv, sink, user=user)
            finally:
                sink.close()
            # 1: something changed meanwhile; 2: something cannot be read by the user. The rest is there.
            if code not in (0, 1, 2):
                _check(path, "read", code, said)
            try:
                return await asyncio.to_thread(
                    docker_tar.filter_file, raw, archive, limit=limit, what=what, strict=False
                )
            except InvalidRequest as error:
                raise InfraError(f"{what} could not be read: {said or error}") from error
        finally:
            raw.unlink(missing_ok=True)

    async def copy(self, source: str, target: Spec) -> None:
        archive = self._temporary(target.sandbox)
        try:
            what = f"the workspace of sandbox {source!r}"
            await self._pack(self._place(source), WORKSPACE, ["."], archive, target.workspace_mb << 20, what)
            await self._unpack(self._place(target.sandbox), WORKSPACE, archive)
        finally:
            archive.unlink(missing_ok=True)

    async def _first_files(self, place: Place, files: Mapping[str, str]) -> None:
        """What a sandbox begins with, by absolute path."""
        if not files:
            return
        archive = self._temporary(place.sandbox)
        content = {name.lstrip("/"): text.encode("utf-8", "surrogateescape") for name, text in files.items()}
        try:
            await asyncio.to_thread(docker_tar.of_files, content, archive)
            await self._unpack(place, "/", archive)
        except InvalidRequest as error:
            raise InvalidRequest(f"files cannot be written: {error}") from error
        finally:
            with suppress(OSError):
                archive.unlink(missing_ok=True)

    async def listen(self, sandbox: str, port: int) -> socket.socket:
        made = self._record(sandbox)
        try:
            return await asyncio.to_thread(docker_host.listen, made.first, port)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {sandbox!r} has ended") from None
        except OSError as error:
            raise InfraError(f"port {port} of sandbox {sandbox!r} cannot be opened: {error}") from error


def _check(path: str, done: str, code: int, said: str) -> None:
    """Raise what a program's status says."""
    if code == 0:
        return
    if code == NOT_REGULAR:
        raise InvalidRequest(f"path {path!r} is not a regular file")
    if code in (126, 127):
        raise InfraError(f"path {path!r} cannot be {done}: the image has no such program ({said[-200:]})")
    reason = said.rpartition(": ")[2] or f"status {code}"
    raise InvalidRequest(f"path {path!r} cannot be {done}: {reason}")
