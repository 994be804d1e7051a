"""/v1/events: the streams as server-sent events.

Invariants: an event is sent once and in its stream's order; its id is the position in all streams, so that a reader
who comes back with `Last-Event-ID` goes on exactly there. A slow reader slows its own reading only: at most `AHEAD`
events wait for it. At most `READERS` at a time.

Awaits: the sender is woken by an event, by its keep-alive (`KEEP_ALIVE_S`), by the reader's going or by the end of the
service; a follower by its stream or by a free place in the queue.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from opengyre.gateway import examples
from opengyre.gateway.deps import BoundRoute, Deps, listed
from opengyre.gateway.folding import shown
from opengyre.gateway.models import RUN_PATTERN
from opengyre.gateway.openapi import problem_responses
from opengyre.gateway.positions import DEFAULT, STREAMS, BadPositionError, chosen, filter_of, parse, render
from opengyre.gateway.problems import RETRY_AFTER_S, Problem
from opengyre.gateway.runs import DepsOf
from opengyre.proto.codec import UndecodableError
from opengyre.shared.bus import Bus, BusError, Stored, follow

log = logging.getLogger("gyre.gateway")

KEEP_ALIVE_S = 10.0
LOOK_S = 0.5
AHEAD = 256
READERS = 64

router = APIRouter(route_class=BoundRoute, tags=["events"])


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one server-sent event."""

    stream: str
    sequence: int
    subject: str
    time: float
    """When it was stored, seconds since the epoch."""
    event: dict[str, Any]


def frame(positions: Mapping[str, int], stream: str, stored: Stored, *, tokens: bool) -> bytes:
    """One event in the format of server-sent events; what cannot be decoded is sent with its error."""
    try:
        event = shown(stored.event(), tokens=tokens)
    except UndecodableError as error:
        event = {"type": "undecodable", "error": str(error)}
    sent = Sent(stream=stream, sequence=stored.sequence, subject=stored.subject, time=stored.timestamp, event=event)
    data = msgspec.json.encode(sent)
    return f"id: {render(positions)}\nevent: {event['type']}\ndata: ".encode() + data + b"\n\n"


class EventStream(Response):
    """The answer: sends until the reader goes, the service ends or the bus fails."""

    def __init__(self, deps: Deps, filters: Mapping[str, str], start: Mapping[str, int], *, tokens: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._deps = deps
        self._filters = filters
        self._positions = dict(start)
        self._tokens = tokens
        self._queue: asyncio.Queue[tuple[str, Stored]] = asyncio.Queue(maxsize=AHEAD)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.Event()
        self._deps.event_readers += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [tasks.create_task(_watch(receive, gone))]
                work += [tasks.create_task(self._follow(name, subject)) for name, subject in self._filters.items()]
                try:
                    await self._send(send, gone)
                finally:
                    for task in work:
                        task.cancel()
        except* BusError as group:
            log.info("events: a reader is sent away: %r", group.exceptions[0])
        finally:
            self._deps.event_readers -= 1
        if not gone.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, stream: str, subject: str) -> None:
        bus = self._deps.bus
        start = self._positions[stream] + 1
        async with contextlib.aclosing(follow(bus, stream, subject, start=start)) as messages:
            async for stored in messages:
                await self._queue.put((stream, stored))

    async def _send(self, send: Send, gone: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping = self._deps.context.stopping
        await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
        spoken = loop.time()
        while not gone.is_set() and not stopping.is_set():
            body = b""
            try:
                async with asyncio.timeout(LOOK_S):
                    stream, stored = await self._queue.get()
            except TimeoutError:
                if loop.time() - spoken < KEEP_ALIVE_S:
                    continue
                body = b": still here\n\n"
            else:
                self._positions[stream] = stored.sequence
                body = frame(self._positions, stream, stored, tokens=self._tokens)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            spoken = loop.time()


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _start(bus: Bus, streams: tuple[str, ...], last: dict[str, int], *, from_beginning: bool) -> dict[str, int]:
    """Position after which each stream is read."""
    start: dict[str, int] = {}
    for stream in streams:
        if stream in last:
            start[stream] = last[stream]
        elif from_beginning:
            start[stream] = 0
        else:
            start[stream] = (await bus.stream_info(stream)).state.last_seq
    return start


@router.get(
    "/v1/events",
    summary="Follow the streams (server-sent events)",
    response_class=Response,
    responses={
        200: {
            "description": "Events as they come; `id` goes into Last-Event-ID to continue",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": examples.EVENT}},
        },
        **problem_responses(),
    },
)
async def events(
    deps: DepsOf,
    run: Annotated[str | None, Query(pattern=RUN_PATTERN, description="Only of this run; default: of all")] = None,
    streams: Annotated[
        str | None,
        Query(max_length=200, description=f"Of {', '.join(STREAMS)}, by commas; default: {','.join(DEFAULT)}"),
    ] = None,
    since: Annotated[str, Query(pattern="^(now|start)$", description="Where to begin without Last-Event-ID")] = "now",
    tokens: Annotated[bool, Query(description="Give token ids and log-probs, not only their number")] = False,
    last_event_id: Annotated[str | None, Header(max_length=400)] = None,
) -> Response:
    try:
        wanted = chosen(streams)
        last = parse(last_event_id) if last_event_id else {}
    except BadPositionError as error:
        field = str(error).partition(" ")[0]
        raise Problem(422, str(error), field=field) from error
    if run is not None and run not in deps.run_view.values:
        raise Problem(404, f"there is no run {run}; there are: {listed(deps.run_view.values)}", field="run")
    if deps.event_readers >= READERS:
        detail = f"{READERS} readers follow the events already; try again later"
        raise Problem(429, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
    start = await _start(deps.bus, wanted, last, from_beginning=since == "start")
    return EventStream(deps, {name: filter_of(name, run) for name in wanted}, start, tokens=tokens)
