"""Taking messages from durable pull consumers, for work of milliseconds or hours.

Invariants:
- One message is pulled at a time, when there is a free place for it: nothing is buffered while its ack wait burns.
- A pull request never waits longer than 5 s: it dies silently with its server.
- A puller that is closed withdraws its waiting pull request and gives back what arrived meanwhile, also what a `take`
  had in its hands when it was cancelled; one that is not closed hands that out by the next `take`.
- A message is acknowledged after its handler returned, and kept ours by `in_progress` meanwhile. Handlers must be
  idempotent: acknowledged messages do come back after a crash of the broker.
- What cannot be handled becomes a dead letter with its reason, at once or after the last delivery.

Awaits: `take` is woken by a message or by its timeout; `work` by a message, a free place or `stop`.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors

from opengyre.proto import codec, subjects
from opengyre.proto.base import Event
from opengyre.proto.dlq import DeadLetter
from opengyre.shared import tracing
from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.errors import Abandoned, BusUnavailableError, NotBootstrappedError, Rejected, RetryLater
from opengyre.shared.bus.promptly import promptly

log = logging.getLogger("gyre.bus")

FETCH_S = 5.0
CLOSE_S = 1
"""Seconds that a closing puller waits for the server, and for a fetch to obey its cancellation."""
LARGE = 1 << 20
MANY_PLACES = 16
PULLERS = 4
"""Of a worker with `MANY_PLACES` or more."""
HOPELESS = 10_000
"""Deliveries after which a message is given up although no failure was seen: it ends the process that handles it."""


class Delivery:
    """One delivery of a message to us."""

    def __init__(self, bus: Bus, message: Msg, consumer: str) -> None:
        meta = message.metadata
        self._bus = bus
        self._message = message
        self.consumer = consumer
        self.stream = meta.stream
        self.subject = message.subject
        self.sequence = meta.sequence.stream
        self.deliveries = meta.num_delivered or 1
        self.headers = {str(k): str(v) for k, v in (message.headers or {}).items()}
        self.payload = message.data

    async def event(self) -> Event:
        """Decode it, off the loop when it is large; raises `codec.UndecodableError`."""
        kind = self.headers.get("Gyre-Type")
        if len(self.payload) > LARGE:
            return await asyncio.to_thread(codec.decode, self.payload, kind)
        return codec.decode(self.payload, kind)

    async def ack(self) -> None:
        await self._answer(b"+ACK")

    async def retry(self, delay_s: float = 0.0) -> None:
        await self._answer(b'-NAK {"delay": %d}' % int(delay_s * 1e9))

    @contextlib.asynccontextmanager
    async def back_if_cancelled(self) -> AsyncIterator[Self]:
        """Give the message back where the block is cancelled: at once, and not after its ack wait."""
        try:
            yield self
        except asyncio.CancelledError:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.retry()
            raise

    async def in_progress(self) -> None:
        await self._answer(b"+WPI")

    async def reject(self, reason: str) -> None:
        """Never deliver it again; it is kept as a dead letter with the reason."""
        await self._bus.publish(
            subjects.dlq(self.stream, self.consumer),
            DeadLetter(
                origin_stream=self.stream,
                consumer=self.consumer,
                origin_subject=self.subject,
                origin_sequence=self.sequence,
                deliveries=self.deliveries,
                error=reason,
                payload=self.payload[: 256 << 10].decode("utf-8", "replace"),
            ),
        )
        # Bytes of the reason beyond ASCII have no place in a protocol line.
        await self._answer(b"+TERM " + reason.encode("ascii", "replace")[:200].replace(b"\n", b" "))

    async def _answer(self, verdict: bytes) -> None:
        if self._message.reply:
            await promptly(self._bus.client.publish(self._message.reply, verdict))

    @contextlib.asynccontextmanager
    async def held(self, every_s: float) -> AsyncIterator[Self]:
        """Keep the message ours for as long as the block lasts, by `in_progress` every `every_s` seconds."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(every_s)
                with contextlib.suppress(nats.errors.Error):
                    await self.in_progress()

        beating = asyncio.create_task(beat())
        try:
            yield self
        finally:
            beating.cancel()
            await asyncio.wait([beating])


def _failed(fetching: "asyncio.Task[list[Msg]]") -> bool:
    return fetching.done() and (fetching.cancelled() or fetching.exception() is not None)


class Puller:
    """A bound durable consumer. Made by `pulling`."""

    def __init__(self, bus: Bus, consumer: str, subscription: JetStreamContext.PullSubscription) -> None:
        self._bus = bus
        self._consumer = consumer
        self._subscription = subscription
        self._fetching: asyncio.Task[list[Msg]] | None = None
        """Until its message is handed out."""
        self._withdrawn = False

    async def take(self, timeout_s: float = FETCH_S) -> Delivery | None:
        """The next message, or None when there is none in `timeout_s` (5 s at most)."""
        if self._fetching is None or _failed(self._fetching):
            self._fetching = asyncio.create_task(self._subscription.fetch(1, timeout=min(timeout_s, FETCH_S)))
        try:
            # Where we are cancelled it goes on, until the next `take`, or `close`, looks at what it got.
            got = await asyncio.shield(self._fetching)
        except (nats.errors.TimeoutError, TimeoutError, js_errors.FetchTimeoutError):
            return None
        except (js_errors.ServiceUnavailableError, js_errors.APIError, nats.errors.Error) as error:
            log.warning("bus: consumer %s: %r", self._consumer, error)
            await asyncio.sleep(0.5)
            return None
        self._fetching = None
        return Delivery(self._bus, got[0], self._consumer) if got else None

    async def withdraw(self) -> None:
        """Take back the pull request that waits. What the server had sent before is here afterwards, and `close` gives
        it back: the client's own `unsubscribe` would drop it, and it would come again only after its ack wait."""
        client = self._bus.client
        if client.is_connected and not self._withdrawn:
            self._withdrawn = True
            with contextlib.suppress(nats.errors.Error):
                await promptly(client._send_unsubscribe(self._subscription._sub._id))  # noqa: SLF001 - see above
                await promptly(client.flush(timeout=CLOSE_S))

    async def close(self) -> None:
        subscription = self._subscription
        await self.withdraw()
        with contextlib.suppress(nats.errors.Error):
            await promptly(subscription.unsubscribe())
        queue = subscription._sub._pending_queue  # noqa: SLF001 - nats-py has no public way to give messages back
        for message in [*await self._fetched(), *(queue.get_nowait() for _ in range(queue.qsize()))]:
            if message.reply.startswith("$JS.ACK"):
                with contextlib.suppress(nats.errors.Error):
                    await promptly(message.nak())

    async def _fetched(self) -> list[Msg]:
        """What a cancelled `take` got all the same."""
        fetching, self._fetching = self._fetching, None
        if fetching is None:
            return []
        fetching.cancel()
        await asyncio.wait([fetching], timeout=CLOSE_S)
        if not fetching.done() or fetching.cancelled() or fetching.exception() is not None:
            return []
        return fetching.result()


@contextlib.asynccontextmanager
async def pulling(bus: Bus, stream: str, consumer: str) -> AsyncIterator[Puller]:
    """Bind to a durable that the bootstrap made."""
    try:
        await promptly(bus.js.consumer_info(stream, consumer))
    except js_errors.NotFoundError as error:
        raise NotBootstrappedError(f"consumer {consumer} of stream {stream} is missing: run the bootstrap") from error
    puller = Puller(bus, consumer, await promptly(bus.js.pull_subscribe_bind(consumer=consumer, stream=stream)))
    try:
        yield puller
    finally:
        await puller.close()


Handler = Callable[[Event, Delivery], Awaitable[None]]


async def work(
    bus: Bus,
    stream: str,
    consumer: str,
    handler: Handler,
    *,
    stop: asyncio.Event,
    concurrency: int = 1,
    keep_every_s: float = 4.0,
    max_deliver: int = 5,
    room: asyncio.Semaphore | None = None,
) -> None:
    """Run `handler` on each message until `stop`, then finish what is running and return.

    `handler` may raise `RetryLater`, `Rejected` or `Abandoned`; any other exception is logged and the message is
    delivered again, until `max_deliver` deliveries have failed: then it is a dead letter. `room` may be given to share
    places.
    """
    failures: Counter[int] = Counter()
    places = room or asyncio.Semaphore(concurrency)

    async def handle(delivery: Delivery) -> None:
        try:
            # Another replica is there.
            async with delivery.back_if_cancelled(), delivery.held(keep_every_s):
                await _judge(delivery, handler, max_deliver, failures)
        except (BusUnavailableError, nats.errors.Error) as error:
            # The verdict could not be told. The message comes again; others that are being handled must not suffer.
            log.warning("bus: no answer could be given for %s: %r", delivery.subject, error)
        finally:
            places.release()

    async def pull(puller: Puller, tasks: asyncio.TaskGroup) -> None:
        while not stop.is_set() and not bus.lost.is_set():
            if not await _acquired(places, stop):
                continue
            delivery = None
            try:
                delivery = await puller.take()
            finally:
                if delivery is None:
                    places.release()
            if delivery is None:
                continue
            if stop.is_set():
                places.release()
                await delivery.retry()
            else:
                tasks.create_task(handle(delivery))

    # Each pulls one message at a time, and a pull costs a round trip: many places are not filled by one alone.
    hands = PULLERS if concurrency >= MANY_PLACES else 1
    async with contextlib.AsyncExitStack() as bound:
        # Bound outside the group, which would wrap what is raised for a consumer that is not there.
        pullers = [await bound.enter_async_context(pulling(bus, stream, consumer)) for _ in range(hands)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for puller in pullers:
                    tasks.create_task(pull(puller, tasks))
        finally:
            # All of them before the first gives anything back, which another of ours would be sent.
            for puller in pullers:
                await puller.withdraw()


async def _acquired(places: asyncio.Semaphore, stop: asyncio.Event) -> bool:
    """Take a place, looking up every second whether we are to stop."""
    try:
        async with asyncio.timeout(1.0):
            await places.acquire()
    except TimeoutError:
        return False
    if stop.is_set():
        places.release()
        return False
    return True


async def _judge(delivery: Delivery, handler: Handler, max_deliver: int, failures: Counter[int]) -> None:
    if delivery.deliveries >= HOPELESS:
        await delivery.reject(f"delivered {delivery.deliveries} times and never finished")
        return
    try:
        event = await delivery.event()
        with tracing.consuming(delivery.subject, delivery.headers):
            await handler(event, delivery)
    except codec.UndecodableError as error:
        log.warning("bus: undecodable message on %s: %s", delivery.subject, error)
        await delivery.reject(f"undecodable: {error}")
    except Rejected as error:
        log.warning("bus: rejected message on %s: %s", delivery.subject, error)
        await delivery.reject(str(error))
    except Abandoned as error:
        log.info("bus: %s is left to its new owner: %s", delivery.subject, error)
    except RetryLater as error:
        log.info("bus: %s again in %.1f s: %s", delivery.subject, error.delay_s, error)
        await delivery.retry(error.delay_s)
    except Exception as error:
        failures[delivery.sequence] += 1
        failed = failures[delivery.sequence]
        log.exception("bus: handler failed on %s (%d times)", delivery.subject, failed)
        if failed < max_deliver:
            await delivery.retry(min(0.2 * 2**failed, 10.0))
            return
        await delivery.reject(f"failed {failed} times: {error!r}")
    else:
        await delivery.ack()
    failures.pop(delivery.sequence, None)
