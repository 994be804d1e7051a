"""What an update amounts to, and what a group must be to be in one."""

import math

import msgspec
import pytest

from opengyre.learn.gradient import InvalidSequenceError, check
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Dispatch, Optimization, RunSpec
from opengyre.proto.update import UpdateStats
from opengyre.trainer.books import (
    Held,
    NegativeStalenessError,
    fault_of,
    next_record,
    parts_of,
    refusal,
    scale,
    staleness,
    token_weights,
)
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


def held(group: str, version: int, *members: Member, unscored: tuple[str, ...] = (), **fields) -> Held:
    names = (*(member.execution for member in members), *unscored)
    ready = GroupReady(run="r", group=group, task="t", version=version, members=members, executions=names, **fields)
    return Held(ready, members)


def spanned(**changes) -> Member:
    """With another span."""
    span = msgspec.structs.replace(SPAN, **changes)
    return member("g-a", sequences=(Sequence(tokens=(1, 2, 3), spans=(span,)),))


GROUPS = {
    "m2": held("g2", 1, member("g2-e0", 0.0), member("g2-e1", 1.0), group_size=3),
    "m1": held("g1", 2, member("g1-e0", 0.5, 0.0), unscored=("g1-e1",)),
}
UNITS = {"g2-e0": "m2", "g2-e1": "m2", "g1-e0": "m1", "g1-e1": "m1"}


def update(number: int, **stats) -> Update:
    cell = Cell("h", "b")
    given = UpdateStats(executions=99, score_sum=99, tokens=6, loss=2.0, **stats)
    two, one = ("g2-e0", "g2-e1"), ("g1-e0",)
    return Update(
        number=number, attempt="t", size=4, grain=2, units=tuple(UNITS), source=UNITS, idle=frozenset({"g1-e1"}),
        contributed=dict.fromkeys(one, "c") | dict.fromkeys(two, "d"),
        contributions={"c": Contribution(cell, one, "sha", given), "d": Contribution(cell, two, "sha", given)},
    )  # fmt: skip


def record(number: int = 3, stepped: Stepped | None = None, broken: tuple[str, ...] = (), **stats) -> Record:
    before = Record(run="r", version=number - 1, published=0, frontier=("g0",), partial=("g3-e0",))
    return next_record(
        before, SPEC, update(number, **stats), GROUPS, stepped or Stepped(1.5), broken,
        dropped={"g3-e1": 2, "gx-e0": 3}, blobs=["sha-members"], opened_s=1.0,
    )  # fmt: skip


def test_the_record_of_a_commit() -> None:
    made = record()
    assert (made.version, made.published, made.finished) == (3, 3, False)
    assert made.frontier == ("g0", "g1", "g3")
    assert made.partial == ("g2-e0", "g2-e1", "gx-e0")
    assert made.blobs == ("sha", "sha-members")
    event = made.committed
    assert event is not None
    assert event.groups == ("g2", "g1")
    assert event.executions == ("g2-e0", "g2-e1", "g1-e0")
    assert event.unscored == ("g1-e1",)
    assert event.staleness == (1, 0)
    assert event.score == 0.5
    assert (event.stats.executions, event.stats.score_sum, event.stats.zero_variance_groups) == (3, 1.5, 1)
    assert (event.stats.tokens, event.stats.path_tokens) == (12, 9)
    assert [(c.group, c.outcome, c.version) for c in made.consumed] == [("g2", "trained", 2), ("g1", "trained", 2)]
    assert [c.executions for c in made.consumed] == [("g2-e0", "g2-e1"), ("g1-e0", "g1-e1")]


def test_weights_are_those_of_the_executions_that_were_there() -> None:
    assert scale(SPEC, parts_of(update(3), GROUPS)) == pytest.approx(4 / 3), "three of four have a score"
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
    made = next_record(before, SPEC, update(3), GROUPS, Stepped(1.0), (), dropped={}, opened_s=1.0)
    assert (made.version, made.published) == (3, 0)


def test_a_change_of_mu_skips_no_publication() -> None:
    """After the publication of 2, a burst of 3 ends with 5, which is no multiple of 3."""
    before = Record(run="r", version=4, published=2)
    for mu, wanted in ((1, 5), (2, 5), (3, 5), (4, 2), (5, 2)):
        spec = msgspec.structs.replace(SPEC, updates=None, dispatch=Dispatch(mu=mu, batch_groups=2, group_size=2))
        assert (
            next_record(before, spec, update(5), GROUPS, Stepped(1.0), (), dropped={}, opened_s=1).published == wanted
        )


def test_an_update_in_which_nothing_has_a_score_takes_its_places_and_steps_nothing() -> None:
    groups = {"m": held("g1", 0, unscored=("g1-e0", "g1-e1"))}
    units: dict[str, str] = dict.fromkeys(["g1-e0", "g1-e1"], "m")
    empty = Update(number=1, attempt="t", size=2, grain=2, units=tuple(units), source=units, idle=frozenset(units))
    made = next_record(
        Record(run="r", version=0, published=0), SPEC, empty, groups, Stepped(0.0, "no execution of it has a score"),
        (), dropped={}, opened_s=1.0,
    )  # fmt: skip
    assert made.committed is not None
    assert (made.committed.executions, made.committed.score, made.frontier) == ((), 0, ("g1",))
    assert [(c.outcome, c.executions) for c in made.consumed] == [("trained", ("g1-e0", "g1-e1"))]


def test_a_gradient_that_is_not_finite_drops_its_groups_and_names_them() -> None:
    made = record(stepped=Stepped(math.nan, "non_finite_gradient: w"), broken=("d",), kl_sum=math.inf)
    event = made.committed
    assert event is not None
    assert event.skipped == "non_finite_gradient: w; in the contributions of g2"
    assert {(c.outcome, c.reason) for c in made.consumed} == {("dropped", "non_finite_gradient")}
    assert made.version == 3
    assert msgspec.json.decode(msgspec.json.encode(made), type=Record) == made, "no figure is lost in JSON"


def test_staleness_is_measured_and_never_negative() -> None:
    assert staleness(GROUPS["m2"].ready, 5) == 4
    with pytest.raises(NegativeStalenessError, match=r"g1 was admitted at version 2, .* end at 1"):
        staleness(GROUPS["m1"].ready, 1)


def numbers_that_float32_does_not_bear() -> list[tuple[list[Member], str]]:
    """Each is finite, and makes an infinite loss or gradient, or a negative age."""
    return [
        ([member("g-a", advantage=-1e30)], "g-a: advantage is -1e.30; allowed are values from -1000000 to 1000000"),
        (
            [spanned(logprobs=(-0.5, -1e30))],
            "g-a: logprobs has -1e.30 for token 2; allowed are values from -10000",
        ),
        ([spanned(weight=1e30)], r"g-a: a span's weight is 1e\+30; allowed are values from 0 to 1000000"),
        ([spanned(advantage=-1e30)], "g-a: a span's advantage is -1e.30; allowed are values from -1000000 to 1000000"),
        ([spanned(temperature=1e-30)], "g-a: a span's temperature is 1e-30; allowed are values from 0.01 to 100"),
        ([spanned(versions=(3, 4))], "g-a: versions has 4; allowed are values from 0 to 3, the trainer's"),
    ]


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([], "no members"),
        ([member("g-a"), member("g-a")], "twice"),
        ([member("g-a", trained_tokens=3)], "trained_tokens is 3; its spans have 2"),
        ([member("g-a", sequences=(Sequence(tokens=(1, 2, 16), spans=(SPAN,)),))], "vocabulary of 16"),
        ([member("g-a", sequences=(Sequence(tokens=(1, -2, 3), spans=(SPAN,)),))], "vocabulary of 16"),
        ([member("g-a", sequences=(Sequence(tokens=(1,) * 9, spans=(SPAN,)),))], "9 tokens; the model takes 8"),
        ([member("g-a", sequences=(Sequence(tokens=(1, 2), spans=(SPAN,)),))], r"a: a span is \[1, 3\)"),
        ([member("g-a", advantage=math.nan)], "g-a: advantage is nan; allowed are values from -1000000 to 1000000"),
        ([member("g-a", score=math.nan)], "g-a: score is nan; allowed are values from 0 to 1"),
        ([spanned(logprobs=(-0.5,))], "g-a: .* has 1 log-probs and 2 versions; it needs one for each token"),
        (
            [spanned(logprobs=(-0.5, math.nan))],
            "g-a: logprobs has nan for token 2; allowed are values from -10000",
        ),
        ([spanned(logprobs=(-math.inf, -0.5))], "g-a: logprobs has -inf for token 1; allowed"),
        ([spanned(logprobs=(0.9, -0.5))], "g-a: logprobs has 0.9 for token 1; allowed"),
        ([spanned(versions=(1, -1))], "g-a: versions has -1; allowed are values from 0"),
        ([spanned(temperature=math.inf)], "g-a: a span's temperature is inf; allowed are values from 0.01 to 100"),
        ([spanned(weight=math.nan)], "g-a: a span's weight is nan; allowed"),
        ([spanned(advantage=math.inf)], "g-a: a span's advantage is inf; allowed"),
        *numbers_that_float32_does_not_bear(),
    ],
)
def test_a_group_that_cannot_be_trained(members: list[Member], fault: str) -> None:
    found = fault_of(
        Held(GroupReady(run="r", group="g", task="t", version=0), tuple(members)), vocabulary=16, context=8, version=3
    )
    assert found is not None
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(found)


def test_a_token_has_a_loss_in_one_place() -> None:
    twice = Sequence(tokens=(1, 2, 3), spans=(SPAN, msgspec.structs.replace(SPAN, start=2, end=4)))
    with pytest.raises(InvalidSequenceError, match=r"a span is \[2, 4\)"):
        check(twice)
    with pytest.raises(InvalidSequenceError, match="spans overlap at token 2"):
        check(msgspec.structs.replace(twice, tokens=(1, 2, 3, 4)))


AVERAGED = ("execution", "token", "prompt", "constant")


@pytest.mark.parametrize("average", AVERAGED)
def test_tokens_weigh_what_the_average_of_the_update_says(average) -> None:
    """In two messages of one group, one of them late, and of a group of which a member has no score."""
    optimization = Optimization(average=average, constant_tokens=5)
    spec = msgspec.structs.replace(SPEC, optimization=optimization)
    messages = {
        "m1": held("g1", 0, member("g1-e0", trained_tokens=4), member("g1-e1", trained_tokens=10), group_size=3),
        "m2": held("g1", 0, member("g1-e2", trained_tokens=6), group_size=3, late=True),
        "m3": held("g2", 0, member("g2-e0", trained_tokens=3), unscored=("g2-e1",), group_size=2),
    }
    source = {unit: key for key, one in messages.items() for unit in one.executions}
    filled = Update(number=1, attempt="t", size=5, grain=2, units=tuple(source), source=source)
    factor = scale(spec, parts_of(filled, messages))
    found: dict[str, float] = {}
    for one in messages.values():
        found |= token_weights(spec, one, one.executions)
    wanted = {
        "execution": (1 / 16, 1 / 40, 1 / 24, 1 / 12),
        "token": (1 / 23,) * 4,
        "prompt": (2 / 3 / 14 / 2, 2 / 3 / 14 / 2, 1 / 3 / 6 / 2, 1 / 3 / 2),
        "constant": (1 / 20,) * 4,
    }
    assert tuple(weight * factor for weight in found.values()) == pytest.approx(wanted[average])
    assert list(found) == ["g1-e0", "g1-e1", "g1-e2", "g2-e0"]


def test_a_group_that_was_not_finite_refuses_the_step_and_is_named() -> None:
    """Its cell left it out of its sum, so the sum itself is finite."""
    whole = update(3, broken=("g2",))
    assert refusal(whole) == "non_finite_loss"
    assert refusal(update(3)) is None
    before = Record(run="r", version=2, published=0)
    made = next_record(before, SPEC, whole, GROUPS, Stepped(0.0, "non_finite_loss", 0.5), (), dropped={}, opened_s=1.0)
    assert made.committed is not None
    assert (made.committed.skipped, made.committed.learning_rate) == ("non_finite_loss; in g2", 0.5)
    assert {(c.outcome, c.reason) for c in made.consumed} == {("dropped", "non_finite_gradient")}


def test_trainer_and_engine_that_disagree_raise_an_alarm() -> None:
    quiet, loud = (
        record(logprob_gap_sum=each, logprob_gap_tokens=10, logprob_gap_max=each).committed for each in (0.5, 0.6)
    )
    assert quiet is not None
    assert quiet.alarm is None
    assert loud is not None
    assert loud.alarm == (
        "trainer and engine are 0.06 nats apart in the mean of 20 tokens of one version (at most 0.6); "
        "optimization.logprob_gap_alarm is 0.05; likely the engine computes in another precision (its own, that of "
        "keys and values, quantized weights)"
    )


def test_a_group_that_can_be_trained() -> None:
    for_all = held("g", 0, member("g-a"), member("g-b", sequences=(), trained_tokens=0), unscored=("g-c",))
    assert fault_of(for_all, vocabulary=16, context=8, version=3) is None
    assert fault_of(held("g", 0, unscored=("g-c",), late=True), vocabulary=16, context=8, version=3) is None
    assert (
        fault_of(held("h", 0, member("g-a")), vocabulary=16, context=8, version=3) == "g-a is not one of its executions"
    )
