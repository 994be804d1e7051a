"""The trajectory service: when a group closes, its log becomes work for the trainer, and so does a member that ends
later.

No state of its own: the TRAJ stream holds everything, so any replica handles any message. What an event of the log
made of its group is a function of the log up to it (`assemble`), so each event's handler publishes what that event
caused, and what is published twice is one message (its id), or is known to the trainer by its frontier. The order is:
the events of its log that are malformed or contradict their subject, as dead letters (also where no member has a start,
so that there is nothing else to tell); the group; that it is scored; then the acknowledgement. A
deadline that passed is written into the group's log, at most once (expected last sequence 0), and is an event like an
end.

Awaits: `work` is woken by an `ended` event, an `overdue` one or `stopping`; reading a log by the broker's answers.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from starlette.routing import BaseRoute

from opengyre.proto import codec, subjects
from opengyre.proto.base import Event
from opengyre.proto.group import GroupReady
from opengyre.proto.task import GroupOverdue
from opengyre.proto.traj import Ended, Overdue, Started
from opengyre.shared.blobs import MESSAGE_LIMIT
from opengyre.shared.bulk import fill
from opengyre.shared.bus import (
    BusUnavailableError,
    Delivery,
    FencedError,
    Rejected,
    RetryLater,
    read,
    serving,
    work,
)
from opengyre.shared.lifecycle import Context
from opengyre.shared.logs import bound
from opengyre.trajectory import figures
from opengyre.trajectory.answers import Answers
from opengyre.trajectory.assemble import Assembled, LogEvent, NotWholeError, assemble
from opengyre.trajectory.faults import Fault, Log, decoded, due, misplaced, unfit

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
        width = context.settings.trajectory.concurrency
        answers = serving(
            context.bus, "trajectory", "any", Answers(context.bus, context.blobs).endpoints(), "OpenGyre trajectory"
        )
        async with answers, asyncio.TaskGroup() as tasks:
            for consumer, handler in (
                (subjects.TRAJECTORY_ENDED, self._on_ended),
                (subjects.TRAJECTORY_OVERDUE, self._on_overdue),
            ):
                tasks.create_task(
                    work(context.bus, *consumer, handler, stop=context.stopping, concurrency=width, max_deliver=15)
                )

    async def _on_ended(self, event: Event, delivery: Delivery) -> None:
        if not isinstance(event, Ended):
            raise Rejected(f"an execution's end was expected, not {type(event).__name__}")
        if (why := misplaced(event, delivery.subject)) is not None:
            raise Rejected(why)
        with bound(run=event.run, group=event.group, execution=event.execution):
            if await self._may_close(event):
                await self._make(event.run, event.group, event.execution)

    async def _on_overdue(self, event: Event, _delivery: Delivery) -> None:
        if not isinstance(event, GroupOverdue):
            raise Rejected(f"a deadline that passed was expected, not {type(event).__name__}")
        with bound(run=event.run, group=event.group):
            subject = subjects.traj(event.run, event.group, subjects.ALL, "overdue")
            try:
                await self._context.bus.append(
                    subject, Overdue(run=event.run, group=event.group), scope=subject, last=0
                )
            except FencedError:
                log.debug("the mark is there already")
            except BusUnavailableError as error:
                raise RetryLater(str(error)) from error
            await self._make(event.run, event.group, None)

    async def _may_close(self, ended: Ended) -> bool:
        """Whether this end may have made something of its group; most ends have not, and no log is read for them."""
        bus = self._context.bus
        found = await bus.subjects(subjects.TRAJ, subjects.traj(ended.run, ended.group, "*", "*"))
        ends = sum(subjects.traj(ended.run, ended.group, member, "ended") in found for member in ended.members)
        if subjects.traj(ended.run, ended.group, subjects.ALL, "overdue") in found:
            return True
        first = await bus.last(subjects.traj(ended.run, ended.group, ended.execution, "started"), subjects.TRAJ)
        try:
            started = first.event() if first is not None else None
        except codec.UndecodableError:
            started = None
        # Without a start that can be read the others' starts tell, when the log is read.
        close_at = started.dispatch.close_at if isinstance(started, Started) else 0
        if close_at is not None:
            return ends >= min(close_at, len(ended.members))
        if ends < len(ended.members):
            return False
        # Members that end together all find that all have ended; the last of them closes the group.
        last = await bus.last(subjects.traj(ended.run, ended.group, "*", "ended"), subjects.TRAJ)
        return last is None or last.subject == subjects.traj(ended.run, ended.group, ended.execution, "ended")

    async def _make(self, run: str, group: str, cause: str | None) -> None:
        """Publish what `cause` (an execution's end; None: the mark) made of the group, if it made something."""
        started = asyncio.get_running_loop().time()
        stored = await read(self._context.bus, subjects.TRAJ, subjects.traj(run, group, "*", "*"))
        log_of = await asyncio.to_thread(decoded, stored)
        events = await fill(self._context.blobs.get, log_of.events)
        faults = await asyncio.to_thread(_faults, log_of, events)
        try:
            parts = await asyncio.to_thread(assemble, events)
        except NotWholeError as error:
            if cause is None:
                return  # No member has begun; the mark is there when they end.
            # No part will tell of them.
            await self._tell(faults)
            raise Rejected(f"the log is not complete: {error}") from error
        for part in parts:
            if part.cause == cause:
                try:
                    await self._publish(part, faults)
                except BusUnavailableError as error:
                    raise RetryLater(str(error)) from error
                figures.SECONDS.observe(asyncio.get_running_loop().time() - started)

    async def _publish(self, assembled: Assembled, faults: Sequence[Fault]) -> None:
        context, scored = self._context, assembled.scored
        await self._tell(due(faults, assembled))
        if assembled.ready is not None:
            ready = await self._packed(assembled.ready)
            await context.bus.publish(subjects.group_ready(scored.run), ready)
        await context.bus.publish(subjects.task(scored.run, scored.task, "scored"), scored)
        figures.count(assembled)
        self._groups += not scored.late
        context.gauges["groups_scored"] = self._groups
        what = f"{scored.outcome}, late" if scored.late else scored.outcome
        log.info("group %s: %s, scores %s", scored.group, what, sorted(scored.scores.values()))

    async def _tell(self, faults: Sequence[Fault]) -> None:
        for found in faults:
            letter = found.letter
            log.warning("event %d of TRAJ is malformed: %s", letter.origin_sequence, letter.error)
            try:
                await self._context.bus.publish(subjects.dlq(*subjects.TRAJECTORY_ENDED), letter)
            except BusUnavailableError as error:
                raise RetryLater(str(error)) from error
            figures.MALFORMED.inc()

    async def _packed(self, ready: GroupReady) -> GroupReady:
        """With its members as a blob when they are too large for a message."""
        members = await asyncio.to_thread(msgspec.json.encode, ready.members)
        if len(members) <= MESSAGE_LIMIT:
            return ready
        return msgspec.structs.replace(ready, members=(), blob=await self._context.blobs.put(members))


def _faults(log_of: Log, events: Sequence[LogEvent]) -> list[Fault]:
    return [*log_of.faults, *unfit(log_of, events)]
