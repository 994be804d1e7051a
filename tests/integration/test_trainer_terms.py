"""What one term, or one life, of the trainer leaves to the next: fences, and nothing else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.proto.update import Opened
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, LeaseOwner
from opengyre.shared.bus.topology import consumers
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trainer.intake import Intake
from opengyre.trainer.stock import Stock
from support import eventually
from support.trainer_fakes import CONFIG, RUN, B, Cell, events, offer, ready, start_run, trainer

pytestmark = pytest.mark.torch


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    return tmp_path / "model"


class CrashError(Exception):
    """The process dies here."""


async def opened(bus: Bus) -> list[Opened]:
    return await events(bus, subjects.UPDATES, subjects.update(RUN, "opened"))


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "state" / "blobs").rglob("*") if path.is_file()]


async def test_an_update_that_is_opened_again_has_another_attempt(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """By the same process too: a second Opened of the same attempt would be no news to whoever counts what is
    contributed, and no cell would be sent to compute it again."""
    await start_run(bus, model)
    leases = Bucket(bus, subjects.KV_LEASES, LeaseOwner)
    async with trainer(bus, blobs, tmp_path, "t0"):
        await eventually(lambda: opened(bus))
        await leases.delete("leader.trainer")

        async def again() -> bool:
            return len(await opened(bus)) == 2

        await eventually(again)
    first, second = await opened(bus)
    assert first.update == second.update == 1
    assert first.attempt != second.attempt


async def test_a_group_that_is_looked_at_when_its_run_ends_is_given_back_at_once(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it came again only after its ack wait, and a successor would wait for it."""
    config = next(config for stream, config in consumers() if stream == subjects.GROUPS)
    await bus.js.add_consumer(subjects.GROUPS, config.evolve(ack_wait=300))
    spec = await start_run(bus, model)
    looking = asyncio.Event()

    async def check(*_: object, **__: object) -> None:
        looking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Intake, "check", check)
    async with trainer(bus, blobs, tmp_path, "t0"):
        await offer(bus, ready(0))
        await asyncio.wait_for(looking.wait(), 90)
        await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, msgspec.structs.replace(spec, state="stopped"))

        async def left() -> bool:
            consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
            return [(event.group, event.reason) for event in consumed] == [("r-g000000", "run_stopped")]

        await eventually(left, 90)


async def test_a_gradient_that_was_refused_is_forgotten_with_its_update(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """It is as large as the model, and comes of each cell that was given up and is late."""
    await start_run(bus, model, updates=2)
    await offer(bus, ready(0), ready(1))
    slow, quick = Cell(bus, blobs, "h0"), Cell(bus, blobs, "h1", gradient=lambda _: 0.5)
    async with trainer(bus, blobs, tmp_path, "t0"):

        async def given() -> bool:
            reply = await slow.pull()
            if reply.item is not None:
                slow.add(reply.item)
            return reply.item is not None

        await eventually(given)
        again = await slow.pull(boot="b1", holding=(), update=None, attempt=None)
        assert again.item is not None, "its process was started again"
        assert not (await slow.hand_over()).accepted
        assert len(files(tmp_path)) == 1
        slow.boot = "b1"
        slow.add(again.item)
        training = asyncio.create_task(quick.train())

        async def whole() -> bool:
            reply = await slow.pull()
            if reply.item is not None:
                slow.add(reply.item)
            return reply.flush

        await eventually(whole)
        slow.total += 1.0
        assert (await slow.hand_over()).accepted
        await eventually(lambda: not files(tmp_path), 90)
        training.cancel()


async def test_a_life_that_ends_after_its_commit_leaves_no_blobs(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, and members that were too large for a message."""
    await start_run(bus, model, updates=1)
    groups = [ready(number) for number in range(B)]
    large = await blobs.put(msgspec.json.encode(groups[0].members))
    await offer(bus, msgspec.structs.replace(groups[0], members=(), blob=large), *groups[1:])
    acknowledge = Stock.acknowledge

    async def die(self: Stock) -> None:
        await acknowledge(self)
        raise CrashError

    monkeypatch.setattr(Stock, "acknowledge", die)
    cell = Cell(bus, blobs, "h0")
    training = asyncio.create_task(cell.train())
    with contextlib.suppress(ExceptionGroup):
        async with trainer(bus, blobs, tmp_path, "t0"):

            async def consumed() -> bool:
                return (await bus.stream_info(subjects.GROUPS)).state.messages == 0

            await eventually(consumed)
    training.cancel()
    await asyncio.wait([training])
    assert len(files(tmp_path)) == 2, "the gradient and the members are left"
    monkeypatch.undo()
    async with trainer(bus, blobs, tmp_path, "t1"):
        await eventually(lambda: not files(tmp_path))
