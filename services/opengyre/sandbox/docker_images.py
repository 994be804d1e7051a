"""Images of the engine: listed, imported from an archive of a root, removed.

Awaits: the engine's answers; an import as long as the engine reads, and each read is bounded by `READ_S`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiodocker
import aiohttp

from opengyre.sandbox.core import InvalidRequest, SandboxBusy, SandboxError, Stored, unsupported
from opengyre.sandbox.docker_engine import CONFLICT, NO_CONNECTION, NOT_FOUND, engine_errors
from opengyre.sandbox.docker_snapshots import Snapshots

CHUNK = 1 << 20
READ_S = 120.0
OURS = "gyre-snapshot-"


def tagged(image: str) -> str:
    """A name as the engine lists it."""
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


class Images(Snapshots):
    """The part of the backend that is about images."""

    async def image_list(self) -> tuple[list[Stored], int | None]:
        async with engine_errors("a list of images"):
            images = await self._engine.docker.images.list()
            containers = await self._engine.docker.containers.list(all=1)
        used = {container["ImageID"] for container in containers}
        found = [
            Stored(name=tag, size=image["Size"], used_at=None, in_use=image["Id"] in used)
            for image in images
            for tag in image.get("RepoTags") or ()
            if not tag.startswith((OURS, "<none>"))
        ]
        return sorted(found, key=lambda one: one.name), None

    def image_source(self, path: str) -> Path:
        raise unsupported("root_directories", f"path {path[:100]!r}", "docker")

    async def add_image(self, image: str, source: Path, told: Callable[[int], None]) -> Stored:
        repository, _, tag = tagged(image).rpartition(":")
        params = {"fromSrc": "-", "repo": repository, "tag": tag}
        ended: list[SandboxError] = []
        cm = self._engine.docker._query(  # noqa: SLF001 - its methods know `docker load` only, whose archives are no roots
            "images/create",
            "POST",
            params=params,
            data=_stream(source, told, ended),
            headers={"Content-Type": "application/x-tar"},
            timeout=aiohttp.ClientTimeout(total=None, sock_read=READ_S),
        )
        async with engine_errors(f"the import of image {image!r}"):
            try:
                async with cm as answer:
                    said = (await answer.text()).strip()
            except aiodocker.DockerError as error:
                if ended:  # the client would say that its body broke, not why
                    raise ended[0] from error
                if error.status == NO_CONNECTION:
                    raise
                raise InvalidRequest(f"image {image!r} could not be imported: {error.message}") from error
        if '"error"' in said:
            raise InvalidRequest(f"image {image!r} could not be imported: {said[-300:]}")
        await self._look_at_images()
        for one in (await self.image_list())[0]:
            if one.name == tagged(image):
                return one
        raise InvalidRequest(f"image {image!r} was removed meanwhile; add it again")

    async def remove_image(self, image: str) -> int:
        held = {one.name: one.size for one in (await self.image_list())[0]}
        name = tagged(image)
        if name not in held:
            known = ", ".join(held) or "none yet"
            raise InvalidRequest(f"image is {image[:120]!r}; allowed are those of this engine: {known}")
        async with engine_errors(f"the removal of image {image!r}"):
            try:
                await self._engine.docker.images.delete(name)
            except aiodocker.DockerError as error:
                if error.status == CONFLICT:
                    raise SandboxBusy(
                        f"image {image!r} is in use; destroy its sandboxes and snapshots first ({error.message})"
                    ) from error
                if error.status != NOT_FOUND:
                    raise
        await self._look_at_images()
        return held[name]


async def _stream(source: Path, told: Callable[[int], None], ended: list[SandboxError]) -> AsyncIterator[bytes]:
    """What `told` raises is kept in `ended`."""
    file = await asyncio.to_thread(source.open, "rb")
    with contextlib.closing(file):
        while chunk := await asyncio.to_thread(file.read, CHUNK):
            try:
                told(len(chunk))
            except SandboxError as error:
                ended.append(error)
                raise
            yield chunk
