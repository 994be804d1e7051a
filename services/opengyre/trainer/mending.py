"""Weights that a host refused: looked at, and written again where they are damaged.

A version's files can always be made anew from its checkpoint, byte for byte, so the manifest stays what it is and the
host, which reads a refused version again, finds it whole.

Awaits: a refusal on the bus, without a bound: that none comes is the rule. `mend` works in the trainer's torch thread.
"""

import logging
from collections.abc import Awaitable, Callable

from opengyre.proto import subjects
from opengyre.proto.codec import UndecodableError
from opengyre.proto.weights import WeightsRefused
from opengyre.shared.bus import Bus, follow
from opengyre.tiny.config import ModelDirectoryError
from opengyre.trainer.checkpoint import CheckpointFormatError
from opengyre.weights.manifest import WeightsError

log = logging.getLogger("gyre.trainer")

UNMENDABLE = (WeightsError, ModelDirectoryError, CheckpointFormatError, OSError)


async def mend_refused(bus: Bus, run: str, published: int, mend: Callable[[int], Awaitable[list[str]]]) -> None:
    """Until cancelled. `mend(version)` gives the files that it wrote again; `published`: the version that is in use."""
    subject = subjects.weights(run, "refused")
    last = await bus.last(subject, subjects.WEIGHTS)
    await _mend(published, mend, "the trainer has started")
    async for stored in follow(bus, subjects.WEIGHTS, subject, start=last.sequence if last else 1):
        try:
            event = stored.event()
        except UndecodableError as error:
            log.warning("message %d of %s is passed over: %s", stored.sequence, subject, error)
            continue
        if isinstance(event, WeightsRefused):
            await _mend(event.version, mend, f"{event.host} refused it")


async def _mend(version: int, mend: Callable[[int], Awaitable[list[str]]], why: str) -> None:
    try:
        if files := await mend(version):
            log.warning("wrote %s of version %d again: %s", ", ".join(files), version, why)
    except UNMENDABLE as error:
        log.error("version %d cannot be written again: %s", version, error)  # noqa: TRY400 - a known fault
