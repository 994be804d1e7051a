"""Which weights a host is to serve: the newest published version of the run that is followed.

Invariants: versions only grow; a version is used only after every file of it was checked against its manifest.

Awaits: `follow_published` is woken by the broker; a new manifest is handed to `found`. `in_turn` looks ever later
whether the turn is free, `TURN_S` at most.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping

from opengyre.proto import subjects
from opengyre.proto.codec import UndecodableError
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bucket, Bus, BusError, BusUnavailableError, Lease, LeaseOwner, follow
from opengyre.weights.manifest import verify

log = logging.getLogger("gyre.host")

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 10.0
TURN_S = 2.0
TURN_POLL_S = 0.05
"""A host that waits for its turn asks so soon, and each time later: many hosts ask no more often together than few."""
TURN_TTL_S = 5


def chosen_run(runs: Mapping[str, RunSpec], revisions: Mapping[str, int]) -> str | None:
    """The active run, of several the one that has waited longest, as allocator and trainer choose; without one, that
    which changed last, whose weights are still asked for by evaluations."""
    active = [name for name, spec in runs.items() if spec.state == "active"]
    if active:
        return min(active, key=lambda name: revisions.get(name, 0))
    return max(runs, key=lambda name: revisions.get(name, 0), default=None)


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


@contextlib.asynccontextmanager
async def in_turn(bus: Bus, run: str, owner: str) -> AsyncIterator[None]:
    """Hosts that serve a run load one after another, so that not all pause at once.

    A courtesy, not a lock: who waited `TURN_S`, or gets no answer from the broker, goes on.
    """
    lease = Lease(Bucket(bus, subjects.KV_LEASES, LeaseOwner), f"weights.{run}", owner, TURN_TTL_S)
    ours = False
    try:
        async with asyncio.timeout(TURN_S):
            for tried in itertools.count(1):
                ours = await lease.acquire()
                if ours:
                    break
                await asyncio.sleep(random.uniform(0.5, 1.5) * TURN_POLL_S * tried)  # noqa: S311 - no secret
    except (TimeoutError, BusError) as error:
        log.info("loading a version of %s out of turn (%r)", run, error)
    try:
        yield
    finally:
        if ours:
            await lease.release()


async def last_published(bus: Bus, run: str) -> Manifest | None:
    """What the leader says now: a follower may be seconds behind. Raises `TimeoutError` or `BusError`."""
    last = await bus.last(subjects.weights(run, "published"), subjects.WEIGHTS)
    event = last.readable() if last else None
    return event.manifest if isinstance(event, WeightsPublished) else None


async def follow_published(bus: Bus, run: str, found: Callable[[Manifest], None]) -> None:
    """Hand the last published manifest of `run`, and each later one, to `found`; until cancelled."""
    subject = subjects.weights(run, "published")
    while True:
        try:
            last = await bus.last(subject, subjects.WEIGHTS)
            break
        except BusUnavailableError as error:
            log.info("the broker does not say yet which version of %s is published: %s", run, error)
    async for stored in follow(bus, subjects.WEIGHTS, subject, start=last.sequence if last else 1):
        try:
            event = stored.event()
        except UndecodableError as error:
            log.warning("message %d of %s is passed over: %s", stored.sequence, subject, error)
            continue
        if isinstance(event, WeightsPublished):
            found(event.manifest)
