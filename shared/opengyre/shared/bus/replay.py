"""Reading a stream's past, and following it.

Our own loop, keyed by the last sequence seen: nats-py's ordered consumers are not always made anew after a loss.

Invariant: a reading `to_end` ends only when every message that the broker gave its consumer has been seen. A fetch
that times out here may have been answered all the same: what the broker has no longer pending is then on its way.

Awaits: `follow` is woken by a message or looks again within 5 s; `read` by the broker's answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, ReplayPolicy

from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.errors import BusError
from opengyre.shared.bus.promptly import promptly
from opengyre.shared.bus.stored import Stored

log = logging.getLogger("gyre.bus")

LATE = 4
"""Fetches that may pass while messages are on their way; after that they are lost, and are asked for again."""


async def read(bus: Bus, stream: str, filters: str | Sequence[str], start: int = 1) -> list[Stored]:
    """All messages under `filters` from sequence `start` up to now, in order."""
    return [message async for message in follow(bus, stream, filters, start=start, to_end=True)]


async def follow(
    bus: Bus,
    stream: str,
    filters: str | Sequence[str],
    *,
    start: int = 1,
    only_new: bool = False,
    to_end: bool = False,
    original_timing: bool = False,
    batch: int = 256,
) -> AsyncGenerator[Stored, None]:
    """Messages under `filters` in order, each once, across reconnects of the broker.

    Begins at sequence `start`, or with what comes from now on (`only_new`); ends at what is the last message now
    (`to_end`), or never. `original_timing` keeps the intervals in which they were stored.
    """
    last = (await bus.stream_info(stream)).state.last_seq if only_new or to_end else 0
    reader = _Reader(
        bus=bus,
        stream=stream,
        filters=[filters] if isinstance(filters, str) else list(filters),
        position=last + 1 if only_new else start,
        end=last if to_end else None,
        original_timing=original_timing,
        batch=1 if original_timing else batch,
    )
    while not reader.finished:
        try:
            async for stored in reader.session():
                yield stored
        except js_errors.BadRequestError as error:
            raise BusError(
                f"stream {stream} cannot be read this way ({error.description}); look at it by pages"
            ) from error
        except (js_errors.Error, nats.errors.Error) as error:
            log.info("bus: reading %s from %d goes on anew (%r)", stream, reader.position, error)
            await asyncio.sleep(0.5)


@dataclass
class _Reader:
    """Where a reader is; a session is one consumer's life, ended by a reconnect."""

    bus: Bus
    stream: str
    filters: list[str]
    position: int
    end: int | None
    original_timing: bool
    batch: int
    drained: bool = False

    @property
    def finished(self) -> bool:
        return self.end is not None and (self.drained or self.position > self.end)

    async def session(self) -> AsyncGenerator[Stored, None]:
        config = ConsumerConfig(
            filter_subjects=self.filters,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.position,
            ack_policy=AckPolicy.NONE,
            replay_policy=ReplayPolicy.ORIGINAL if self.original_timing else ReplayPolicy.INSTANT,
            inactive_threshold=60,
            mem_storage=True,
        )
        generation = self.bus.generation
        subscription = await promptly(self.bus.js.pull_subscribe("", stream=self.stream, config=config))
        seen = late = 0
        try:
            while generation == self.bus.generation and not self.finished and late < LATE:
                got = await self._fetch(subscription)
                for message in got:
                    stored = stored_message(message)
                    seen = message.metadata.sequence.consumer
                    if stored.sequence >= self.position:
                        self.position = stored.sequence + 1
                        if self.end is None or stored.sequence <= self.end:
                            yield stored
                if self.end is not None and (not got or got[-1].metadata.num_pending == 0):
                    info = await promptly(subscription.consumer_info())
                    given = info.delivered.consumer_seq if info.delivered else 0
                    self.drained = info.num_pending == 0 and given <= seen
                    late = late + 1 if given > seen else 0
        finally:
            await discard(self.bus, self.stream, subscription)

    async def _fetch(self, subscription: JetStreamContext.PullSubscription) -> list[Msg]:
        # Original timing waits as long as the recorded gap was; the server keeps the pull open only so long.
        timeout = 5.0 if self.end is None or self.original_timing else 0.5
        try:
            return await promptly(subscription.fetch(self.batch, timeout=timeout))
        except (nats.errors.TimeoutError, TimeoutError, js_errors.FetchTimeoutError):
            return []


async def discard(bus: Bus, stream: str, subscription: JetStreamContext.PullSubscription) -> None:
    """End a reader's consumer on both sides."""
    consumer = subscription._consumer  # noqa: SLF001 - the name that the server gave it; nats-py has no public way to it
    with contextlib.suppress(nats.errors.Error, js_errors.Error):
        await promptly(subscription.unsubscribe())
        if consumer:
            await promptly(bus.js.delete_consumer(stream, consumer))


def stored_message(message: Msg) -> Stored:
    """A message that was delivered to a consumer."""
    meta = message.metadata
    return Stored(
        subject=message.subject,
        sequence=meta.sequence.stream,
        payload=message.data,
        headers={str(k): str(v) for k, v in (message.headers or {}).items()},
        timestamp=meta.timestamp.timestamp(),
    )
