"""Token ids of calls that are too large for a message: in the blob store under their hash, and back (design section 3).

Invariants: what `pack` gives is below the limit of a message for any number of ids, and its blob is on disk before
it is returned; `fill` of it is the call that was packed. A blob that is missing or damaged leaves its call as it is,
which whoever reads it refuses (`Call.bulk` is set); it stops nothing.

Awaits: the blob store, which is files of this machine and a cache that may fail.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import msgspec

from opengyre.proto.traj import Bulk, BulkIds, Call, unpack
from opengyre.shared.blobs import MESSAGE_LIMIT, BlobMissingError, Blobs

log = logging.getLogger("gyre.bulk")

T = TypeVar("T")
ID_BYTES: Final = 11
"""Of an id in JSON, at most."""
SAMPLED_BYTES: Final = 40
"""Of a sampled id and its log-prob."""


async def pack(blobs: Blobs, call: Call) -> Call:
    """The call as it goes into a message: its ids as a blob where they are more than `MESSAGE_LIMIT` bytes of JSON."""
    if ID_BYTES * len(call.prompt_ids) + SAMPLED_BYTES * len(call.sampled_ids) <= MESSAGE_LIMIT:
        return call
    ids = BulkIds(prompt_ids=call.prompt_ids, sampled_ids=call.sampled_ids, logprobs=call.logprobs)
    content = await asyncio.to_thread(msgspec.json.encode, ids)
    if len(content) <= MESSAGE_LIMIT:
        return call
    bulk = Bulk(
        blob=await blobs.put(content), prompt_ids=len(call.prompt_ids), sampled_ids=len(call.sampled_ids)
    )  # fmt: skip
    return msgspec.structs.replace(call, prompt_ids=(), sampled_ids=(), logprobs=(), bulk=bulk)


async def fill(get: Callable[[str], Awaitable[bytes]], events: Iterable[T]) -> list[T]:
    """The events, calls with their ids; `get` gives a blob's content or raises `BlobMissingError`. Blobs are read one
    at a time."""
    found: list[T] = []
    for event in events:
        if isinstance(event, Call) and event.bulk is not None:
            try:
                content = await get(event.bulk.blob)
                found.append(await asyncio.to_thread(unpack, event, content))
                continue
            except (BlobMissingError, msgspec.DecodeError) as error:
                log.warning("the ids of call %s cannot be read: %s", event.call, error)
        found.append(event)
    return found
