"""Looking at a stream in bounded pieces, for callers who must not wait long or read without end.

Invariants: a page holds at most `limit` messages and about `MAX_BYTES`, says how many there are beyond it, and an
empty one is known at once. What the client library raises becomes an error of ours (`reachable`).

Awaits: the broker's answers, within the bound of `reachable`.
"""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import nats.errors
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from opengyre.shared.bus.connection import Bus, stored_of
from opengyre.shared.bus.errors import BusUnavailableError, NotBootstrappedError
from opengyre.shared.bus.promptly import promptly
from opengyre.shared.bus.replay import discard, stored_message
from opengyre.shared.bus.stored import Stored

MAX_BYTES = 16 << 20
BATCH = 64


@dataclass(frozen=True)
class Page:
    messages: list[Stored]
    left: int
    """Matching messages after the page's last one."""


@contextlib.asynccontextmanager
async def reachable(bus: Bus, timeout_s: float = 10.0) -> AsyncIterator[None]:
    """Turn every way in which the broker can be away into `BusUnavailableError`, within `timeout_s`."""
    try:
        if not bus.connected:
            raise BusUnavailableError(f"NATS at {bus.url} does not answer")
        async with asyncio.timeout(timeout_s):
            yield
    except js_errors.NotFoundError as error:
        raise NotBootstrappedError("a stream, consumer or bucket is missing: run the bootstrap") from error
    except (TimeoutError, nats.errors.Error) as error:
        if isinstance(error, js_errors.APIError) and not isinstance(error, js_errors.ServiceUnavailableError):
            raise
        raise BusUnavailableError(f"NATS at {bus.url} does not answer ({error!r})") from error


async def page(
    bus: Bus,
    stream: str,
    filters: str | Sequence[str],
    *,
    start: int = 1,
    limit: int = 100,
    since: datetime.datetime | None = None,
    last_per_subject: bool = False,
) -> Page:
    """Messages under `filters` from sequence `start` on, in order.

    With `since` those from that time on, with `last_per_subject` only the last message of each subject, and `start` is
    not heeded then. `limit` 0 only counts. Not for work queues, which take no second reader (`next_message`).
    Raises what the client raises; use it within `reachable`.
    """
    policy = DeliverPolicy.BY_START_SEQUENCE
    if last_per_subject:
        policy = DeliverPolicy.LAST_PER_SUBJECT
    elif since is not None:
        policy = DeliverPolicy.BY_START_TIME
    config = ConsumerConfig(
        filter_subjects=[filters] if isinstance(filters, str) else list(filters),
        deliver_policy=policy,
        opt_start_seq=max(1, start) if policy is DeliverPolicy.BY_START_SEQUENCE else None,
        opt_start_time=since if policy is DeliverPolicy.BY_START_TIME else None,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=30,
        mem_storage=True,
    )
    subscription = await promptly(bus.js.pull_subscribe("", stream=stream, config=config))
    try:
        pending = (await promptly(subscription.consumer_info())).num_pending or 0
        messages = await _take(subscription, min(limit, pending))
    finally:
        await discard(bus, stream, subscription)
    return Page(messages, pending - len(messages))


async def _take(subscription: JetStreamContext.PullSubscription, wanted: int) -> list[Stored]:
    messages: list[Stored] = []
    size = 0
    while len(messages) < wanted and size < MAX_BYTES:
        got = await promptly(subscription.fetch(min(BATCH, wanted - len(messages)), timeout=5))
        messages += [stored_message(message) for message in got]
        size += sum(len(message.data) for message in got)
    return messages


async def count(bus: Bus, stream: str, filters: str | Sequence[str], *, distinct: bool = False) -> int:
    """How many messages (or, with `distinct`, subjects) are under `filters`; nothing is read."""
    return (await page(bus, stream, filters, limit=0, last_per_subject=distinct)).left


async def message_at(bus: Bus, stream: str, sequence: int) -> Stored | None:
    """The message with this sequence, read from the leader."""
    try:
        return stored_of(await promptly(bus.js.get_msg(stream, sequence)))
    except js_errors.NotFoundError:
        return None


async def next_message(bus: Bus, stream: str, subject: str, sequence: int) -> Stored | None:
    """The first message under `subject` at `sequence` or later, read from the leader; it is not taken from a queue."""
    try:
        return stored_of(await promptly(bus.js.get_msg(stream, sequence, subject, next=True)))
    except js_errors.NotFoundError:
        return None


async def remove(bus: Bus, stream: str, sequence: int) -> bool:
    """Remove a message from a stream that allows it; whether it was there."""
    try:
        return bool(await promptly(bus.js.delete_msg(stream, sequence)))
    except js_errors.NotFoundError:
        return False
    except js_errors.APIError as error:
        if error.err_code == 10043:  # "no message found", which the server gives as a general error
            return False
        raise
