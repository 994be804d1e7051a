"""Reading streams for `gyre stream`: the past of any stream, work queues included, and what comes.

Awaits: the broker; `read_past` ends at what was the last message when it began, `read_live` when it is cancelled.
"""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from opengyre.cli import stack as stacks
from opengyre.cli.stream_select import QUEUES, Selection
from opengyre.shared.bus import Bus, Stored, follow, next_message, page, reachable
from opengyre.shared.settings import is_set, load

CONNECT_S = 5.0
PAGE = 256
LOOK_S = 0.25
FOREVER = 2**62


@contextlib.asynccontextmanager
async def connected(nats: str | None, state_dir: Path | None) -> AsyncIterator[Bus]:
    """The bus that `--nats` names, or the stack's in the state directory, or that of setting bus.url where it is set.

    Raises `StackError` in one sentence, at once where none of them is there.
    """
    url = nats or _found(stacks.directory(state_dir))
    try:
        bus = await Bus(url, "gyre-stream", connect_timeout_s=CONNECT_S).__aenter__()
    except TimeoutError as error:
        raise stacks.StackError(
            f"NATS at {url} does not answer; name another with --nats, or start `gyre up`"
        ) from error
    try:
        yield bus
    finally:
        await bus.__aexit__()


def _found(directory: Path) -> str:
    there = stacks.read(directory)
    if there is not None:
        return there.nats
    settings = load()
    if not is_set(settings, "bus"):  # its default is no sign of a broker
        raise stacks.StackError(stacks.absent(directory, "--nats"))
    return settings.bus.url


async def first_since(bus: Bus, selection: Selection, since: datetime.datetime | None, start: int) -> int:
    """The sequence to begin at."""
    if since is None:
        return start
    if selection.stream in QUEUES:
        return start  # a queue is short; its messages are filtered by their time
    async with reachable(bus):
        found = await page(bus, selection.stream, selection.subject, since=since, limit=1)
    return found.messages[0].sequence if found.messages else FOREVER


async def read_past(bus: Bus, selection: Selection, start: int, since: float = 0.0) -> AsyncGenerator[Stored, None]:
    """Messages from sequence `start` and time `since` up to what is the last one now."""
    async with reachable(bus):
        end = (await bus.stream_info(selection.stream)).state.last_seq
    while start <= end:
        async with reachable(bus, 30):
            if selection.stream in QUEUES:
                one = await next_message(bus, selection.stream, selection.subject, start)
                messages = [] if one is None else [one]
            else:
                messages = (await page(bus, selection.stream, selection.subject, start=start, limit=PAGE)).messages
        if not messages:
            return
        for stored in messages:
            start = stored.sequence + 1
            if stored.sequence <= end and stored.timestamp >= since and selection.takes(stored.payload):
                yield stored


async def read_live(bus: Bus, selection: Selection, start: int | None) -> AsyncGenerator[Stored, None]:
    """Messages from sequence `start` on, or (None) those that come from now on, without end."""
    if selection.stream not in QUEUES:
        only_new = start is None
        async with contextlib.aclosing(
            follow(bus, selection.stream, selection.subject, start=start or 1, only_new=only_new)
        ) as messages:
            async for stored in messages:
                if selection.takes(stored.payload):
                    yield stored
        return
    if start is None:
        start = (await bus.stream_info(selection.stream)).state.last_seq + 1
    while True:
        async with reachable(bus):
            stored = await next_message(bus, selection.stream, selection.subject, start)
        if stored is None:
            await asyncio.sleep(LOOK_S)
            continue
        start = stored.sequence + 1
        if selection.takes(stored.payload):
            yield stored
