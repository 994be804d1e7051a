"""What is trained of a group, and its figures."""

import msgspec
import pytest

from opengyre.host.gradients import figures, items_of
from opengyre.host.learners import Accumulator, plus
from opengyre.learn.gradient import GradientStats
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest

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
