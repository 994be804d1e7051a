"""Checkpoints on a real disk: complete or absent, checked, and committed by one trainer only."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from opengyre.policy.open import open_policy
from opengyre.proto.run import Optimization
from opengyre.ranks.crew import crew
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.trainer import checkpoint
from opengyre.trainer.learner import Learner, Total, read_policy, write_policy
from opengyre.trainer.store import CheckpointError, CommittedElsewhereError, Record, Store, clean_weights, prune_weights
from opengyre.weights.canary import CANARY_FILE, read_canary
from opengyre.weights.manifest import read, verify
from support.checkpoint_ranks import resharded
from support.gradients import flatten
from support.models import LLAMA, save_stock

pytestmark = pytest.mark.torch
CONFIG = TinyConfig(vocab_size=16, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)
FILES = {"state/one.distcp": b"abc", "config.json": b"def"}


def writing(files: dict[str, bytes]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)

    return write


def record(version: int) -> Record:
    return Record(run="r", version=version, published=0, frontier=("g1",))


def test_the_last_commit_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "r", keep=2)
    assert store.latest() is None
    stored = [store.commit(record(version), writing(FILES)) for version in range(4)][-1]
    assert store.latest() == stored
    store.check(stored)
    store.prune()
    assert store.versions() == [2, 3]
    assert (store.directory(3) / "state" / "one.distcp").read_bytes() == b"abc"


def test_a_version_is_committed_once(tmp_path: Path) -> None:
    one, other = Store(tmp_path, keep=3), Store(tmp_path, keep=3)
    first = one.commit(record(1), writing(FILES))
    with pytest.raises(CommittedElsewhereError, match="version 1 of r"):
        other.commit(record(1), writing({"config.json": b"xyz"}))
    assert other.latest() == first
    other.check(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001"], "the loser leaves nothing behind"


def test_a_version_whose_checkpoint_was_pruned_is_not_committed_again(tmp_path: Path) -> None:
    """A trainer that was frozen before its rename, while another one made many updates."""
    store = Store(tmp_path, keep=2)
    for version in range(5):
        store.commit(record(version), writing(FILES))
    store.prune()
    with pytest.raises(CommittedElsewhereError, match="version 1 of r"):
        Store(tmp_path, keep=2).commit(record(1), writing({"config.json": b"xyz"}))
    assert store.versions() == [3, 4]
    assert not (tmp_path / "v000001").exists()


def test_what_an_interrupted_commit_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    stored = store.commit(record(1), writing(FILES))
    half = tmp_path / ".tmp-abc"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    unmarked = tmp_path / "v000002"
    unmarked.mkdir()
    assert store.latest() == stored
    store.clean()
    assert not half.exists()


def test_a_commit_that_ends_while_a_successor_cleans_is_whole_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer that lost its lease under way: it names what it wrote just when that is being removed."""
    store, rmtree, renamed = Store(tmp_path, keep=3), shutil.rmtree, []

    def halfway(path: Path, **options: Any) -> None:
        monkeypatch.undo()
        for half in tmp_path.glob(".tmp-*/state"):
            rmtree(half)
        with contextlib.suppress(FileNotFoundError):
            renamed.append((tmp_path / ".tmp-abc").rename(store.directory(1)))
        rmtree(path, **options)

    other = store.commit(record(1), writing(FILES))
    store.directory(1).rename(tmp_path / ".tmp-abc")
    monkeypatch.setattr(shutil, "rmtree", halfway)
    store.clean()
    assert renamed == []
    assert store.latest() is None
    assert list(tmp_path.iterdir()) == []
    assert store.commit(record(1), writing(FILES)) == other


@pytest.mark.parametrize("name", ["state/one.distcp", "record.json"])
def test_a_damaged_checkpoint_is_named_and_not_passed_over(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path, keep=3)
    store.commit(record(1), writing(FILES))
    stored = store.commit(record(2), writing(FILES))
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


def same(one: Learner, other: Learner) -> bool:
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def step(one: Learner, *gradients: bytes, scale: float = 1.0, update: int = 1, updates: int | None = None):
    total = Total()
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(gradients):
            path = Path(folder) / f"c{number}"
            path.write_bytes(content)
            one.check(path)
            one.add(total, path.name, path)
    return one.step(total, scale, update=update, updates=updates), total


def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    one = learner(tmp_path / "m")
    store = Store(tmp_path / "r", keep=3)
    step(one, gradient(1))
    stored = store.commit(record(1), one.save)
    other = learner(store.directory(stored.version), resume=True)
    for each in (one, other):
        step(each, gradient(2), gradient(3))
    assert same(other, one)
    assert one.write_weights(tmp_path / "w", "r", 2) == other.write_weights(tmp_path / "w", "r", 2)


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    apart, whole = learner(tmp_path / "m"), learner(tmp_path / "m")
    (stepped, _), (again, _) = (
        step(apart, gradient(1, 0.25), gradient(2, 0.5)),
        step(whole, gradient(3, 1.5), scale=0.5),
    )
    assert stepped == again
    assert same(apart, whole)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    one = learner(tmp_path / "m")
    before = {name: tensor.clone() for name, tensor in one.state().items()}
    stepped, total = step(one, gradient(1), gradient(2, float("nan")))
    assert stepped.skipped is not None
    assert stepped.skipped.startswith("non_finite_gradient: model.")
    assert total.broken == ["c1"]
    assert one.state().keys() == before.keys(), "no state of the optimizer"
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state().items() if name != "rng")


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_every_optimizer_resumes(tmp_path: Path, kind: Literal["adamw", "adafactor"]) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    settings = Optimization(learning_rate=0.01, optimizer=kind, schedule="linear", warmup_updates=1)
    one = Learner(tmp_path / "m", settings, resume=False)
    store = Store(tmp_path / "r", keep=3)
    first = step(one, gradient(1), update=1, updates=4)[0]
    store.commit(record(1), one.save)
    other = Learner(store.directory(1), settings, resume=True)
    seconds = [step(each, gradient(2), update=2, updates=4)[0] for each in (one, other)]
    assert same(one, other)
    assert first.learning_rate == 0.01
    assert [second.learning_rate for second in seconds] == [0.01] * 2
    wrong = Optimization(optimizer="adafactor" if kind == "adamw" else "adamw")
    with pytest.raises(CheckpointError, match=rf"the optimizer's tensor .* is not one that {wrong.optimizer} has"):
        Learner(store.directory(1), wrong, resume=True)


def test_a_checkpoint_of_the_former_layout_is_resumed(tmp_path: Path) -> None:
    """Version 0.1 wrote a model directory with the optimizer beside it."""
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    one = learner(tmp_path / "m")
    step(one, gradient(1))
    former = tmp_path / "v000001"
    save_pretrained(cast("TinyModel", one.model), former)
    torch.save({"optimizer": one.optimizer.state_dict(), "rng": torch.get_rng_state()}, former / "optimizer.pt")
    assert all(
        torch.equal(tensor, one.policy.tensors()[name]) for name, tensor in read_policy(former).tensors().items()
    )
    other = learner(former, resume=True)
    for each in (one, other):
        step(each, gradient(2))
    assert same(other, one)
    (former / "optimizer.pt").write_bytes(b"none")
    with pytest.raises(CheckpointError, match=r"v000001/optimizer\.pt cannot be used"):
        learner(former, resume=True)


def test_a_checkpoint_without_its_tensors_is_refused_by_name(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    store = Store(tmp_path / "r", keep=3)
    stored = store.commit(record(1), learner(tmp_path / "m").save)
    assert "state/.metadata" in stored.checksums
    (store.directory(1) / "state" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"v000001/state/\.metadata cannot be read"):
        store.check(stored)
    with pytest.raises(CheckpointError, match="v000001/state cannot be used"):
        learner(store.directory(1), resume=True)


def test_the_order_and_division_of_contributions_change_rounding_only(tmp_path: Path) -> None:
    """In float64 a sum of float32 parts is the same in any order, or differs in its last bit."""
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    parts = [gradient(seed) for seed in range(7)]
    one, other = learner(tmp_path / "m"), learner(tmp_path / "m")
    step(one, *parts)
    step(other, *reversed(parts))
    for name, tensor in one.policy.tensors().items():
        torch.testing.assert_close(tensor, other.policy.tensors()[name], rtol=1e-7, atol=0)


def test_a_canary_changes_nothing_and_still_counts(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "m")
    for kind in ("adamw", "adafactor"):
        settings = Optimization(learning_rate=0.01, weight_decay=0.1, optimizer=kind, canary=True)
        one = Learner(tmp_path / "m", settings, resume=False)
        before = {name: tensor.clone() for name, tensor in one.policy.tensors().items()}
        stepped, _ = step(one, gradient(1))
        assert (stepped.skipped, stepped.learning_rate) == (None, 0.0)
        assert stepped.gradient_norm > 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.policy.tensors().items())


def test_a_stock_model_is_trained_and_its_version_is_a_model_directory(tmp_path: Path) -> None:
    save_stock(tmp_path / "m", LLAMA, shard_bytes=4096)
    one = learner(tmp_path / "m")
    assert (one.vocabulary, one.context) == (40, 128)
    parameters = one.policy.parameters()
    grad = flatten({name: torch.full(p.shape, 0.5) for name, p in parameters.items()})
    step(one, grad)
    store = Store(tmp_path / "r", keep=3)
    store.commit(record(1), one.save)
    other = learner(store.directory(1), resume=True)
    step(one, grad)
    step(other, grad)
    assert same(one, other)
    manifest = one.write_weights(tmp_path / "w" / "v000002", "r", 2)
    verify(manifest)
    written = open_policy(tmp_path / "w" / "v000002").tensors()
    assert all(torch.equal(tensor, written[name]) for name, tensor in one.policy.tensors().items())


def test_a_version_says_the_log_probs_of_its_canary(tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=3), tmp_path / "tiny")
    save_stock(tmp_path / "stock", LLAMA)
    for name in ("tiny", "stock"):
        one = learner(tmp_path / name)
        directory = tmp_path / "w" / name
        manifest = one.write_weights(directory, "r", 0)
        assert CANARY_FILE in {file.name for file in manifest.files}, "its manifest vouches for it"
        canary = read_canary(directory)
        assert canary is not None
        tokens = torch.tensor(canary.prompts)
        with torch.no_grad():
            answer = open_policy(directory).model(tokens)
        logits = answer if isinstance(answer, torch.Tensor) else answer.logits
        for row, prompt in enumerate(canary.prompts):
            expected = torch.log_softmax(logits[row].double(), -1)
            for place, logprob in enumerate(canary.logprobs[row], start=1):
                assert logprob == pytest.approx(expected[place - 1, prompt[place]].item(), abs=1e-4)
        (directory / CANARY_FILE).write_bytes(b"damaged")
        assert one.write_weights(directory, "r", 0) == manifest
        verify(manifest)
        assert read_canary(directory) == canary
        assert CANARY_FILE not in learner(directory).extra, "the next version has its own"


def test_a_version_that_was_written_without_a_canary_stays_as_it_is(tmp_path: Path) -> None:
    save_stock(tmp_path / "w", LLAMA)
    before = read(tmp_path / "w")
    policy = open_policy(tmp_path / "w")
    config = {"config.json": (tmp_path / "w" / "config.json").read_bytes()}
    assert write_policy(policy, config, tmp_path / "w", "r", 0) == before


async def test_a_checkpoint_is_read_and_written_by_other_numbers_of_processes(tmp_path: Path) -> None:
    """One process wrote it; two hold it in shards, and write it from there; one reads that again."""
    save_stock(tmp_path / "m", LLAMA)
    one = learner(tmp_path / "m")
    store = Store(tmp_path / "r", keep=3)
    store.commit(record(1), one.save)
    async with crew(2, start_s=120) as ranks:
        given = [(store.directory(1), tmp_path / "by-two")] * 2
        found = await ranks.burst(resharded, given, timeout_s=60)
    wanted = one.policy.tensors()
    for tensors, held in found:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())
        assert held < 0.6 * sum(tensor.numel() for tensor in wanted.values())
    again = checkpoint.load(tmp_path / "by-two")
    assert again.keys() == {f"model/{name}" for name in wanted}
    assert all(torch.equal(again[f"model/{name}"], tensor) for name, tensor in wanted.items())
