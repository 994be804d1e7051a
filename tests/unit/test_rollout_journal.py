"""The journal over a bus in memory: what becomes of an append whose caller is stopped."""

import asyncio
from pathlib import Path

import pytest

from opengyre.proto.examples import DISPATCH
from opengyre.proto.traj import Resumed, Suspended
from opengyre.rollout.journal import Journal
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import FencedError
from opengyre.shared.settings import CacheSettings
from opengyre.shared.waits import Waits


class SlowBus:
    """Stores an event when it is let."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.fenced = False
        self.stored: list[object] = []

    async def append(self, _subject: str, event: object, *, scope: str, last: int) -> int:
        await self.let.wait()
        assert scope
        if self.fenced:
            raise FencedError(scope)
        self.stored.append(event)
        return last + 1


@pytest.fixture
async def bus() -> SlowBus:
    return SlowBus()


@pytest.fixture
async def journal(bus: SlowBus, tmp_path: Path) -> Journal:
    blobs = Blobs(tmp_path, CacheSettings())
    return Journal(bus, Waits(), DISPATCH, blobs)  # type: ignore[arg-type]  # a fake in the bus's place


async def stopped(appending: "asyncio.Task[object]") -> None:
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending


async def test_what_is_stored_for_a_caller_that_was_stopped_can_be_claimed_once(journal: Journal, bus: SlowBus) -> None:
    """Else the tokens of a call that is in the log would not be counted at the end of its episode."""
    appending = asyncio.create_task(journal.append(Suspended, turn=0))
    await asyncio.sleep(0)
    await stopped(appending)
    bus.let.set()
    await journal.settled()
    assert journal.claim() == bus.stored
    assert len(bus.stored) == 1
    assert journal.claim() == []


async def test_what_its_caller_got_is_not_claimed(journal: Journal, bus: SlowBus) -> None:
    bus.let.set()
    assert await journal.append(Resumed, turn=0, waited_s=1.0) == bus.stored[0]
    await journal.settled()
    assert journal.claim() == []


async def test_a_refused_append_of_a_caller_that_was_stopped_fences_and_leaves_nothing(
    journal: Journal, bus: SlowBus
) -> None:
    bus.fenced = True
    appending = asyncio.create_task(journal.append(Suspended, turn=0))
    await asyncio.sleep(0)
    await stopped(appending)
    bus.let.set()
    await journal.settled()
    assert journal.fenced.is_set()
    assert journal.claim() == []
