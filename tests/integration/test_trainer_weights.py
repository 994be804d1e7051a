"""Weights as the trainer keeps them: mended where they are damaged, kept where a loss needs them, of any model."""

import functools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opengyre.policy.open import open_policy
from opengyre.proto import subjects
from opengyre.proto.run import Dispatch, Optimization, RunSpec
from opengyre.proto.update import Committed
from opengyre.proto.weights import Manifest, WeightsPublished, WeightsRefused
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, bootstrap
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trainer import learner
from opengyre.trainer.state import State
from opengyre.weights.manifest import damaged, read, verify
from opengyre.weights.write import version_directory, write_version
from support import eventually
from support.models import LLAMA, QWEN3, save_stock
from support.trainer_cells import cells, real_group, through
from support.trainer_fakes import CONFIG, RUN, events, offer, trainer

pytestmark = pytest.mark.torch

B, G = 1, 4


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that trainers have looked at, each time: one that starts does so by itself, soon after it has published
    what it has, and would mend what a test spoils then before anybody finds it."""
    versions: list[int] = []
    mend = State.mend

    def looking(state: State, version: int) -> list[str]:
        found = mend(state, version)
        versions.append(version)
        return found

    monkeypatch.setattr(State, "mend", looking)
    return versions


async def start(bus: Bus, model: Path, updates: int, mu: int, **optimization: Any) -> None:
    spec = RunSpec(
        run=RUN, model=str(model), updates=updates, dispatch=Dispatch(phi=0, mu=mu, batch_groups=B, group_size=G),
        optimization=Optimization(learning_rate=0.01, **optimization),
    )  # fmt: skip
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)


async def committed(bus: Bus) -> list[Committed]:
    return await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))


async def reach(bus: Bus, version: int) -> None:
    async def there() -> bool:
        return len(await committed(bus)) >= version

    await eventually(there, 90)


async def published(bus: Bus, version: int) -> Manifest:
    async def there() -> bool:
        found: list[WeightsPublished] = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
        return bool(found) and found[-1].manifest.version == version

    await eventually(there, 90)
    found = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    return found[-1].manifest


async def refuse(bus: Bus, version: int, boot: str = "b0") -> None:
    event = WeightsRefused(run=RUN, version=version, host="h9", boot=boot, error="a checksum")
    await bus.publish(subjects.weights(RUN, "refused"), event)


def spoil(manifest: Manifest, name: str) -> None:
    path = Path(manifest.directory) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert damaged(Path(manifest.directory)) == [name]


async def test_shards_that_a_host_refused_are_written_again(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[int]
) -> None:
    """Of what is trained, and of an older version that is still what is published."""
    monkeypatch.setattr(learner, "write_version", functools.partial(write_version, shard_bytes=2000))
    await start(bus, model, updates=3, mu=3)
    async with trainer(bus, blobs, tmp_path, "t0", keep_checkpoints=1), cells(bus, blobs, tmp_path, through):
        first = await published(bus, 0)
        shards = [file.name for file in first.files if file.name.startswith("model-")]
        assert len(shards) > 2
        await eventually(lambda: looked == [0])
        spoil(first, shards[1])
        await refuse(bus, 0)
        await eventually(lambda: not damaged(Path(first.directory)))
        await offer(bus, real_group(RUN, 0, G), real_group(RUN, 1, G))
        await reach(bus, 2)
        spoil(first, shards[0])
        (Path(first.directory) / shards[2]).unlink()
        await refuse(bus, 0, boot="b1")
        await eventually(lambda: not damaged(Path(first.directory)))
        verify(first)
        assert read(Path(first.directory)) == first
        await refuse(bus, 7, boot="b2")
        await offer(bus, real_group(RUN, 2, G))
        verify(await published(bus, 3))


async def test_what_was_damaged_while_no_trainer_lived_is_whole_when_one_has_started(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    await start(bus, model, updates=4, mu=2)
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through):
        first = await published(bus, 0)
        await offer(bus, real_group(RUN, 0, G))
        await reach(bus, 1)
    base = read(version_directory(tmp_path / "state" / "weights" / RUN, 1))
    spoil(first, "config.json")
    spoil(base, "model.safetensors")
    async with trainer(bus, blobs, tmp_path, "t1"):
        await eventually(lambda: not damaged(Path(first.directory)) and not damaged(Path(base.directory)), 90)
    verify(first)
    verify(base)


async def test_what_is_published_is_told_again_to_a_broker_that_lost_it(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    """It is an older version than the last checkpoint's: nothing would be admitted until the burst's end."""
    await start(bus, model, updates=4, mu=2)
    async with trainer(bus, blobs, tmp_path, "t0", keep_checkpoints=1), cells(bus, blobs, tmp_path, through):
        first = await published(bus, 0)
        await offer(bus, real_group(RUN, 0, G))
        await reach(bus, 1)
    await bus.js.delete_stream(subjects.WEIGHTS)
    await bootstrap(bus)
    spoil(first, "model.safetensors")
    async with trainer(bus, blobs, tmp_path, "t1"):
        assert await published(bus, 0) == first
        assert damaged(Path(first.directory)) == [], "before it is told"


async def test_a_published_version_that_cannot_be_mended_stops_no_training(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoint is gone as well; nobody could serve it, and the next one is published in its place."""
    await start(bus, model, updates=2, mu=2)
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through):
        first = await published(bus, 0)
        await offer(bus, real_group(RUN, 0, G))
        await reach(bus, 1)
    spoil(first, "model.safetensors")
    shutil.rmtree(tmp_path / "state" / "trainer" / RUN / "v000000")
    async with trainer(bus, blobs, tmp_path, "t1"), cells(bus, blobs, tmp_path, through):
        await offer(bus, real_group(RUN, 1, G))
        verify(await published(bus, 2))
    assert "version 0 cannot be published again" in caplog.text


async def test_a_cell_that_finds_its_base_damaged_trains_on_it_once_it_is_mended(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, looked: list[int]
) -> None:
    await start(bus, model, updates=1, mu=1)
    async with trainer(bus, blobs, tmp_path, "t0"):
        first = await published(bus, 0)
        await eventually(lambda: looked == [0])
        spoil(first, "model.safetensors")
        await offer(bus, real_group(RUN, 0, G))
        async with cells(bus, blobs, tmp_path, through):
            await reach(bus, 1)
    (refused,) = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "refused"))
    assert (refused.version, refused.host) == (0, "h0")


@pytest.mark.parametrize(("fields", "kind"), [(LLAMA, "llama"), (QWEN3, "qwen3"), (None, "tiny")])
async def test_every_kind_of_model_is_trained_towards_its_reward_and_its_first_version(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, fields: dict[str, Any] | None, kind: str
) -> None:
    """The initial model is kept as the reference of the KL term, however many versions follow."""
    chosen = save_stock(tmp_path / kind, fields) if fields else model
    await start(bus, chosen, updates=5, mu=1, kl=0.1)
    async with trainer(bus, blobs, tmp_path, "t0", keep_checkpoints=1), cells(bus, blobs, tmp_path, through):
        await offer(bus, *(real_group(RUN, number, G) for number in range(3)))
        await reach(bus, 3)
        first = version_directory(tmp_path / "state" / "weights" / RUN, 0)
        spoil(read(first), "config.json")
        await refuse(bus, 0)
        await eventually(lambda: not damaged(first))
        await offer(bus, *(real_group(RUN, number, G) for number in range(3, 5)))
        last = await published(bus, 5)
    done = await committed(bus)
    assert [event.skipped for event in done] == [None] * 5
    assert done[0].stats.reference_kl_sum == pytest.approx(0, abs=1e-5)
    assert all(event.stats.reference_kl_sum > 1e-4 for event in done[1:])
    assert all(0 < event.stats.unique_tokens <= event.stats.path_tokens for event in done)
    trained, begun = open_policy(Path(last.directory)), open_policy(chosen)
    assert trained.model_type == kind
    assert not any(torch.equal(tensor, begun.tensors()[name]) for name, tensor in trained.tensors().items())


async def test_a_model_that_cannot_be_trained_is_waited_for_by_the_field_that_is_why(
    bus: Bus, blobs: Blobs, tmp_path: Path
) -> None:
    fields = {**LLAMA, "model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64}
    await start(bus, save_stock(tmp_path / "model", fields), updates=1, mu=1)
    async with trainer(bus, blobs, tmp_path, "t0") as context:
        await eventually(lambda: any("model_type is 'gpt2'" in wait.what for wait in context.waits.report()), 90)
