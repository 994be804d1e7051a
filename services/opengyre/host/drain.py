"""The drain: calls end or are moved with their partial tokens, the engine sleeps, its memory is measured.

A move is chosen by cost (design section 4): a call whose rest, at the speed that it had so far, does not fit into the
grace is stopped at once, since waiting for it would only delay the switch; the others may end here.

Awaits: the last call that leaves, bounded by the grace and then by `ABORTED_S` for each round of aborts; the engine.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opengyre.host.door import Door
from opengyre.host.engine import CallProgress, Engine

log = logging.getLogger("gyre.host")

ABORTED_S = 0.25


class MemoryNotFreedError(Exception):
    """The engine sleeps and still holds memory: training must not start."""


@dataclass(frozen=True, slots=True)
class Drained:
    freed_bytes: int
    """Measured before less measured after."""


def to_move(calls: Iterable[CallProgress], ages: Mapping[str, float], grace_s: float, usual: float) -> list[str]:
    """The calls that cannot end within the grace. Pure.

    `ages`: seconds since each came in. `usual`: tokens a second of a call now, for those that have no token yet; where
    that is 0 nothing is known, and they may try.
    """
    chosen: list[str] = []
    for call in calls:
        age = ages.get(call.request_id, 0.0)
        speed = call.sampled / age if call.sampled and age > 0 else usual
        if speed > 0 and call.limit - call.sampled > speed * grace_s:
            chosen.append(call.request_id)
    return chosen


async def end_calls(engine: Engine, door: Door, grace_s: float, ages: Callable[[], Mapping[str, float]]) -> None:
    """Empty the shut door: what fits into the grace ends, the rest is stopped with its partial tokens."""
    now = engine.stats()
    long = to_move(engine.progress(), ages(), grace_s, now.tokens_per_s / max(1, now.running))
    if long:
        await engine.abort(long)
    if await door.empty(grace_s):
        return
    # A call may be between the door and the engine, so one round of aborts is not always enough.
    while True:
        await engine.abort(None)
        if await door.empty(ABORTED_S):
            return
        log.info("drain: %d calls have not left yet", door.live)


async def put_to_sleep(engine: Engine) -> Drained:
    """Free what the engine holds. Raises `MemoryNotFreedError` when it is not free."""
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
