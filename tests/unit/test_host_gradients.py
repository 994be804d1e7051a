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


def test_a_token_weighs_its_executions_share_over_the_executions_tokens() -> None:
    items = items_of([member(1.0, 4, sequences=2), member(-1.0, 10)], 1 / 64)
    assert [(item.advantage, item.weight) for item in items] == [
        (1.0, 1 / 256),
        (1.0, 1 / 256),
        (-1.0, 1 / 640),
    ]


def test_members_without_advantage_or_tokens_are_left_out_and_counted() -> None:
    members = [member(0.0, 4, score=1.0), member(1.0, 0, score=0.25)]
    assert items_of(members, 1.0) == []
    stats = figures(members, GradientStats(), 2)
    assert (stats.executions, stats.path_tokens, stats.score_sum, stats.zero_variance_groups) == (2, 18, 1.25, 0)
    assert figures([member(0.0, 4)], GradientStats(), 2).zero_variance_groups == 1


def test_figures_are_sums() -> None:
    one = UpdateStats(executions=2, tokens=3, loss=0.5, kl_sum=0.25, zero_variance_groups=1)
    assert plus(one, one) == UpdateStats(executions=4, tokens=6, loss=1.0, kl_sum=0.5, zero_variance_groups=2)
    assert plus(one, UpdateStats()) == one


def test_an_accumulator_takes_only_its_own_attempt() -> None:
    def item(update: int, attempt: str) -> WorkItem:
        base = Manifest(run="r", version=update - 1, parent=None, step=0, directory="/w", files=())
        group = GroupReady(run="r", group="r-g000000", task="t", version=0)
        return WorkItem(update=update, attempt=attempt, base=base, group=group, weight=1.0, optimization=Optimization())

    held = Accumulator(update=2, attempt="a", contribution="c", gradients={})
    assert held.belongs(item(2, "a"))
    assert not held.belongs(item(2, "b"))
    assert not held.belongs(item(3, "a"))


def test_figures_survive_json_where_a_loss_was_not_finite() -> None:
    stats = figures([member(1.0, 2)], GradientStats(tokens=2, loss=float("nan"), kl_sum=float("inf")), 2)
    assert msgspec.json.decode(msgspec.json.encode(stats), type=UpdateStats) == stats
    assert stats.tokens == 2
