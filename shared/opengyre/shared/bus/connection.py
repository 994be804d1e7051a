"""The connection to NATS and what is done with single messages: publish, append, read.

Invariants:
- Every publish carries a message id made from the event's identity; an in-doubt publish is repeated with the same id.
- A message that would not fit is refused here: the server would close the connection for good.
- Callbacks never raise: they run on the read loop.
- `lost` is set when the connection is closed for good; the process then exits and its supervisor starts it again.

Awaits: `publish` and `append` are woken by the broker's acknowledgement or their timeout; `reconnected` by the
reconnect callback.
"""

import asyncio
import contextlib
import datetime
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import RawStreamMsg, StreamInfo

from opengyre.proto import codec
from opengyre.proto.base import Event, tag_of
from opengyre.shared import tracing
from opengyre.shared.bus.errors import BusUnavailableError, FencedError, QueueFullError, TooLargeError
from opengyre.shared.bus.promptly import promptly
from opengyre.shared.bus.stored import Stored
from opengyre.shared.masked import masked

log = logging.getLogger("gyre.bus")

Answer = TypeVar("Answer")

ATTEMPTS = 12
"""About ten seconds where the answer is at once that nobody is there: a cluster needs up to six to replace a leader."""
WRONG_LAST_SEQUENCE = {10071, 10164}
QUEUE_FULL = {10077}
_TRANSIENT = (
    nats.errors.TimeoutError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    js_errors.NoStreamResponseError,
    js_errors.ServiceUnavailableError,
)


class _Client(Client):
    """nats-py's, whose reader outlives a flush that was given up: the answer to it has nobody to go to."""

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()  # answers come in the order of the questions
        await super()._process_pong()


class Bus:
    """A connection that services share. Use as `async with Bus(url, name) as bus`; `url` may be several, by commas."""

    def __init__(self, url: str, name: str, *, connect_timeout_s: float = 30.0, **options: Any) -> None:
        self.url = masked(url)
        """As it may be shown, in a message or a log."""
        self._servers = [one.strip() for one in url.split(",")]
        self.name = name
        self.lost = asyncio.Event()
        self.generation = 0
        """Counts reconnects, so that watchers rebuild themselves."""
        self._connect_timeout_s = connect_timeout_s
        self._options = options
        self._regenerated = asyncio.Event()
        self.client: Client
        self.js: JetStreamContext

    async def __aenter__(self) -> Self:
        async def on_error(error: Exception) -> None:
            log.warning("bus: %r", error)

        async def on_closed() -> None:
            self.lost.set()

        async def on_reconnected() -> None:
            self.generation += 1
            self._regenerated.set()
            self._regenerated = asyncio.Event()

        async with asyncio.timeout(self._connect_timeout_s):
            while True:
                try:
                    self.client = _Client()
                    await self.client.connect(
                        self._servers,
                        name=self.name,
                        connect_timeout=5,
                        allow_reconnect=True,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.25,  # type: ignore[arg-type]  # it is slept for, whole or not
                        ping_interval=10,
                        max_outstanding_pings=2,
                        pending_size=32 << 20,
                        error_cb=on_error,
                        closed_cb=on_closed,
                        reconnected_cb=on_reconnected,
                        **self._options,
                    )
                    break
                except (OSError, nats.errors.NoServersError, nats.errors.TimeoutError) as error:
                    log.info("bus: %s does not answer yet (%r)", self.url, error)
                    await asyncio.sleep(0.25)
        self.js = self.client.jetstream(timeout=5)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.client.is_closed:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(5):
                await promptly(self.client.drain() if self.client.is_connected else self.client.close())

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    async def reconnected(self, timeout_s: float) -> bool:
        """Wait for the next reconnect, `timeout_s` at most; whether there was one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._regenerated.wait()
                return True
        return False

    async def round_trip(self, timeout_s: float = 2.0) -> bool:
        """Whether the broker answers now: liveness, which the client's flags do not tell."""
        try:
            async with asyncio.timeout(timeout_s):
                await promptly(self.client.flush())
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def publish(self, subject: str, event: Event, *, attempts: int = ATTEMPTS) -> int:
        """Store `event` once; return its sequence in the stream.

        Raises `TooLargeError`, `QueueFullError` when a bounded stream is full, `BusUnavailableError` when the broker
        does not answer in `attempts` tries.
        """
        return await self.publish_raw(subject, codec.encode(event), event.event_id(), tag_of(event), attempts=attempts)

    async def append(self, subject: str, event: Event, *, scope: str, last: int, attempts: int = ATTEMPTS) -> int:
        """Store `event` only if `last` is the sequence of the last message under `scope` (0: there is none).

        This is the lock of an execution's log: raises `FencedError` when another writer appended first.
        """
        headers = {
            "Nats-Expected-Last-Subject-Sequence": str(last),
            "Nats-Expected-Last-Subject-Sequence-Subject": scope,
        }
        payload = codec.encode(event)
        return await self.publish_raw(subject, payload, event.event_id(), tag_of(event), headers, scope, attempts)

    async def publish_raw(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        kind: str,
        headers: dict[str, str] | None = None,
        scope: str | None = None,
        attempts: int = ATTEMPTS,
    ) -> int:
        """`publish` and `append` for a payload that is encoded already."""
        head = {"Nats-Msg-Id": message_id, "Gyre-Type": kind, "Content-Type": "application/json", **(headers or {})}
        tracing.inject(head)
        self._guard_size(subject, payload, head)
        for attempt in range(attempts):
            try:
                return (await promptly(self.js.publish(subject, payload, headers=dict(head)))).seq
            except js_errors.APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    # The server checks the expectation before the id, so our own in-doubt attempt looks like a rival.
                    mine = await self._last_is_mine(scope or subject, message_id)
                    if mine is not None:
                        return mine
                    raise FencedError(f"{subject}: another writer appended first") from error
                if error.err_code in QUEUE_FULL:
                    raise QueueFullError(f"{subject}: the stream is full") from error
                if not isinstance(error, _TRANSIENT):
                    raise
                failure: Exception = error
            except _TRANSIENT as error:
                failure = error
            log.info("bus: publish to %s is in doubt (%r), attempt %d", subject, failure, attempt + 1)
            await asyncio.sleep(_backoff(attempt))
        raise BusUnavailableError(f"{subject}: not acknowledged in {attempts} attempts")

    async def send(self, subject: str, payload: bytes) -> None:
        """A message of no importance on core NATS: not stored, not acknowledged."""
        await promptly(self.client.publish(subject, payload))

    def _guard_size(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        size = len(payload) + sum(len(key) + len(value) + 4 for key, value in headers.items()) + 14
        if size > self.client.max_payload:
            raise TooLargeError(
                f"{subject}: {size} bytes are more than the broker's max_payload of {self.client.max_payload}; "
                "store a blob and send its reference"
            )

    async def _last_is_mine(self, scope: str, message_id: str) -> int | None:
        last = await self.last(scope)
        if last is not None and last.message_id == message_id:
            return last.sequence
        return None

    async def last(self, subject: str, stream: str | None = None) -> Stored | None:
        """The last message under `subject` (wildcards allowed), read from the leader: never stale."""
        try:
            name = stream or await self.ask(lambda: self.js.find_stream_name_by_subject(subject))
            return stored_of(await self.ask(lambda: self.js.get_last_msg(name, subject)))
        except js_errors.NotFoundError:
            return None

    async def stream_info(self, stream: str, subjects_filter: str | None = None) -> StreamInfo:
        return await self.ask(lambda: self.js.stream_info(stream, subjects_filter))

    async def ask(self, question: Callable[[], Coroutine[Any, Any, Answer]], attempts: int = ATTEMPTS) -> Answer:
        """Repeat a question that may be repeated until the broker answers; raises `BusUnavailableError`.

        In a cluster that has just found its leader, requests are lost for a moment.
        """
        for attempt in range(attempts - 1):
            with contextlib.suppress(*_TRANSIENT):
                return await promptly(question())
            await asyncio.sleep(_backoff(attempt))
        try:
            return await promptly(question())
        except _TRANSIENT as error:
            raise BusUnavailableError(f"NATS at {self.url} did not answer in {attempts} attempts") from error

    async def subjects(self, stream: str, subjects_filter: str) -> dict[str, int]:
        """Subject -> number of messages, of the subjects in `stream` that match."""
        info = await self.stream_info(stream, subjects_filter)
        return dict(info.state.subjects or {})

    @contextlib.asynccontextmanager
    async def subscription(self, subject: str) -> AsyncIterator[asyncio.Queue[Msg]]:
        """Messages of core NATS on `subject` as they come; the oldest are dropped when nobody reads."""
        queue: asyncio.Queue[Msg] = asyncio.Queue(maxsize=1024)

        async def on_message(message: Msg) -> None:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(message)

        subscription = await self.client.subscribe(subject, cb=on_message)
        try:
            yield queue
        finally:
            with contextlib.suppress(nats.errors.Error):
                await promptly(subscription.unsubscribe())


def _backoff(attempt: int) -> float:
    return min(0.05 * 2**attempt, 2) * random.uniform(0.5, 1)  # noqa: S311 - jitter


def stored_of(message: RawStreamMsg) -> Stored:
    """A message that was read by sequence."""
    when = message.time if isinstance(message.time, datetime.datetime) else None
    return Stored(
        subject=message.subject or "",
        sequence=message.seq or 0,
        payload=message.data or b"",
        headers={str(k): str(v) for k, v in (message.headers or {}).items()},
        timestamp=when.timestamp() if when else 0.0,
    )
