"""One connection to the proxy of a sandbox: a request is read, judged, and carried to the host or refused.

Invariants: the address that was checked is the address that is connected to; a name that is not listed is not
resolved; one request a connection, so that nothing after it can be taken for another; a refusal is a sentence.

Awaits: the request for `HEAD_S`; the name's address for `RESOLVE_S` (in threads of its own: a slow name holds up other
names only); the connection for `CONNECT_S`; after that any byte in either direction, for `IDLE_S`.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from ipaddress import ip_address

import h11

from opengyre.sandbox.allowlist import Address, Allowlist, Target, plain
from opengyre.sandbox.proxy_requests import Asked, RefusedError, answer, asked, refusal

HEAD_S = 15.0
RESOLVE_S = 10.0
CONNECT_S = 15.0
IDLE_S = 300.0
LINGER_S = 2.0
HEAD_LIMIT = 32 << 10
"""Bytes of a request's or an answer's first lines and headers."""
CHUNK = 1 << 16
MOST_ADDRESSES = 3
"""Of a name, tried in turn."""
FORBIDDEN = 403
AT_ONCE = 2
"""Names of one sandbox that are looked up at the same time."""

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Moved = Callable[[int, int], None]
"""Is told of bytes: to a host, and from it."""


@dataclass
class Way:
    """What all connections of one sandbox share."""

    rules: Allowlist
    names: Executor
    """Where names are looked up."""
    told: Callable[[str, str | None], None]
    """Is told of each request: ``allowed``, ``denied`` or ``failed``, and of ``host:port`` where that was read."""
    moved: Moved
    looking_up: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


async def serve(way: Way, reader: Reader, writer: Writer) -> None:
    """Answer what comes on a connection, and return when that is over; the caller closes the writer."""
    near = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
    wanted: Asked | None = None
    try:
        request = await _request(near, reader)
        if request is None:
            return
        wanted = asked(request)
        there = await _reach(way, wanted)
    except RefusedError as error:
        outcome = "denied" if error.status == FORBIDDEN else "failed"
        way.told(outcome, wanted.authority if wanted is not None else None)
        await _refuse(near, reader, writer, error.status, error.sentence)
        return
    way.told("allowed", wanted.authority)
    await _carry(way, wanted, near, (reader, writer), there)


async def _request(near: h11.Connection, reader: Reader) -> h11.Request | None:
    """None where the connection ends without one; raises `RefusedError`."""
    try:
        async with asyncio.timeout(HEAD_S):
            request = await _event(near, reader)
    except TimeoutError:
        raise RefusedError(408, f"no request came within {HEAD_S:g} s") from None
    except h11.RemoteProtocolError as error:
        raise RefusedError(error.error_status_hint, f"this is not HTTP: {error}") from error
    return request if isinstance(request, h11.Request) else None


async def _reach(way: Way, wanted: Asked) -> tuple[Reader, Writer]:
    """A connection to the host; raises `RefusedError`."""
    words = ", ".join(way.rules.words) or "no host"
    if not way.rules.lists(wanted.target):
        sentence = f"host {wanted.target.host!r} may not be reached from here; allowed: {words}"
        raise RefusedError(FORBIDDEN, sentence[:4000])
    addresses = await _addresses(way, wanted.target, wanted.port)
    objections = [way.rules.objection(address, own=is_own(address)) for address in addresses]
    good = [address for address, no in zip(addresses, objections, strict=True) if no is None]
    if not good:
        raise RefusedError(FORBIDDEN, f"host {wanted.target.host!r} may not be reached from here: {objections[0]}")
    fault = ""
    for address in good[:MOST_ADDRESSES]:
        try:
            async with asyncio.timeout(CONNECT_S / min(len(good), MOST_ADDRESSES)):
                return await asyncio.open_connection(str(address), wanted.port)
        except TimeoutError:
            fault = f"no answer within {CONNECT_S:g} s"
        except OSError as error:
            fault = error.strerror or str(error)
    raise RefusedError(502, f"{wanted.authority} cannot be reached: {fault}")


async def _addresses(way: Way, wanted: Target, port: int) -> list[Address]:
    if wanted.address is not None:
        return [wanted.address]
    loop = asyncio.get_running_loop()

    def look_up() -> list[Address]:
        found = socket.getaddrinfo(wanted.host.encode(), port, type=socket.SOCK_STREAM)
        return [plain(ip_address(address[0])) for *_, address in found if isinstance(address[0], str)]

    def free(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(way.looking_up.release)

    try:
        async with asyncio.timeout(RESOLVE_S):
            await way.looking_up.acquire()
            looking = way.names.submit(look_up)
            looking.add_done_callback(free)  # not when nobody waits any more: the thread is held until then
            found = await asyncio.wrap_future(looking)
    except TimeoutError:
        raise RefusedError(504, f"the name {wanted.host!r} was not resolved within {RESOLVE_S:g} s") from None
    except OSError as error:
        raise RefusedError(502, f"the name {wanted.host!r} cannot be resolved: {error.strerror}") from error
    if not found:
        raise RefusedError(502, f"the name {wanted.host!r} has no address")
    return list(dict.fromkeys(found))


def is_own(address: Address) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


async def _event(connection: h11.Connection, reader: Reader) -> h11.Event | type[h11.PAUSED]:
    while (event := connection.next_event()) is h11.NEED_DATA:
        # h11 bounds only what is incomplete, so what completes a head may not bring more than the bound at once.
        held = len(connection.trailing_data[0])
        connection.receive_data(await reader.read(HEAD_LIMIT + 1 - held))
    assert event is not h11.NEED_DATA
    return event  # type: ignore[return-value]  # the one that it is not was asked for again


async def _send(connection: h11.Connection, writer: Writer, event: h11.Event) -> int:
    data = connection.send(event) or b""
    writer.write(data)
    await writer.drain()
    return len(data)


async def _refuse(near: h11.Connection, reader: Reader, writer: Writer, status: int, sentence: str) -> None:
    if near.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    response, body = refusal(status, sentence)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                await _send(near, writer, event)
            # What is closed with unread bytes is reset, and the sentence may be lost by that.
            writer.write_eof()
            while await reader.read(CHUNK):
                pass


@contextlib.asynccontextmanager
async def _while_it_moves(way: Way) -> AsyncIterator[Moved]:
    """A bound that each byte puts off."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(IDLE_S) as bound:

            def moved(sent: int, received: int) -> None:
                way.moved(sent, received)
                bound.reschedule(loop.time() + IDLE_S)

            yield moved


async def _carry(
    way: Way, wanted: Asked, near: h11.Connection, here: tuple[Reader, Writer], there: tuple[Reader, Writer]
) -> None:
    carry = _tunnel if wanted.onward is None else _exchange
    try:
        async with _while_it_moves(way) as moved:
            await carry(wanted, near, here, there, moved)
    finally:
        there[1].close()


async def _tunnel(
    _wanted: Asked,
    near: h11.Connection,
    here: tuple[Reader, Writer],
    there: tuple[Reader, Writer],
    moved: Moved,
) -> None:
    try:
        await _event(near, here[0])  # the request's end, which is there already
        await _send(near, here[1], h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        early = near.trailing_data[0]
        there[1].write(early)
        moved(len(early), 0)
        async with asyncio.TaskGroup() as both:
            both.create_task(_pipe(here[0], there[1], lambda count: moved(count, 0)))
            both.create_task(_pipe(there[0], here[1], lambda count: moved(0, count)))
    except* OSError:
        pass  # one side is gone: the connection is over


async def _pipe(source: Reader, sink: Writer, moved: Callable[[int], None]) -> None:
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()
        moved(len(chunk))
    with contextlib.suppress(OSError):
        sink.write_eof()


async def _exchange(
    wanted: Asked,
    near: h11.Connection,
    here: tuple[Reader, Writer],
    there: tuple[Reader, Writer],
    moved: Moved,
) -> None:
    far = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
    assert wanted.onward is not None
    try:
        moved(await _send(far, there[1], wanted.onward), 0)
        if near.they_are_waiting_for_100_continue:
            await _send(near, here[1], h11.InformationalResponse(status_code=100, headers=[]))
        async with asyncio.TaskGroup() as both:
            body = both.create_task(_body(near, here[0], far, there[1], moved))
            await _response(near, here[1], far, there[0], moved)
            body.cancel()
    except* (OSError, h11.ProtocolError) as errors:
        await _refuse(near, *here, 502, f"{wanted.authority} gave no proper answer: {errors.exceptions[0]}")


async def _body(near: h11.Connection, source: Reader, far: h11.Connection, sink: Writer, moved: Moved) -> None:
    while isinstance(event := await _event(near, source), h11.Data | h11.EndOfMessage):
        try:
            moved(await _send(far, sink, event), 0)
        except OSError:
            return  # a host may answer without having read all; the answer says what it thinks of it
        if isinstance(event, h11.EndOfMessage):
            return


async def _response(near: h11.Connection, sink: Writer, far: h11.Connection, source: Reader, moved: Moved) -> None:
    while True:
        event = await _event(far, source)
        if isinstance(event, h11.Response):
            moved(0, await _send(near, sink, answer(event)))
        elif isinstance(event, h11.Data):
            moved(0, await _send(near, sink, event))
        elif isinstance(event, h11.EndOfMessage):
            await _send(near, sink, h11.EndOfMessage())
            return
        elif not isinstance(event, h11.InformationalResponse):
            return
