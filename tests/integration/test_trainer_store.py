"""Checkpoints on a real disk: complete or absent, checked, and committed by one trainer only."""

from pathlib import Path

import pytest
import torch

from opengyre.learn.codec import flatten
from opengyre.proto.run import Optimization
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.trainer.learner import Learner, Total
from opengyre.trainer.store import CheckpointError, CommittedElsewhereError, Record, Store, clean_weights, prune_weights

pytestmark = pytest.mark.torch
CONFIG = TinyConfig(vocab_size=16, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)
FILES = {"model.safetensors": b"abc", "optimizer.pt": b"def"}


def record(version: int) -> Record:
    return Record(run="r", version=version, published=0, frontier=("g1",))


def test_the_last_commit_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "r", keep=2)
    assert store.latest() is None
    stored = [store.commit(record(version), FILES) for version in range(4)][-1]
    assert store.latest() == stored
    store.check(stored)
    store.prune()
    assert store.versions() == [2, 3]
    assert (store.directory(3) / "model.safetensors").read_bytes() == b"abc"


def test_a_version_is_committed_once(tmp_path: Path) -> None:
    one, other = Store(tmp_path, keep=3), Store(tmp_path, keep=3)
    first = one.commit(record(1), FILES)
    with pytest.raises(CommittedElsewhereError, match="version 1 of r"):
        other.commit(record(1), {"model.safetensors": b"xyz"})
    assert other.latest() == first
    other.check(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001"], "the loser leaves nothing behind"


def test_a_version_whose_checkpoint_was_pruned_is_not_committed_again(tmp_path: Path) -> None:
    """A trainer that was frozen before its rename, while another one made many updates."""
    store = Store(tmp_path, keep=2)
    for version in range(5):
        store.commit(record(version), FILES)
    store.prune()
    with pytest.raises(CommittedElsewhereError, match="version 1 of r"):
        Store(tmp_path, keep=2).commit(record(1), {"model.safetensors": b"xyz"})
    assert store.versions() == [3, 4]
    assert not (tmp_path / "v000001").exists()


def test_what_an_interrupted_commit_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    stored = store.commit(record(1), FILES)
    half = tmp_path / ".tmp-abc"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    unmarked = tmp_path / "v000002"
    unmarked.mkdir()
    assert store.latest() == stored
    store.clean()
    assert not half.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "record.json"])
def test_a_damaged_checkpoint_is_named_and_not_passed_over(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path, keep=3)
    store.commit(record(1), FILES)
    stored = store.commit(record(2), FILES)
    (store.directory(2) / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=f"v000002/{name}"):
        store.check(store.latest() or stored)


def test_weights_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    for version in range(6):
        (tmp_path / f"v{version:06d}").mkdir()
    prune_weights(tmp_path, {1, 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000004", "v000005"]


def test_what_a_killed_trainer_left_beside_the_weights_is_removed(tmp_path: Path) -> None:
    for name in ("v000001", ".tmp-v000000", ".v000002.k3x_a1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    clean_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def learner(directory: Path, *, resume: bool = False) -> Learner:
    return Learner(directory, Optimization(learning_rate=0.01, weight_decay=0.1), resume=resume)


def gradient(seed: int, value: float | None = None) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    parameters = TinyModel(CONFIG).named_parameters()
    return flatten({
        name: torch.randn(p.shape, generator=generator) if value is None else torch.full(p.shape, value)
        for name, p in parameters
    })  # fmt: skip


def step(one: Learner, *gradients: bytes, scale: float = 1.0):
    total = Total()
    for number, content in enumerate(gradients):
        one.add(total, f"c{number}", content)
    return one.step(total, scale), total


def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    one = learner(tmp_path / "m")
    store = Store(tmp_path / "r", keep=3)
    step(one, gradient(1))
    stored = store.commit(record(1), one.state())
    other = learner(store.directory(stored.version), resume=True)
    for each in (one, other):
        step(each, gradient(2), gradient(3))
    assert other.state() == one.state()
    assert one.write_weights(tmp_path / "w", "r", 2) == other.write_weights(tmp_path / "w", "r", 2)


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    apart, whole = learner(tmp_path / "m"), learner(tmp_path / "m")
    (stepped, _), (again, _) = (
        step(apart, gradient(1, 0.25), gradient(2, 0.5)),
        step(whole, gradient(3, 1.5), scale=0.5),
    )
    assert stepped == again
    assert apart.state() == whole.state()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    one = learner(tmp_path / "m")
    before = one.state()["model.safetensors"]
    stepped, total = step(one, gradient(1), gradient(2, float("nan")))
    assert stepped.skipped is not None
    assert stepped.skipped.startswith("non_finite_gradient: model.")
    assert total.broken == ["c1"]
    assert one.state()["model.safetensors"] == before
    assert one.optimizer.state == {}
