"""What a worker does when the processes that held its sum are gone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opengyre.host.learners import Accumulator, LearnerLostError
from opengyre.host.worker import Worker
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import Optimization
from opengyre.proto.update import WorkItem
from opengyre.proto.weights import Manifest
from opengyre.shared.blobs import Written
from opengyre.shared.waits import Waits


class Lost:
    """Adds one group, then its ranks die."""

    def __init__(self) -> None:
        self.added = 0

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def ended(self) -> None: ...

    async def add(self, item: WorkItem, members: Any, into: Accumulator | None, name: str) -> Accumulator:
        self.added += 1
        if into is not None:
            raise LearnerLostError("rank 1 of 2 ended by signal 9")
        return Accumulator(item.update, item.attempt, name, {})

    async def write(self, accumulator: Accumulator, path: Path) -> Written:
        raise LearnerLostError("the ranks that held the sum have ended")


def work(execution: str) -> WorkItem:
    member = Member(execution=execution, score=0.5, advantage=1.0, sequences=(), trained_tokens=0, path_tokens=0)
    return WorkItem(
        update=1, attempt="a", base=Manifest(run="r", version=0, parent=None, step=0, directory="/w", files=()),
        group=GroupReady(run="r", group="r-g0", task="t", version=0, members=(member,)), executions=(execution,),
        weight=1.0, optimization=Optimization(),
    )  # fmt: skip


@pytest.mark.parametrize("where", ["add", "write"])
async def test_what_is_lost_is_not_said_to_be_held(where: str) -> None:
    blobs = SimpleNamespace(put_by=lambda write, durable: write(Path("gradient")))
    context: Any = SimpleNamespace(waits=Waits(), blobs=blobs)
    worker, leave = Worker(context, "h", "b", Lost()), asyncio.Event()
    leave.set()
    await worker._take(work("r-g0-e00"), leave)
    assert worker._held is not None
    assert worker._held.executions == ["r-g0-e00"]
    if where == "add":
        await worker._take(work("r-g0-e01"), leave)
    else:
        await worker._hand_over(leaving=False, patience_s=1)
    assert worker._held is None


async def test_a_worker_has_left_once_nothing_of_its_ranks_is_left() -> None:
    """On a GPU vLLM woke while killed ranks still held the card, and was refused its memory."""
    ended = asyncio.Event()

    class Ranks(Lost):
        async def ended(self) -> None:
            await ended.wait()

    context: Any = SimpleNamespace(waits=Waits())
    leaving = asyncio.create_task(Worker(context, "h", "b", Ranks()).leave())
    assert not (await asyncio.wait({leaving}, timeout=0.05))[0]
    ended.set()
    await leaving
