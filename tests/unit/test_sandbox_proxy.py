"""The proxy of a sandbox without a sandbox: what it makes of a request does not depend on the pieces it comes in."""

import asyncio
from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from opengyre.sandbox import proxy
from opengyre.sandbox.allowlist import parse

HEAD = "GET http://evil.org/ HTTP/1.1\r\nHost: evil.org\r\nX: {}\r\n\r\n"


class Writer:
    """What the proxy uses of a connection's writer to refuse."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def write_eof(self) -> None:
        pass


async def answered(*pieces: bytes) -> str:
    """The first line of what is answered to bytes of which each piece comes once the one before it was read."""
    reader, writer = asyncio.StreamReader(limit=1 << 20), Writer()
    way = proxy.Way(parse([]), cast("Any", None), told=lambda *_: None, moved=lambda *_: None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(proxy.serve(way, reader, cast("Any", writer)))
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()
    return writer.data.split(b"\r\n")[0].decode()


@given(length=st.integers(0, 3 * proxy.HEAD_LIMIT), cuts=st.lists(st.floats(0, 1), max_size=4))
def test_a_head_is_bounded_whatever_pieces_it_comes_in(length: int, cuts: list[float]):
    """h11 bounds only what is incomplete: 30 KiB and then the other 40 of a head once passed."""
    head = HEAD.format("x" * length).encode()
    at = [0, *sorted(int(cut * len(head)) for cut in cuts), len(head)]
    pieces = [head[start:end] for start, end in pairwise(at)]
    got = asyncio.run(answered(*pieces))
    assert got == ("HTTP/1.1 403 " if len(head) <= proxy.HEAD_LIMIT + 1 else "HTTP/1.1 431 ")
