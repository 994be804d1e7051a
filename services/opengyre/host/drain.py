"""The drain: calls end or are stopped with their partial tokens, the engine sleeps, its memory is measured.

Awaits: the last call that leaves, bounded by the grace and then by `ABORTED_S` for each round of aborts; the engine.
"""

import logging
from dataclasses import dataclass

from opengyre.host.door import Door
from opengyre.host.engine import Engine

log = logging.getLogger("gyre.host")

ABORTED_S = 0.25


class MemoryNotFreedError(Exception):
    """The engine sleeps and still holds memory: training must not start."""


@dataclass(frozen=True, slots=True)
class Drained:
    freed_bytes: int
    """Measured before less measured after."""


async def drain(engine: Engine, door: Door, grace_s: float) -> Drained:
    """Empty the shut door, put the engine to sleep. Raises `MemoryNotFreedError` when what it held is not free."""
    if not await door.empty(grace_s):
        # A call may be between the door and the engine, so one round of aborts is not always enough.
        while True:
            await engine.abort(None)
            if await door.empty(ABORTED_S):
                break
            log.info("drain: %d calls have not left yet", door.live)
    before = held(engine)
    await engine.sleep()
    after = held(engine)
    if after:
        raise MemoryNotFreedError(f"the engine sleeps and holds {after} of {before} bytes")
    return Drained(freed_bytes=before)


def held(engine: Engine) -> int:
    """Bytes that the engine holds for weights and keys/values."""
    stats = engine.stats()
    return stats.weight_bytes + stats.kv_bytes
