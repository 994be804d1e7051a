"""The trajectory service: when the last member of a group has ended, its log becomes a group for the trainer.

No state of its own: the TRAJ stream holds everything, so any replica handles any message, and a group that is
published twice is one message (its id), or is known to the trainer by its frontier. The order is: the group first,
then that it is scored, then the acknowledgement.

Awaits: `work` is woken by an `ended` event or by `stopping`; reading a log by the broker's answers.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from starlette.routing import BaseRoute

from opengyre.proto import codec, subjects
from opengyre.proto.base import Event
from opengyre.proto.group import GroupReady
from opengyre.proto.traj import Ended, TrajEvent
from opengyre.shared.blobs import MESSAGE_LIMIT
from opengyre.shared.bus import BusUnavailableError, Delivery, Rejected, RetryLater, Stored, read, work
from opengyre.shared.lifecycle import Context
from opengyre.shared.logs import bound
from opengyre.trajectory import figures
from opengyre.trajectory.assemble import Assembled, NotWholeError, assemble

log = logging.getLogger("gyre.trajectory")


class Trajectory:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._groups = 0

    def routes(self) -> Sequence[BaseRoute]:
        return ()

    async def run(self) -> None:
        """Assemble groups until the service stops."""
        context = self._context
        context.missing = None
        await work(
            context.bus,
            *subjects.TRAJECTORY_ENDED,
            self._on_ended,
            stop=context.stopping,
            concurrency=context.settings.trajectory.concurrency,
            max_deliver=15,
        )

    async def _on_ended(self, event: Event, _delivery: Delivery) -> None:
        if not isinstance(event, Ended):
            raise Rejected(f"an execution's end was expected, not {type(event).__name__}")
        with bound(run=event.run, group=event.group, execution=event.execution):
            if not await self._whole(event):
                return
            started = asyncio.get_running_loop().time()
            stored = await read(self._context.bus, subjects.TRAJ, subjects.traj(event.run, event.group, "*", "*"))
            try:
                assembled = await asyncio.to_thread(_assemble, stored)
            except NotWholeError as error:
                raise Rejected(f"the log is not complete: {error}") from error
            try:
                await self._publish(assembled)
            except BusUnavailableError as error:
                raise RetryLater(str(error)) from error
            figures.SECONDS.observe(asyncio.get_running_loop().time() - started)

    async def _whole(self, ended: Ended) -> bool:
        """Whether every member has ended; the last one's event is the one that finds it so."""
        pattern = subjects.traj(ended.run, ended.group, "*", "ended")
        found = await self._context.bus.subjects(subjects.TRAJ, pattern)
        return all(subjects.traj(ended.run, ended.group, member, "ended") in found for member in ended.members)

    async def _publish(self, assembled: Assembled) -> None:
        context, scored = self._context, assembled.scored
        if assembled.ready is not None:
            ready = await self._packed(assembled.ready)
            await context.bus.publish(subjects.group_ready(scored.run), ready)
        await context.bus.publish(subjects.task(scored.run, scored.task, "scored"), scored)
        figures.count(assembled)
        self._groups += 1
        context.gauges["groups_scored"] = self._groups
        log.info("group %s: %s, scores %s", scored.group, scored.outcome, sorted(scored.scores.values()))

    async def _packed(self, ready: GroupReady) -> GroupReady:
        """With its members as a blob when they are too large for a message."""
        members = await asyncio.to_thread(msgspec.json.encode, ready.members)
        if len(members) <= MESSAGE_LIMIT:
            return ready
        return msgspec.structs.replace(ready, members=(), blob=await self._context.blobs.put(members))


def _assemble(stored: Sequence[Stored]) -> Assembled:
    events: list[TrajEvent] = []
    for message in stored:
        try:
            event = message.event()
        except codec.UndecodableError as error:
            # Its place in the log stays empty, which makes its execution a broken log, not the group.
            log.warning("undecodable event %d of TRAJ: %s", message.sequence, error)
            continue
        if isinstance(event, TrajEvent):
            events.append(event)
    return assemble(events)
