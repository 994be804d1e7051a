"""The log of one run as the allocator follows it: tasks, weights, updates, and which executions began and ended.

Invariants: `history` returns all that was in the log when it began, `follow` hands on all that came after, in the
order of each stream; a broken payload is logged and left out.

Awaits: the broker's answers while reading; then each message, or 5 s at most until the follower looks again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from opengyre.proto import codec, subjects
from opengyre.proto.base import Event
from opengyre.shared.bus import Bus, Stored, follow, read

log = logging.getLogger("gyre.allocator")

FOLLOWED = ("started", "ended")
"""Of an execution."""
MANY_GROUPS = 200
"""Live groups beyond which starts and ends of all executions are read, instead of those of the live groups."""


class Feed:
    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._filters: dict[str, list[str]] = {
            subjects.TASKS: [subjects.task(run, "*", "*")],
            subjects.WEIGHTS: [subjects.weights(run, "published")],
            subjects.UPDATES: [subjects.update(run, "*")],
            subjects.TRAJ: [subjects.traj(run, "*", "*", event) for event in FOLLOWED],
        }
        self._next: dict[str, int] = {}
        self.queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=4096)

    async def history(self, live: Iterable[str]) -> list[Event]:
        """All events of the run up to now; of executions, what those of the groups `live` did."""
        groups = list(live)
        narrow = dict(self._filters)
        if len(groups) <= MANY_GROUPS:
            narrow[subjects.TRAJ] = [
                subjects.traj(self._run, group, "*", event) for group in groups for event in FOLLOWED
            ]
        parts = await asyncio.gather(*(self._past(stream, patterns) for stream, patterns in narrow.items()))
        return [event for part in parts for event in part]

    async def _past(self, stream: str, patterns: list[str]) -> list[Event]:
        last = (await self._bus.stream_info(stream)).state.last_seq
        found = await read(self._bus, stream, patterns) if patterns and last else []
        # What came while we read is handed on twice, which changes nothing.
        self._next[stream] = last + 1
        return [event for stored in found if (event := _event(stored)) is not None]

    async def follow(self, stream: str) -> AsyncIterator[Event]:
        """What comes after the history, without end."""
        async for stored in follow(self._bus, stream, self._filters[stream], start=self._next[stream]):
            event = _event(stored)
            if event is not None:
                yield event

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._filters)


def _event(stored: Stored) -> Event | None:
    try:
        return stored.event()
    except codec.UndecodableError as error:
        log.warning("%s %d is left out: %s", stored.subject, stored.sequence, error)
        return None
