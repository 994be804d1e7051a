"""The trainer against a real broker: exactly once, whatever is killed, repeated, lost or late."""

import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.proto.update import (
    Committed,
    Contributed,
    RunFinished,
)
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, Delivery, LeaseOwner, follow
from opengyre.shared.bus.topology import consumers
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import CacheSettings, Settings
from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trainer import intake, service
from opengyre.trainer.learner import Learner
from opengyre.trainer.service import Trainer
from opengyre.trainer.store import Store
from support import eventually
from support.trainer_fakes import (
    CONFIG,
    RUN,
    B,
    Cell,
    G,
    check_exactly_once,
    events,
    offer,
    ready,
    start_run,
    trainer,
)

pytestmark = pytest.mark.torch


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


async def until(condition: Callable[[], Any]) -> None:
    await eventually(condition, timeout_s=90)


async def committed(bus: Bus) -> list[Committed]:
    return await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))


def at(bus: Bus, version: int) -> Callable:
    async def reached() -> bool:
        last = await bus.last(subjects.update(RUN, "committed"))
        event = last.event() if last else None
        return isinstance(event, Committed) and event.version >= version

    return reached


async def test_a_run_from_its_model_to_its_end(bus: Bus, blobs: Blobs, model: Path, tmp_path: Path) -> None:
    await start_run(bus, model, updates=3)
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0") as context, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(cell.train())
        await offer(bus, *(ready(n) for n in range(6)))
        await until(at(bus, 3))

        async def finished() -> bool:
            found = await Bucket(bus, subjects.KV_RUNS, RunSpec).get(RUN)
            return found is not None and found[0].state == "finished"

        await until(finished)
        assert context.gauges["trainer_version"] == 3
        await offer(bus, ready(6))

        async def settled() -> bool:
            return len(await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))) == 7

        await until(settled)
        cell.stop.set()
        await training
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    assert (consumed[-1].group, consumed[-1].outcome, consumed[-1].reason) == ("r-g000006", "dropped", "run_finished")
    ends = await events(bus, subjects.UPDATES, subjects.update(RUN, "finished"))
    assert ends == [RunFinished(run=RUN, update=3, version=3)]
    done = await committed(bus)
    assert [event.published for event in done] == [False, True, True]
    assert [event.staleness for event in done] == [(0, 0), (1, 1), (2, 2)]
    assert done[0].score == 0.5
    assert done[0].stats.executions == B * G
    # 0.00 + 0.01 in each of N entries; every execution had a score, so nothing is scaled.
    size = sum(p.numel() for p in TinyModel(CONFIG).parameters())
    assert done[0].gradient_norm == pytest.approx(0.01 * math.sqrt(size), rel=1e-5)
    weights = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    last = load_pretrained(Path(weights[-1].manifest.directory))
    pairs = zip(TinyModel(CONFIG, seed=1).parameters(), last.parameters(), strict=True)
    assert not any(torch.equal(before, after) for before, after in pairs)
    assert (Path(weights[-1].manifest.directory) / "tokenizer.json").read_text() == "{}"
    assert (await bus.stream_info(subjects.GROUPS)).state.messages == 0
    assert not [path for path in (tmp_path / "state" / "blobs").rglob("*") if path.is_file()], "gradients are forgotten"


async def test_a_cell_that_falls_silent_and_comes_back_late(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    await start_run(bus, model, updates=1)
    await offer(bus, ready(0), ready(1))
    slow, quick = Cell(bus, blobs, "h0"), Cell(bus, blobs, "h1")
    async with trainer(bus, blobs, tmp_path, "t0", cell_timeout_s=2.0):

        async def given() -> bool:
            reply = await slow.pull()
            if reply.item is not None:
                slow.add(reply.item)
            return reply.item is not None

        await until(given)
        training = asyncio.create_task(quick.train())

        async def left() -> bool:
            return bool(await events(bus, subjects.UPDATES, subjects.update(RUN, "left")))

        await until(left)
        late = await slow.hand_over()
        assert not late.accepted
        await until(at(bus, 1))
        training.cancel()
    await check_exactly_once(bus, B, 1)
    assert set(quick.seen) == {"r-g000000", "r-g000001"}


async def test_a_trainer_that_was_away_itself_gives_up_no_cell_for_that(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """Frozen, or on a machine that is busy: what the cells had said meanwhile was not read yet."""
    await start_run(bus, model, updates=1)
    await offer(bus, ready(0), ready(1))
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0", cell_timeout_s=2.0):

        async def given() -> bool:
            reply = await cell.pull()
            if reply.item is not None:
                cell.add(reply.item)
            return len(cell.held) == 2

        await until(given)
        asking = asyncio.create_task(cell.pull())
        await asyncio.sleep(0)
        time.sleep(3)  # noqa: ASYNC251 - the trainer lives in this loop
        await asking
        assert (await cell.hand_over()).accepted
        await until(at(bus, 1))
    assert await events(bus, subjects.UPDATES, subjects.update(RUN, "left")) == []


async def test_a_gradient_that_is_not_finite_skips_the_update_and_names_the_groups(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    await start_run(bus, model, updates=2)
    await offer(bus, *(ready(n) for n in range(4)))
    cell = Cell(bus, blobs, "h0", gradient=lambda item: math.nan if item.update == 1 else 0.5)
    async with trainer(bus, blobs, tmp_path, "t0"):
        training = asyncio.create_task(cell.train())
        await until(at(bus, 2))
        training.cancel()
    first, second = await committed(bus)
    assert first.skipped is not None
    assert first.skipped.endswith("r-g000000, r-g000001")
    assert second.skipped is None
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    outcomes = {c.group: (c.outcome, c.reason) for c in consumed}
    assert outcomes["r-g000001"] == ("dropped", "non_finite_gradient")
    assert outcomes["r-g000002"] == ("trained", None)


async def test_a_group_that_cannot_be_trained_leaves_and_stops_nothing(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    await start_run(bus, model, updates=1)
    whole = msgspec.json.encode(ready(3).members)
    await offer(
        bus,
        ready(0, members=(), executions=()),
        ready(1, members=(), blob=f"sha256:{'0' * 64}"),
        ready(2),
        ready(3, members=(), blob=await blobs.put(whole)),
    )
    cell = Cell(bus, blobs, "h0")
    async with trainer(bus, blobs, tmp_path, "t0"):
        training = asyncio.create_task(cell.train())
        await until(at(bus, 1))
        training.cancel()
    (done,) = await committed(bus)
    assert done.groups == ("r-g000002", "r-g000003")
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    dropped = {c.group for c in consumed if (c.outcome, c.reason) == ("dropped", "invalid_group")}
    assert dropped == {"r-g000000", "r-g000001"}
    letters = [letter.error for letter in await events(bus, subjects.DLQ, ">")]
    assert "no members" in letters[0]
    assert "there is no blob" in letters[1]


async def test_negative_staleness_is_fatal(bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, caplog) -> None:
    await start_run(bus, model)
    await offer(bus, ready(0, version=5))
    settings = Settings.model_validate({"state_dir": tmp_path / "state"})
    context = Context("trainer", "t0", settings, bus, blobs, "http://nowhere")
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(90):
            await Trainer(context).run()
    assert "group r-g000000 was admitted at version 5, but the trainer's checkpoints end at 0" in caplog.text


async def test_a_model_that_is_not_there_is_waited_for_by_name(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    await start_run(bus, tmp_path / "nowhere")
    async with trainer(bus, blobs, tmp_path, "t0") as context:
        await until(lambda: any("nowhere" in wait.what for wait in context.waits.report()))
        assert context.missing is not None
        assert "is no directory" in context.missing


@pytest.mark.parametrize("name", ["record.json", "config.json", "state"])
async def test_a_damaged_checkpoint_is_waited_for_by_name_and_does_not_end_the_trainer(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(service, "FILES_S", 0.1)
    await start_run(bus, model)
    async with trainer(bus, blobs, tmp_path, "t0") as context:
        await until(lambda: context.missing is None)
    path = tmp_path / "state" / "trainer" / RUN / "v000000" / name
    if path.is_dir():
        path = max(path.glob("*.distcp"))
    whole = path.read_bytes()
    path.write_bytes(b"none")
    async with trainer(bus, blobs, tmp_path, "t1") as context:
        await until(lambda: any("a usable checkpoint" in wait.what for wait in context.waits.report()))
        assert context.missing is not None
        assert str(path) in context.missing
        path.write_bytes(whole)
        await until(lambda: context.missing is None)


async def test_a_damaged_checkpoint_of_an_ended_run_does_not_end_the_trainer(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "LOOK_S", 0.1)
    spec = await start_run(bus, model)
    async with trainer(bus, blobs, tmp_path, "t0") as context:
        await until(lambda: context.missing is None)
    path = tmp_path / "state" / "trainer" / RUN / "v000000" / "record.json"
    whole = path.read_bytes()
    path.write_bytes(b"none")
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, msgspec.structs.replace(spec, state="stopped"))
    await offer(bus, ready(0))
    asked = asyncio.Event()
    latest = Store.latest

    def looking(store: Store) -> Any:
        asked_from.call_soon_threadsafe(asked.set)
        return latest(store)

    asked_from = asyncio.get_running_loop()
    monkeypatch.setattr(Store, "latest", looking)
    async with trainer(bus, blobs, tmp_path, "t1"):
        async with asyncio.timeout(90):
            await asked.wait()
        path.write_bytes(whole)

        async def left() -> bool:
            consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
            return [(event.group, event.reason) for event in consumed] == [("r-g000000", "run_stopped")]

        await until(left)


class CrashError(Exception):
    """The process dies here."""


PLACES = [
    ("commit", 1), ("write_weights", 1), ("publish published", 1), ("publish opened", 1), ("publish joined", 1),
    ("publish contributed", 1), ("commit", 1), ("write_weights", 2), ("publish committed", 1), ("publish committed", 2),
    ("publish consumed", 1), ("publish consumed", 2), ("publish consumed", 3), ("publish published", 1), ("ack", 1),
    ("ack", 2), ("ack", 3),
]  # fmt: skip
"""What the trainer makes durable, and the how manyth time in a life it is the last."""


class Crashes:
    """Lets the trainer die right after the n-th time that it made a certain thing durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target: tuple[str, int] | None = None
        self.hit: list[tuple[str, int]] = []
        self.down = False
        self._seen: Counter[str] = Counter()
        for owner, name in ((Store, "commit"), (Learner, "write_weights")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name))
        for owner, name in ((Bus, "publish"), (Delivery, "ack")):
            monkeypatch.setattr(owner, name, self._wrapped_async(getattr(owner, name), name))

    def start(self, target: tuple[str, int] | None) -> None:
        self.target, self.down = target, False
        self._seen.clear()

    def step(self, place: str) -> None:
        self._seen[place] += 1
        now = (place, self._seen[place])
        if self.target == now:
            self.hit.append(now)
            self.target, self.down = None, True
            raise CrashError(place)

    def alive(self) -> None:
        if self.down:
            raise CrashError("a dead process does nothing more")

    def _wrapped(self, original: Callable, name: str) -> Callable:
        def wrapped(*args, **kwargs):
            self.alive()
            result = original(*args, **kwargs)
            self.step(name)
            return result

        return wrapped

    def _wrapped_async(self, original: Callable, name: str) -> Callable:
        async def wrapped(this, *args, **kwargs):
            if isinstance(this, Bus) and this.name != "trainer":
                return await original(this, *args, **kwargs)
            self.alive()
            result = await original(this, *args, **kwargs)
            self.step(f"{name} {args[0].rpartition('.')[2]}" if isinstance(this, Bus) else name)
            return result

        return wrapped


async def test_a_crash_at_every_step_of_a_commit(
    bus: Bus, nats_server, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life of the trainer ends at another place; everything happens exactly once."""
    updates = 20
    await start_run(bus, model, updates=updates)
    await offer(bus, *(ready(n) for n in range(updates * B)))
    crashes = Crashes(monkeypatch)
    runs = Bucket(bus, subjects.KV_RUNS, RunSpec)
    async with asyncio.TaskGroup() as tasks:
        cell = Cell(bus, blobs, "h0")
        training = tasks.create_task(cell.train())
        for life in itertools.count():
            crashes.start(PLACES[life] if life < len(PLACES) else None)
            with contextlib.suppress(CrashError, ExceptionGroup):
                async with (
                    Bus(nats_server.url, "trainer") as connection,
                    trainer(connection, blobs, tmp_path, f"t{life}"),
                ):

                    async def over(life: int = life) -> bool:
                        found = await runs.get(RUN)
                        return crashes.down or (found is not None and found[0].state == "finished")

                    await until(over)
            found = await runs.get(RUN)
            if found is not None and found[0].state == "finished":
                break
            assert crashes.down
        training.cancel()
    await check_exactly_once(bus, updates * B, updates)
    assert crashes.hit == PLACES


class Trainers:
    """Processes of the trainer, killed and started again as a supervisor would."""

    def __init__(self, url: str, state: Path, log: Path) -> None:
        self._env = {**os.environ, "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1"}
        self._log = log
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self._log.open("ab") as out:
            command = [sys.executable, "-m", "opengyre.trainer"]
            self.running.append(subprocess.Popen(command, env=self._env, stdout=out, stderr=out, cwd=self._log.parent))

    def leader(self, replica: str) -> subprocess.Popen[bytes]:
        return next(process for process in self.running if f"-{process.pid}-" in replica)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(60)
        self.running.remove(process)

    def stop(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            process.wait(60)


@pytest.mark.slow
async def test_kill_9_of_the_process_that_leads(
    bus: Bus, blobs: Blobs, nats_server, model: Path, tmp_path: Path
) -> None:
    """Two replicas; the leader is killed when a contribution, and then a commit, is seen; cells are no better."""
    updates, rng = 12, random.Random(5)
    # What a killed process held comes back after this; three missed beats of a live one are not what is tested here.
    config = next(config for stream, config in consumers() if stream == subjects.GROUPS)
    await bus.js.add_consumer(subjects.GROUPS, config.evolve(ack_wait=1))
    await start_run(bus, model, updates=updates)
    trainers = Trainers(nats_server.url, tmp_path / "state", tmp_path / "trainer.log")
    leases = Bucket(bus, subjects.KV_LEASES, LeaseOwner)
    kills = 0
    try:
        for _ in range(2):
            trainers.start()
        async with asyncio.TaskGroup() as tasks:
            cells = [Cell(bus, blobs, f"h{n}") for n in range(2)]
            training = [tasks.create_task(cell.train(random.Random(n), killed=True)) for n, cell in enumerate(cells)]
            await offer(bus, *(ready(n) for n in range(updates * B)))
            async with asyncio.timeout(240):
                async for stored in follow(bus, subjects.UPDATES, f"gyre.v1.update.{RUN}.>"):
                    event = stored.event()
                    if isinstance(event, RunFinished):
                        break
                    wanted = (Contributed, Committed)[kills % 2]
                    if isinstance(event, wanted) and kills < 3 and event.update > 3 * kills:
                        await asyncio.sleep(rng.random() * 0.03)
                        found = await leases.get("leader.trainer")
                        if found is None:
                            continue
                        trainers.kill(trainers.leader(found[0].owner))
                        trainers.start()
                        kills += 1
            for cell in cells:
                cell.stop.set()
            await asyncio.gather(*training)
    finally:
        trainers.stop()
    assert kills == 3
    await check_exactly_once(bus, updates * B, updates)
