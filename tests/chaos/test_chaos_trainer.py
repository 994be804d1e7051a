"""kill -9 of the trainer at 50 moments, many of them inside a commit: each execution is consumed exactly once, and
the weights are those that an undisturbed trainer makes."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from opengyre.proto import subjects
from opengyre.proto.ids import group_of
from opengyre.proto.run import RunSpec
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, LeaseOwner
from opengyre.shared.bus.topology import consumers
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trainer.learner import Learner, Total
from opengyre.trainer.store import Store
from support import eventually
from support.trainer_fakes import CONFIG, RUN, B, Cell, check_exactly_once, events, offer, ready, start_run
from support.trainer_lives import Lives

KILLS, UPDATES, SEED = 50, 60, 11
MOMENTS = ("opened", "contributed", "writing", "writing", "renamed", "weights", "committed", "published", "any")


class Moments:
    """Waits for a moment of a life, and a little longer: that is when it is killed."""

    def __init__(self, bus: Bus, state: Path, rng: random.Random) -> None:
        self._bus, self._rng = bus, rng
        self._checkpoints, self._weights = state / "trainer" / RUN, state / "weights" / RUN
        self.hit: Counter[str] = Counter()

    def half_written(self) -> bool:
        return any(self._checkpoints.glob(".tmp-*"))

    def _versions(self, folder: Path) -> set[str]:
        return {path.name for path in folder.glob("v[0-9]*")}

    def _told(self, subject: str, stream: str) -> Callable[[], Awaitable[int]]:
        async def sequence() -> int:
            last = await self._bus.last(subject, stream)
            return last.sequence if last else 0

        return sequence

    async def wait(self, moment: str) -> None:
        if moment == "any":
            await asyncio.sleep(self._rng.uniform(0, 1.0))
            return
        if moment == "writing":
            await eventually(self.half_written, 90, 0.001)
        elif moment in ("renamed", "weights"):
            folder = self._checkpoints if moment == "renamed" else self._weights
            before = self._versions(folder)
            await eventually(lambda: self._versions(folder) - before, 90, 0.001)
        else:
            stream = subjects.WEIGHTS if moment == "published" else subjects.UPDATES
            of = subjects.weights if moment == "published" else subjects.update
            told = self._told(of(RUN, moment), stream)
            before = await told()

            async def news() -> bool:
                return await told() > before

            await eventually(news, 90, 0.001)
        await asyncio.sleep(self._rng.uniform(0, 0.015))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(900)
async def test_fifty_deaths_of_the_trainer_lose_and_double_nothing(
    bus: Bus, nats_server, tmp_path: Path, python: str
) -> None:
    # What a killed process held comes back after this, at the cost of some deliveries that are known by then.
    config = next(config for stream, config in consumers() if stream == subjects.GROUPS)
    await bus.js.add_consumer(subjects.GROUPS, config.evolve(ack_wait=0.5))
    state, rng = tmp_path / "state", random.Random(SEED)
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    await start_run(bus, tmp_path / "model", updates=UPDATES)
    leases, runs = Bucket(bus, subjects.KV_LEASES, LeaseOwner), Bucket(bus, subjects.KV_RUNS, RunSpec)
    moments = Moments(bus, state, rng)
    inside = 0
    async with (
        Blobs(state / "blobs", CacheSettings()) as blobs,
        Lives(python, nats_server.url, state, tmp_path / "trainer.log") as lives,
        asyncio.TaskGroup() as tasks,
    ):
        cells = [
            Cell(bus, blobs, f"h{n}", gradient=lambda item: len(item.executions) * share(item.group.group))
            for n in range(2)
        ]
        training = [tasks.create_task(cell.train(random.Random(n), killed=True)) for n, cell in enumerate(cells)]
        await offer(bus, *(ready(number) for number in range(UPDATES * B)))
        for number in range(KILLS):
            moment = MOMENTS[number % len(MOMENTS)]
            await lives.begin()
            await moments.wait(moment)
            lives.kill()
            moments.hit[moment] += 1
            inside += moments.half_written()
            # The lease of the dead would run out by itself in some seconds; it fences nothing that is durable.
            await leases.delete("leader.trainer")
        await lives.begin()

        async def finished() -> bool:
            found = await runs.get(RUN)
            return found is not None and found[0].state == "finished"

        await eventually(finished, 300)
        for task in training:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*training)
    assert inside >= 5, "several deaths left a checkpoint half written"
    await check_exactly_once(bus, UPDATES * B, UPDATES)
    await check_weights(bus, tmp_path / "model", state / "trainer" / RUN)


def share(group: str) -> float:
    """Each element of the gradient of one execution of this group: so small that no sum of an update is clipped."""
    return (1 + int(group[-6:]) % 7) * 1e-4


async def check_weights(bus: Bus, model: Path, checkpoints: Path) -> None:
    """The last checkpoint, optimizer and all, is that of a trainer that never died and was given the same executions in
    the same updates, each once."""
    [spec, _] = await Bucket(bus, subjects.KV_RUNS, RunSpec).get(RUN) or (None, 0)
    assert spec is not None
    undisturbed = Learner(model, spec.optimization, resume=False)
    before = {name: tensor.clone() for name, tensor in undisturbed.state().items()}
    parameters = undisturbed.policy.parameters()
    root = sum(parameter.numel() for parameter in parameters.values()) ** 0.5
    for event in await events(bus, subjects.UPDATES, subjects.update(RUN, "committed")):
        value = sum(share(group_of(execution)) for execution in event.executions)
        assert event.gradient_norm == pytest.approx(value * root, rel=1e-5)
        total = Total({name: torch.full(p.shape, value, dtype=torch.float64) for name, p in parameters.items()})
        undisturbed.step(total, 1.0, update=event.update, updates=spec.updates)
    store = Store(checkpoints, 3)
    record = store.latest()
    assert record is not None
    found = Learner(store.directory(record.version), spec.optimization, resume=True).state()
    wanted = undisturbed.state()
    assert found.keys() == wanted.keys() > before.keys(), "the optimizer has a state"
    for name in wanted.keys() - {"rng"}:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-7, msg=lambda m, of=name: f"{of}: {m}")
        assert name not in before or (found[name] - before[name]).abs().max() > 1e-3, "it was trained"
