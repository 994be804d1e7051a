"""Which weights a host is to serve: the newest published version of the run that is followed.

Invariants: versions only grow; a version is used only after every file of it was checked against its manifest.

Awaits: `follow_published` is woken by the broker; a new manifest is handed to `found`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from opengyre.proto import subjects
from opengyre.proto.codec import UndecodableError
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bus, follow
from opengyre.weights.manifest import verify

log = logging.getLogger("gyre.host")

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 10.0


def chosen_run(runs: Mapping[str, RunSpec], revisions: Mapping[str, int]) -> str | None:
    """The active run; without one, that which changed last, whose weights are still asked for by evaluations."""
    names = [name for name, spec in runs.items() if spec.state == "active"] or list(runs)
    return max(names, key=lambda name: revisions.get(name, 0), default=None)


def replaces(current: Manifest | None, found: Manifest) -> bool:
    """Whether `found` is to be served instead of `current`: of another run, newer, or the same published anew."""
    if current is None or current.run != found.run:
        return True
    return found.version > current.version or (found.version == current.version and found != current)


def retry_after(failures: int) -> float:
    """Seconds until a version that was refused is read again."""
    return min(FIRST_RETRY_S * 2 ** min(failures, 16), LAST_RETRY_S)


async def verified(manifest: Manifest) -> None:
    """Check the files, off the loop; raises a `WeightsError` that names the first that differs."""
    await asyncio.to_thread(verify, manifest)


async def follow_published(bus: Bus, run: str, found: Callable[[Manifest], None]) -> None:
    """Hand the last published manifest of `run`, and each later one, to `found`; until cancelled."""
    subject = subjects.weights(run, "published")
    last = await bus.last(subject, subjects.WEIGHTS)
    async for stored in follow(bus, subjects.WEIGHTS, subject, start=last.sequence if last else 1):
        try:
            event = stored.event()
        except UndecodableError as error:
            log.warning("message %d of %s is passed over: %s", stored.sequence, subject, error)
            continue
        if isinstance(event, WeightsPublished):
            found(event.manifest)
