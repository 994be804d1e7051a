"""What is trained of a group, and its figures."""

import random
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from opengyre.host import compute
from opengyre.host.compute import Found, Work, flat, flat_is_cheaper, forest_of, gradient, tree
from opengyre.host.engine import make_learner
from opengyre.host.gradients import TorchLearner, executions_of, figures, items_of, zero_gradients
from opengyre.host.learners import Accumulator, UntrainableError, plus
from opengyre.learn.gradient import GradientStats, Item
from opengyre.policy.open import Policy
from opengyre.policy.stock import build
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest
from opengyre.shared.settings import HostSettings
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.forest import Path as Worth
from opengyre.treegrad.forest import build as build_forest
from opengyre.treegrad.split import split
from support.models import LLAMA, QWEN3
from support.treegrad import error, float64, make, random_paths

pytestmark = pytest.mark.torch


def member(advantage: float, trained: int, score: float = 0.5, sequences: int = 1) -> Member:
    span = Span(start=1, end=3, logprobs=(-1.0, -1.0), versions=(0, 0), temperature=1.0)
    return Member(
        execution="r-g000000-e00",
        score=score,
        advantage=advantage,
        sequences=(Sequence(tokens=(1, 2, 3), spans=(span,)),) * sequences,
        trained_tokens=trained,
        path_tokens=9,
    )


def work(weight: float = 1.0, update: int = 3, attempt: str = "a", **more) -> WorkItem:
    base = Manifest(run="r", version=update - 1, parent=None, step=0, directory="/w", files=())
    group = GroupReady(run="r", group="r-g000000", task="t", version=0)
    optimization = more.pop("optimization", Optimization())
    return WorkItem(
        update=update, attempt=attempt, base=base, group=group, weight=weight, optimization=optimization, **more
    )


def test_a_token_weighs_its_executions_share_over_the_executions_tokens() -> None:
    items = items_of([member(1.0, 4, sequences=2), member(-1.0, 10)], work(1 / 64))
    assert [(item.advantage, item.weight) for item in items] == [
        (1.0, 1 / 256),
        (1.0, 1 / 256),
        (-1.0, 1 / 640),
    ]


def test_members_without_advantage_or_tokens_are_left_out_and_counted() -> None:
    members = [member(0.0, 4, score=1.0), member(1.0, 0, score=0.25)]
    assert items_of(members, work()) == []
    stats = figures(members, GradientStats(), work())
    assert (stats.executions, stats.path_tokens, stats.score_sum, stats.zero_variance_groups) == (2, 18, 1.25, 0)
    assert figures([member(0.0, 4)], GradientStats(), work()).zero_variance_groups == 1


def test_members_without_advantage_are_trained_where_another_policy_pulls() -> None:
    found = items_of([member(0.0, 4), member(1.0, 0)], work(optimization=Optimization(kl=0.1)))
    assert [(item.advantage, item.weight) for item in found] == [(0.0, 0.25)]


def test_the_trainers_weights_of_tokens_come_before_our_own() -> None:
    assert items_of([member(1.0, 4)], work(token_weights={"r-g000000-e00": 0.125}))[0].weight == 0.125


def test_a_span_may_have_an_advantage_where_its_execution_has_none() -> None:
    one = member(0.0, 2)
    span = msgspec.structs.replace(one.sequences[0].spans[0], advantage=0.5)
    one = msgspec.structs.replace(one, sequences=(Sequence(tokens=(1, 2, 3), spans=(span,)),))
    assert len(items_of([one], work())) == 1


def test_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    stats = figures([member(1.0, 2)], GradientStats(tokens=2), work())
    assert (stats.token_versions, stats.token_staleness_sum) == ({0: 2}, 4)


def test_figures_are_sums() -> None:
    one = UpdateStats(executions=2, tokens=3, loss=0.5, kl_sum=0.25, zero_variance_groups=1)
    assert plus(one, one) == UpdateStats(executions=4, tokens=6, loss=1.0, kl_sum=0.5, zero_variance_groups=2)
    assert plus(one, UpdateStats()) == one
    left, right = UpdateStats(token_versions={3: 1, 4: 2}), UpdateStats(token_versions={4: 5, 2: 1}, broken=("g",))
    assert plus(left, right) == UpdateStats(token_versions={2: 1, 3: 1, 4: 7}, broken=("g",))


def test_an_accumulator_takes_only_its_own_attempt() -> None:
    held = Accumulator(update=2, attempt="a", contribution="c", gradients={})
    assert held.belongs(work(update=2, attempt="a"))
    assert not held.belongs(work(update=2, attempt="b"))
    assert not held.belongs(work(update=3, attempt="a"))


def test_figures_survive_json_where_a_loss_was_not_finite() -> None:
    stats = figures([member(1.0, 2)], GradientStats(tokens=2, loss=float("nan"), kl_sum=float("inf")), work())
    assert msgspec.json.decode(msgspec.json.encode(stats), type=UpdateStats) == stats
    assert stats.tokens == 2


TINY = TinyConfig(vocab_size=32, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=2)
MODELS: dict[str, Policy] = {}


def policy(kind: str) -> Policy:
    """A small policy, made once: building a stock model takes a while."""
    if kind not in MODELS:
        if kind == "tiny":
            MODELS[kind] = Policy(TinyModel(TINY, seed=1), "tiny", 32, 512)
        else:
            model = build(Path("nowhere"), LLAMA if kind == "llama" else QWEN3)
            MODELS[kind] = Policy(model, kind, 40, 128)
    return MODELS[kind]


def grown(rng: random.Random, executions: int = 4) -> list[Member]:
    """Members whose sequences share a prompt, and part of what they sampled."""
    prompt, common = ([rng.randrange(32) for _ in range(n)] for n in (7, 5))
    found: list[Member] = []
    for number in range(executions):
        sequences: list[Sequence] = []
        for _ in range(rng.randint(1, 2)):
            own = [rng.randrange(32) for _ in range(rng.randint(2, 9))]
            tokens = (*prompt, *(common if rng.random() < 0.5 else ()), *own)
            start = rng.randint(1, len(tokens) - 2)
            middle = rng.randint(start + 1, len(tokens))
            cut = ((start, middle), (middle, len(tokens)))
            spans = tuple(
                Span(
                    start=a, end=b, logprobs=tuple(rng.uniform(-5, -1) for _ in range(b - a)),
                    versions=(2,) * (b - a), temperature=rng.choice((1.0, 0.7)),
                    advantage=rng.choice((None, 0.5)), weight=rng.choice((1.0, 0.25)),
                )
                for a, b in cut if b > a
            )  # fmt: skip
            sequences.append(Sequence(tokens=tokens, spans=spans))
        trained = sum(span.end - span.start for sequence in sequences for span in sequence.spans)
        found.append(
            Member(
                execution=f"r-g000000-e{number:02d}", score=0.5, advantage=rng.choice((1.0, -0.5)),
                sequences=tuple(sequences), trained_tokens=trained, path_tokens=trained,
            )
        )  # fmt: skip
    return found


def computing(members: list[Member], settings: Optimization) -> Work:
    return Work(items_of(members, work(optimization=settings)), executions_of(members, settings), settings, 2)


SETTINGS = [
    Optimization(),
    Optimization(loss="sequence", sequence_low=0.5, sequence_high=2.0),
    Optimization(loss="truncated", kl=0.1),
    Optimization(loss="reinforce", max_age=0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one.loss)
@pytest.mark.parametrize("seed", range(3))
def test_the_two_ways_of_the_tiny_decoder_agree(settings: Optimization, seed: int) -> None:
    one, members = policy("tiny"), grown(random.Random(seed))
    other = Policy(TinyModel(TINY, seed=2), "tiny", 32, 512) if settings.kl else None
    task = computing(members, settings)
    forest = forest_of(task)
    sums = [zero_gradients(one.parameters()) for _ in range(2)]
    wide, narrow = flat(one, task, sums[0], reference=other), tree(one, forest, task, sums[1], reference=other, chunk=3)
    for name, wanted in sums[0].items():
        assert wanted.abs().max() > 0
        torch.testing.assert_close(sums[1][name], wanted, rtol=2e-4, atol=2e-7 * float(wanted.abs().max()) + 1e-9)
    for figure in ("tokens", "loss", "kl_sum", "clipped_tokens", "entropy_sum", "sequences", "logprob_gap_sum"):
        assert getattr(wide.stats, figure) == pytest.approx(getattr(narrow.stats, figure), rel=1e-4, abs=1e-6)
    assert narrow.unique_tokens == forest.nodes < wide.unique_tokens == sum(len(i.sequence.tokens) for i in task.items)


@pytest.mark.parametrize("settings", [SETTINGS[1], Optimization(kl=0.1)], ids=["sequence", "kl"])
def test_a_forest_above_forest_tokens_is_walked_in_parts_that_equal_the_whole(settings: Optimization) -> None:
    paths = random_paths(random.Random(3), 24, 3)
    items = [Item(path.sequence, path.advantage, path.weight) for path in paths]
    task = Work(items, [path.execution for path in paths], settings, 5)
    forest = forest_of(task)
    whole, parts, wanted, budget = {}, {}, None, forest.longest() + 4
    assert len(split(forest, budget)) > 2
    with float64():
        one, other = (Policy(make("llama", seed=seed), "llama", 13, 512) for seed in (1, 2))
        reference = other if settings.kl else None
        for into, tokens in ((whole, None), (parts, budget)):
            into.update({name: torch.zeros_like(tensor) for name, tensor in one.parameters().items()})
            found = tree(one, forest, task, into, reference=reference, forest_tokens=tokens)
            wanted = wanted or found
    assert wanted is not None
    assert error(parts, whole) < 1e-9
    assert found.unique_tokens > wanted.unique_tokens == forest.nodes
    figures, all_figures = asdict(found.stats), asdict(wanted.stats)
    assert figures.pop("gap_by_age") == pytest.approx(all_figures.pop("gap_by_age"), rel=1e-9)
    assert figures == pytest.approx(all_figures, rel=1e-9)


def test_a_cell_walks_in_parts_what_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "tree", told := Mock(return_value=Found(GradientStats(), 0)))
    learner = make_learner(HostSettings(forest_tokens=7))
    assert isinstance(learner, TorchLearner)
    monkeypatch.setattr(learner, "policy", lambda _: policy("llama"))
    learner.compute(work(), [member(1.0, 2)], None, "c")
    assert told.call_args.kwargs["forest_tokens"] == 7


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_stock_model_goes_through_the_tree_and_parts_add_up(kind: str) -> None:
    one, members = policy(kind), grown(random.Random(5))
    task = computing(members, Optimization())
    whole = zero_gradients(one.parameters())
    assert gradient(one, task, whole).unique_tokens == forest_of(task).nodes
    parts = zero_gradients(one.parameters())
    for member in members:
        gradient(one, computing([member], Optimization()), parts, chunk=4)
    for name, wanted in whole.items():
        torch.testing.assert_close(parts[name], wanted, rtol=2e-3, atol=1e-6 * float(wanted.abs().max()) + 1e-9)


def test_the_way_is_chosen_by_what_paths_share_and_stock_models_have_one() -> None:
    span = Span(start=38, end=40, logprobs=(-1.0,) * 2, versions=(0,) * 2, temperature=1.0)
    ways: list[bool] = []
    for common in (0, 20, 30):
        tokens = [(*(1,) * common, *(2 + number,) * (40 - common)) for number in range(8)]
        forest = build_forest([Worth(Sequence(tokens=path, spans=(span,)), 1.0, 1.0) for path in tokens])
        ways.append(flat_is_cheaper(policy("tiny"), forest))
        assert not flat_is_cheaper(policy("llama"), forest)
    assert ways == [True, True, False]


def test_a_group_that_cannot_be_put_in_a_forest_is_untrainable() -> None:
    bad = member(1.0, 2)
    span = msgspec.structs.replace(bad.sequences[0].spans[0], logprobs=(-1.0,))
    sequence = msgspec.structs.replace(bad.sequences[0], spans=(span,))
    bad = msgspec.structs.replace(bad, sequences=(sequence,))
    with pytest.raises(UntrainableError, match=r"the span \[1, 3\) has 1 log-probs and 2 versions"):
        gradient(policy("tiny"), computing([bad], Optimization()), {})


def test_nothing_to_train_costs_nothing() -> None:
    into = zero_gradients(policy("llama").parameters())
    found = gradient(policy("llama"), computing([member(0.0, 2)], Optimization()), into)
    assert (found.unique_tokens, found.stats.tokens) == (0, 0)
