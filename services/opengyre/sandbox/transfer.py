"""Files in and out of bubblewrap sandboxes.

Awaits: a request to the launcher, bounded there.
"""

import asyncio
import socket
from pathlib import Path

import msgspec

from opengyre.sandbox.base import Base
from opengyre.sandbox.core import InvalidRequest, Packed, Spec, unsupported


class Transfer(Base):
    """The part of the backend that is about files."""

    async def copy(self, source: str, target: Spec) -> None:
        if not self._isolated:
            raise InvalidRequest("mode is 'separate' or 'live'; allowed is 'shared' on a node without isolation")
        record = self._record(source)
        await self._launcher.request(
            "copy",
            limit=target.workspace_mb << 20,
            cgroups=self._groups.joins(target.sandbox, limits_only=True),
            **{"from": {"pid": record.pid, "started": record.started}},
            **self._inside(target.sandbox),
        )

    async def read(self, sandbox: str, path: str, limit: int) -> bytes:
        target = self._temporary(sandbox)
        try:
            await self.read_to(sandbox, path, target, limit)
            return await asyncio.to_thread(target.read_bytes)
        finally:
            target.unlink(missing_ok=True)

    async def read_to(self, sandbox: str, path: str, target: Path, limit: int) -> None:
        place = self._place(sandbox, path)
        await self._launcher.request("read", path=place, limit=limit, target=str(target), **self._inside(sandbox))

    async def write(self, sandbox: str, path: str, data: bytes, mode: int) -> None:
        self._record(sandbox)
        source = self._temporary(sandbox)
        try:
            await asyncio.to_thread(source.write_bytes, data)
            await self.write_from(sandbox, path, source, mode)
        finally:
            source.unlink(missing_ok=True)

    async def write_from(self, sandbox: str, path: str, source: Path, mode: int) -> None:
        place = self._place(sandbox, path)
        request = {"path": place, "mode": mode, "source": str(source), **self._inside(sandbox)}
        await self._launcher.request("write", cgroups=self._groups.joins(sandbox, limits_only=True), **request)

    async def put(self, sandbox: str, path: str, archive: Path, user: str | None = None) -> Packed:
        if user is not None and not self._own_ids:
            raise unsupported("users", f"user {user[:100]!r}", "bubblewrap")
        request = {"path": self._place(sandbox, path), "source": str(archive), "user": user, **self._inside(sandbox)}
        made = await self._launcher.request("put", cgroups=self._groups.joins(sandbox, limits_only=True), **request)
        return msgspec.convert(made, Packed)

    async def get(self, sandbox: str, path: str, archive: Path, limit: int) -> Packed:
        place = self._place(sandbox, path)
        made = await self._launcher.request(
            "get", path=place, limit=limit, target=str(archive), **self._inside(sandbox)
        )
        return msgspec.convert(made, Packed)

    async def listen(self, sandbox: str, port: int) -> socket.socket:
        return await self._launcher.listen(port=port, **self._inside(sandbox))
