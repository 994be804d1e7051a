"""Groups on their way to updates: what comes from the work queue is looked at, settled or given up.

What cannot be trained leaves training at once, with its reason on the TASKS stream, so that the books balance.

Awaits: `take` is woken by a message or looks up within its bound.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from opengyre.proto import codec, subjects
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupConsumed
from opengyre.shared.blobs import BlobMissingError, Blobs
from opengyre.shared.bus import Bucket, Bus, Delivery, Puller
from opengyre.trainer import figures
from opengyre.trainer.books import Held, fault_of
from opengyre.trainer.frontier import Frontier
from opengyre.trainer.store import CheckpointError, Record

log = logging.getLogger("gyre.trainer")

LOOK_S: Final = 5.0


LastCommit = Callable[[str], Awaitable[Record | None]]


class Intake:
    """Takes groups of one run, or of none."""

    def __init__(self, bus: Bus, blobs: Blobs, puller: Puller, last_commit: LastCommit) -> None:
        """`last_commit`: reads the last record of any run."""
        self._last_commit = last_commit
        self._bus = bus
        self._blobs = blobs
        self._puller = puller
        self._runs = Bucket(bus, subjects.KV_RUNS, RunSpec)

    async def take(self, seconds: float = LOOK_S) -> tuple[Delivery, GroupReady] | None:
        """The next group, or None when there was none, or none that can be read."""
        delivery = await self._puller.take(seconds)
        if delivery is None:
            return None
        async with delivery.back_if_cancelled():
            try:
                event = await delivery.event()
            except codec.UndecodableError as error:
                await delivery.reject(f"undecodable: {error}")
                return None
            if not isinstance(event, GroupReady):
                await delivery.reject(f"a group was expected, not {type(event).__name__}")
                return None
        return delivery, event

    async def members(self, ready: GroupReady) -> tuple[Member, ...]:
        """Raises `BlobMissingError` or `msgspec.DecodeError`."""
        if ready.blob is None:
            return ready.members
        content = await self._blobs.get(ready.blob)
        return await asyncio.to_thread(msgspec.json.decode, content, type=tuple[Member, ...])

    async def check(self, ready: GroupReady, *, vocabulary: int, context: int, version: int) -> Held | str:
        """The group with its members, or why it cannot be trained at the trainer's `version`."""
        try:
            members = await self.members(ready)
        except BlobMissingError as error:
            return f"its members are lost: {error}"
        except msgspec.DecodeError as error:
            return f"its members cannot be read: {error}"
        held = Held(ready, members)
        fault = await asyncio.to_thread(fault_of, held, vocabulary=vocabulary, context=context, version=version)
        return fault if fault is not None else held

    async def drop(self, ready: GroupReady, executions: tuple[str, ...], reason: str, version: int) -> None:
        """Tell that these executions left training. `version`: the trainer's, `v_t`."""
        consumed = GroupConsumed(
            run=ready.run, task=ready.task, group=ready.group, outcome="dropped", reason=reason, version=version,
            executions=executions,
        )  # fmt: skip
        await self._bus.publish(subjects.task(ready.run, ready.task, "consumed"), consumed)
        figures.DROPPED.labels(reason).inc(max(1, len(executions)))

    async def forget(self, ready: GroupReady) -> None:
        """Remove the members of a group that left the queue; the log of its executions makes them again."""
        if ready.blob is not None:
            await self._blobs.discard(ready.blob)

    async def settle(self, delivery: Delivery, ready: GroupReady) -> None:
        """A group of a run that is not trained now: it waits, or leaves training if its run has ended."""
        found = await self._runs.get(ready.run)
        try:
            record = await self._last_commit(ready.run)
        except CheckpointError as error:
            # What was consumed of it is not known; and another run's checkpoint must not stop the one that is trained.
            log.error("group %s waits: %s", ready.group, error)  # noqa: TRY400 - a known fault
            await delivery.retry(LOOK_S)
            return
        if found is None:
            await delivery.reject(f"there is no run {ready.run}")
        elif found[0].state == "active" and not (record is not None and record.finished):
            await delivery.retry(1.0)
        else:
            frontier = Frontier(record.frontier, record.partial) if record is not None else Frontier()
            names = ready.executions or tuple(member.execution for member in ready.members)
            left = tuple(execution for execution in names if execution not in frontier)
            if left or not names:
                reason = f"run_{'finished' if found[0].state == 'active' else found[0].state}"
                await self.drop(ready, left, reason, max(record.version if record else 0, ready.version))
            await delivery.ack()
            await self.forget(ready)
