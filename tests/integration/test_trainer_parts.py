"""The trainer with parts of groups: messages that straddle updates, late members, bursts, d_max, live changes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.task import GroupConsumed
from opengyre.proto.update import Committed, Opened
from opengyre.proto.weights import WeightsPublished
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trainer import service
from support import eventually
from support.trainer_fakes import CONFIG, RUN, Cell, events, offer, ready, trainer

pytestmark = pytest.mark.torch

B, G = 2, 4


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    return tmp_path / "model"


async def start(bus: Bus, model: Path, *, elastic: Elastic | None = None, **dispatch: Any) -> RunSpec:
    setting = Dispatch(**{"phi": 1, "mu": 2, "batch_groups": B, "group_size": G, **dispatch})
    spec = RunSpec(run=RUN, model=str(model), updates=4, dispatch=setting, elastic=elastic or Elastic())
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)
    return spec


def parts(number: int, closing: int, *, unscored: int = 0, version: int = 0) -> list[GroupReady]:
    """A group of G that closed at `closing`; of the late members the last `unscored` have no score."""
    whole = ready(number, version, size=G)
    first = msgspec.structs.replace(whole, members=whole.members[:closing], executions=whole.executions[:closing])
    late = [
        msgspec.structs.replace(
            whole, late=True, executions=(name,), members=(whole.members[place],) if place < G - unscored else ()
        )
        for place, name in enumerate(whole.executions)
        if place >= closing
    ]
    return [first, *late]


async def committed(bus: Bus) -> list[Committed]:
    return await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))


async def consumed(bus: Bus) -> list[GroupConsumed]:
    return await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))


async def reach(bus: Bus, version: int) -> None:
    async def there() -> bool:
        return len(await committed(bus)) >= version

    await eventually(there, 90)


async def test_parts_of_groups_fill_updates_and_straddle_them(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """Closing parts of 3, then the late members; two executions at a time; one of the late has no score; and one
    message came twice."""
    await start(bus, model, elastic=Elastic(grain=2), close_at=3)
    groups = [parts(number, 3, unscored=int(number == 1)) for number in range(8)]
    large = await blobs.put(msgspec.json.encode(groups[2][0].members))
    groups[2][0] = msgspec.structs.replace(groups[2][0], members=(), blob=large)
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0"):
        training = asyncio.create_task(cell.train())
        await offer(bus, *(group[0] for group in groups[:4]))
        await reach(bus, 1)
        again = msgspec.structs.replace(groups[0][0], refused={"again": 1})
        await bus.publish_raw(subjects.group_ready(RUN), msgspec.json.encode(again), "again", "group.ready.v1")
        await offer(bus, *(late for group in groups[:4] for late in group[1:]), *(group[0] for group in groups[4:]))
        await offer(bus, *(late for group in groups[4:] for late in group[1:]))
        await reach(bus, 4)

        async def empty() -> bool:
            return (await bus.stream_info(subjects.GROUPS)).state.messages == 0

        await eventually(empty, 90)
        cell.stop.set()
        await training
    done = await committed(bus)
    assert [len(event.executions) + len(event.unscored) for event in done] == [B * G] * 4
    assert done[0].groups == ("r-g000000", "r-g000001", "r-g000002"), "the third straddles"
    assert set(done[0].executions) | set(done[1].executions) > set(groups[2][0].executions)
    places = Counter(name for event in done for name in (*event.executions, *event.unscored))
    assert places == Counter(name for group in groups for part in group for name in part.executions)
    assert sum(len(event.unscored) for event in done) == 1
    told = Counter(name for event in await consumed(bus) for name in event.executions)
    assert told == places, "each is told once"
    at = {name: event.version - 1 for event in done for name in (*event.executions, *event.unscored)}
    assert all(at[name] == event.version for event in await consumed(bus) for name in event.executions)
    assert not [path for path in (tmp_path / "state" / "blobs").rglob("*") if path.is_file()]


async def test_without_streaming_a_burst_is_trained_once_it_is_complete(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    await start(bus, model, elastic=Elastic(stream=False))
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0") as context:
        training = asyncio.create_task(cell.train())
        await offer(bus, *(part for number in range(3) for part in parts(number, G)), parts(3, 3)[0])
        wanted = "executions: 15 of 16 of the burst that begins with update 1"
        await eventually(lambda: any(wait.what == wanted for wait in context.waits.report()), 90)
        assert not cell.seen
        await offer(bus, parts(3, 3)[1])
        await reach(bus, 2)
        cell.stop.set()
        await training
    assert [event.published for event in await committed(bus)] == [False, True]


async def test_what_is_too_stale_to_enter_leaves_training_and_is_counted(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """The part that straddles is young enough for the first update and too old for the second."""
    await start(bus, model, mu=1, d_max=0, on_stale="drop")
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0"):
        training = asyncio.create_task(cell.train())
        await offer(bus, *(parts(number, 3)[0] for number in range(3)))
        await reach(bus, 1)

        async def dropped() -> bool:
            return any(event.outcome == "dropped" for event in await consumed(bus))

        await eventually(dropped, 90)
        await offer(bus, parts(0, 3)[1], *(part for number in (3, 4) for part in parts(number, G, version=1)))
        await reach(bus, 2)
        cell.stop.set()
        await training
    gone = [event for event in await consumed(bus) if event.outcome == "dropped"]
    assert {(event.reason, event.version) for event in gone} == {("stale", 1)}
    assert sorted(name for event in gone for name in event.executions) == ["r-g000000-e03", "r-g000002-e02"]
    assert [event.staleness for event in await committed(bus)] == [(0, 0, 0), (0, 0)]


async def test_a_live_change_of_mu_skips_no_publication(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = await start(bus, model, mu=3)
    taken, active_run = asyncio.Event(), service.active_run

    def looking(*where: Any) -> RunSpec | None:
        found = active_run(*where)
        if found is not None and found.dispatch.mu == 2:
            taken.set()
        return found

    monkeypatch.setattr(service, "active_run", looking)
    cell = Cell(bus, blobs, "h0")

    async def opened(number: int) -> bool:
        found: list[Opened] = await events(bus, subjects.UPDATES, subjects.update(RUN, "opened"))
        return any(event.update == number for event in found)

    async with trainer(bus, blobs, tmp_path, "t0"):
        training = asyncio.create_task(cell.train())
        await offer(bus, *(part for number in range(2) for part in parts(number, G)))
        await eventually(lambda: opened(2), 90)
        changed = msgspec.structs.replace(spec, dispatch=msgspec.structs.replace(spec.dispatch, mu=2))
        await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, changed)
        await asyncio.wait_for(taken.wait(), 90)
        await offer(bus, *(part for number in range(2, 6) for part in parts(number, G)))
        await reach(bus, 3)
        cell.stop.set()
        await training
    published: list[WeightsPublished] = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    assert [event.manifest.version for event in published] == [0, 2]
