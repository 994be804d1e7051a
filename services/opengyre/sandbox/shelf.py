"""The images of a node: listed, added and removed.

Invariants: one addition at a time, as each wants the whole disk; one that is asked for again while it is under way is
joined; it goes on when nobody waits for it, and ends with the service, leaving nothing.

Awaits: `add` waits for its addition for as long as its caller allows; an addition waits for the ones before it, at most
`WAITING` of them, each bounded by the size of the cache.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.proto.sandbox_images import (
    AddImageRequest,
    ImageAdding,
    ImageInfo,
    ImageList,
    ImageRemoved,
    ImagesRequest,
    RemoveImageRequest,
)
from opengyre.sandbox import check
from opengyre.sandbox.core import Backend, InfraError, InvalidRequest, SandboxBusy, Stored

WAITING = 8
WAIT_BOUND_S = 60.0


class StoppedError(InfraError):
    """The service stops; what was added so far is removed."""


@dataclass
class Adding:
    """An addition that is under way or whose end nobody has heard of."""

    source: tuple[str | None, str | None]
    """Blob and path that it was asked for with."""
    unpacked: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    task: "asyncio.Task[Stored] | None" = None

    def told(self, size: int) -> None:
        """Called in the thread that unpacks."""
        if self.stopped.is_set():
            raise StoppedError("the service stops; add the image again")
        self.unpacked += size


class Shelf:
    """What a node does with its images."""

    def __init__(self, backend: Backend, node: str, fetch: Callable[[str], Awaitable[Path]]) -> None:
        """``fetch`` gives the file of a blob."""
        self._backend = backend
        self._node = node
        self._fetch = fetch
        self._adding: dict[str, Adding] = {}
        self._one = asyncio.Semaphore(1)

    async def listing(self, _: ImagesRequest) -> ImageList:
        """All of them."""
        found, limit = await self._backend.image_list()
        return ImageList(images=tuple(self._info(one) for one in found), limit=limit)

    def _info(self, one: Stored) -> ImageInfo:
        return ImageInfo(image=one.name, node=self._node, size=one.size, used_at=one.used_at, in_use=one.in_use)

    async def add(self, request: AddImageRequest) -> ImageAdding:
        """Begin or join an addition, and wait for it for a while."""
        check.between("wait_s", request.wait_s, 0, WAIT_BOUND_S)
        if (request.blob is None) == (request.path is None):
            raise InvalidRequest("blob and path are both given or both missing; allowed is one of them")
        check.image_reference(request.image)
        name = request.image
        adding = self._begun(name, request)
        assert adding.task is not None, "_begun() makes it"
        done, _ = await asyncio.wait([adding.task], timeout=request.wait_s)
        if not done:
            return ImageAdding(image=name, node=self._node, done=False, unpacked=adding.unpacked)
        if self._adding.get(name) is adding:
            del self._adding[name]
        info = self._info(adding.task.result())
        return ImageAdding(image=name, node=self._node, done=True, unpacked=adding.unpacked, info=info)

    def _begun(self, name: str, request: AddImageRequest) -> Adding:
        source = (request.blob, request.path)
        known = self._adding.get(name)
        if known is not None and known.source == source:
            return known
        under_way = [other for other, one in self._adding.items() if one.task is not None and not one.task.done()]
        if name in under_way:
            raise SandboxBusy(
                f"image {name!r} is being added from elsewhere; wait for that, or add it under another name"
            )
        if len(under_way) >= WAITING:
            raise SandboxBusy(f"{self._node} adds {len(under_way)} images; allowed are {WAITING} at once")
        self._adding = {other: one for other, one in self._adding.items() if other in under_way}
        adding = self._adding[name] = Adding(source)
        # A task and no group: it outlives the request that began it, and `stop` ends and awaits it.
        adding.task = asyncio.create_task(self._add(name, adding))
        return adding

    async def _add(self, name: str, adding: Adding) -> Stored:
        blob, path = adding.source
        async with self._one:
            source = self._backend.image_source(path) if path is not None else await self._fetch(blob or "")
            return await self._backend.add_image(name, source, adding.told)

    async def remove(self, request: RemoveImageRequest) -> ImageRemoved:
        """Remove one that nothing stands on."""
        check.image_reference(request.image)
        return ImageRemoved(image=request.image, freed=await self._backend.remove_image(request.image))

    async def stop(self) -> None:
        """End what is under way; what it wrote is removed."""
        tasks = [one.task for one in self._adding.values() if one.task is not None]
        for one in self._adding.values():
            one.stopped.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._adding.clear()
