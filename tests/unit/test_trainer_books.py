"""What an update amounts to, and what a group must be to be in one."""

import math

import msgspec
import pytest

from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Dispatch, RunSpec
from opengyre.proto.update import UpdateStats
from opengyre.trainer.books import Held, NegativeStalenessError, fault_of, next_record, scale, staleness
from opengyre.trainer.learner import Stepped
from opengyre.trainer.store import Record
from opengyre.trainer.update import Cell, Contribution, Update

pytestmark = pytest.mark.torch

SPEC = RunSpec(run="r", model="m", updates=4, dispatch=Dispatch(mu=3, batch_groups=2, group_size=2))
SPAN = Span(start=1, end=3, logprobs=(-0.5, -0.5), versions=(1, 1), temperature=1.0)


def member(name: str, score: float = 1.0, advantage: float = 1.0, **changes) -> Member:
    sequence = Sequence(tokens=(1, 2, 3), spans=(SPAN,))
    fields = {"sequences": (sequence,), "trained_tokens": 2, "path_tokens": 3, **changes}
    return Member(execution=name, score=score, advantage=advantage, **fields)


def held(group: str, version: int, *members: Member) -> Held:
    return Held(GroupReady(run="r", group=group, task="t", version=version, members=members), members)


GROUPS = {
    "g2": held("g2", 1, member("g2-e0", 0.0), member("g2-e1", 1.0)),
    "g1": held("g1", 2, member("g1-e0", 0.5, 0.0)),
}


def update(number: int, **stats) -> Update:
    cell = Cell("h", "b")
    given = UpdateStats(executions=99, score_sum=99, tokens=6, loss=2.0, **stats)
    return Update(
        number=number, attempt="t", size=2, groups=("g2", "g1"), contributed={"g1": "c", "g2": "d"},
        contributions={"c": Contribution(cell, ("g1",), "sha", given), "d": Contribution(cell, ("g2",), "sha", given)},
    )  # fmt: skip


def record(number: int = 3, stepped: Stepped | None = None, broken: tuple[str, ...] = (), **stats) -> Record:
    before = Record(run="r", version=number - 1, published=0, frontier=("g0",))
    return next_record(
        before, SPEC, update(number, **stats), GROUPS, stepped or Stepped(1.5), broken, dropped=["gx"], opened_s=1.0
    )


def test_the_record_of_a_commit() -> None:
    made = record()
    assert (made.version, made.published, made.finished) == (3, 3, False)
    assert made.frontier == ("g0", "g1", "g2", "gx")
    event = made.committed
    assert event is not None
    assert event.groups == ("g2", "g1")
    assert event.executions == ("g2-e0", "g2-e1", "g1-e0")
    assert event.staleness == (1, 0)
    assert event.score == 0.5
    assert (event.stats.executions, event.stats.score_sum, event.stats.zero_variance_groups) == (3, 1.5, 1)
    assert (event.stats.tokens, event.stats.path_tokens) == (12, 9)
    assert [(c.group, c.outcome, c.version) for c in made.consumed] == [("g2", "trained", 2), ("g1", "trained", 2)]


def test_weights_are_those_of_the_executions_that_were_there() -> None:
    assert scale(SPEC, 4) == 1.0
    assert scale(SPEC, 3) == pytest.approx(4 / 3)
    event = record().committed
    assert event is not None
    assert event.stats.loss == pytest.approx(4.0 * 4 / 3)


@pytest.mark.parametrize(("number", "published"), [(3, True), (4, True), (5, True)])
def test_bursts_end_with_a_publication_and_so_does_the_run(number: int, published: bool) -> None:
    made = record(number)
    assert (made.committed is not None and made.committed.published) == published
    assert made.finished == (number >= 4)


def test_inside_a_burst_nothing_is_published() -> None:
    before = Record(run="r", version=1, published=0)
    groups = {name: held(name, 0, member(f"{name}-e0")) for name in GROUPS}
    made = next_record(before, SPEC, update(2), groups, Stepped(1.0), (), dropped=(), opened_s=1.0)
    assert (made.version, made.published) == (2, 0)


def test_a_gradient_that_is_not_finite_drops_its_groups_and_names_them() -> None:
    made = record(stepped=Stepped(math.nan, "non_finite_gradient: w"), broken=("d",), kl_sum=math.inf)
    event = made.committed
    assert event is not None
    assert event.skipped == "non_finite_gradient: w; in the contributions of g2"
    assert {(c.outcome, c.reason) for c in made.consumed} == {("dropped", "non_finite_gradient")}
    assert made.version == 3
    assert msgspec.json.decode(msgspec.json.encode(made), type=Record) == made, "no figure is lost in JSON"


def test_staleness_is_measured_and_never_negative() -> None:
    assert staleness(GROUPS["g2"].ready, 5) == 4
    with pytest.raises(NegativeStalenessError, match=r"g1 was admitted at version 2, .* end at 1"):
        staleness(GROUPS["g1"].ready, 1)


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([], "no members"),
        ([member("a"), member("a")], "twice"),
        ([member("a", trained_tokens=3)], "trained_tokens is 3; its spans have 2"),
        ([member("a", sequences=(Sequence(tokens=(1, 2, 16), spans=(SPAN,)),))], "vocabulary of 16"),
        ([member("a", sequences=(Sequence(tokens=(1, -2, 3), spans=(SPAN,)),))], "vocabulary of 16"),
        ([member("a", sequences=(Sequence(tokens=(1,) * 9, spans=(SPAN,)),))], "9 tokens; the model takes 8"),
        ([member("a", sequences=(Sequence(tokens=(1, 2), spans=(SPAN,)),))], r"a: a span is \[1, 3\)"),
    ],
)
def test_a_group_that_cannot_be_trained(members: list[Member], fault: str) -> None:
    found = fault_of(members, vocabulary=16, context=8)
    assert found is not None
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(found)


def test_a_group_that_can_be_trained() -> None:
    assert fault_of([member("a"), member("b", sequences=(), trained_tokens=0)], vocabulary=16, context=8) is None
