"""Losses on their table of events: against formulas written out in float64, finite differences, and laws."""

import math
from collections import defaultdict
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opengyre.learn.events import Events, LossStats
from opengyre.learn.objective import objective
from opengyre.proto.run import Optimization

pytestmark = pytest.mark.torch

LOSSES = ("clip", "truncated", "sequence", "reinforce")
WIDE = Optimization(loss="sequence", sequence_low=0.8, sequence_high=1.28)
DOUBLE = torch.float64


@dataclass(frozen=True)
class Row:
    """An event as numbers."""

    logp: float
    behaviour: float
    advantage: float
    weight: float = 1.0
    sequence: int = 0
    reference: float = -1.0
    age: int = 0


def table(rows: list[Row], dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, Events]:
    def column(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=kind)

    events = Events(
        behaviour=column("behaviour"), advantage=column("advantage"), weight=column("weight"),
        sequence=column("sequence", torch.int64), reference=column("reference"), age=column("age", torch.int64),
    )  # fmt: skip
    return column("logp").requires_grad_(), events


def evaluate(
    rows: list[Row], optimization: Optimization, dtype: torch.dtype = DOUBLE
) -> tuple[float, list[float], LossStats]:
    """Loss, its gradient by each log-prob, and what the events looked like."""
    logp, events = table(rows, dtype)
    loss, stats = objective(optimization)(logp, events)
    [gradient] = torch.autograd.grad(loss, logp)
    return loss.item(), gradient.tolist(), stats


def ratios(rows: list[Row], o: Optimization) -> list[float]:
    """Of each event: of its token, or of its sequence's kept tokens."""
    if o.loss != "sequence":
        return [math.exp(row.logp - row.behaviour) for row in rows]
    apart = defaultdict(list)
    for row in rows:
        if o.max_age is None or row.age <= o.max_age:
            apart[row.sequence].append(row.logp - row.behaviour)
    return [math.exp(sum(apart[row.sequence]) / max(1, len(apart[row.sequence]))) for row in rows]


def written_out(rows: list[Row], o: Optimization) -> tuple[float, list[float]]:
    """Loss and gradient by the formulas of docs/losses.md, without tensors."""
    loss, gradient = 0.0, [0.0] * len(rows)
    kept = [o.max_age is None or row.age <= o.max_age for row in rows]
    for n, (row, ratio) in enumerate(zip(rows, ratios(rows, o), strict=True)):
        if not kept[n]:
            continue
        a, w = row.advantage, row.weight
        if o.loss in ("clip", "sequence"):
            low, high = (o.clip_low, o.clip_high) if o.loss == "clip" else (o.sequence_low, o.sequence_high)
            cap = o.truncate if o.loss == "clip" and o.truncate is not None else math.inf
            cut = min(ratio, cap)
            loss -= w * min(cut * a, min(max(cut, low), high) * a)
            flat = (a > 0 and ratio > high) or (a < 0 and ratio < low) or ratio > cap
            slope = 0.0 if flat else -w * a * ratio
            if o.loss == "clip":
                gradient[n] += slope
            else:
                mates = [m for m, other in enumerate(rows) if other.sequence == row.sequence and kept[m]]
                for mate in mates:
                    gradient[mate] += slope / len(mates)
        else:
            factor = min(ratio, o.truncate if o.truncate is not None else 2.0) if o.loss == "truncated" else 1.0
            loss -= w * factor * a * row.logp
            gradient[n] -= w * factor * a
        if o.kl > 0:
            apart = row.reference - row.logp
            value = math.exp(apart) - 1 - apart if o.kl_estimator == "k3" else apart**2 / 2
            slope = 1 - math.exp(apart) if o.kl_estimator == "k3" else -apart
            loss += w * o.kl * value
            gradient[n] += w * o.kl * slope
    return loss, gradient


def near_a_kink(rows: list[Row], o: Optimization) -> bool:
    bounds = (o.clip_low, o.clip_high, o.sequence_low, o.sequence_high, o.truncate or 2.0)
    return any(abs(ratio - bound) < 1e-3 for ratio in ratios(rows, o) for bound in bounds)


logs = st.floats(-4, -0.01)
rows_of = st.lists(
    st.builds(
        lambda logp, apart, advantage, weight, sequence, pull, age: Row(
            logp, logp - apart, advantage, weight, sequence, logp + pull, age
        ),
        logs, st.floats(-1.2, 1.2), st.floats(-3, 3), st.floats(0, 2), st.integers(0, 3), st.floats(-2, 2),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip
optimizations = st.builds(
    Optimization,
    loss=st.sampled_from(LOSSES),
    truncate=st.sampled_from([None, 1.5, 3.0]),
    sequence_low=st.sampled_from([0.9, 0.9997]),
    sequence_high=st.sampled_from([1.0004, 1.2]),
    kl=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k2", "k3"]),
    max_age=st.sampled_from([None, 1]),
)


@given(rows_of, optimizations)
@settings(max_examples=150, deadline=None)
def test_value_and_gradient_are_those_of_the_formulas(rows: list[Row], optimization: Optimization) -> None:
    assume(not near_a_kink(rows, optimization))
    loss, gradient, stats = evaluate(rows, optimization)
    wanted, slopes = written_out(rows, optimization)
    assert loss == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12, abs=1e-12)
    assert stats.loss == loss
    old = optimization.max_age is not None
    assert (stats.tokens, stats.masked_tokens) == (len(rows), sum(old and row.age > 1 for row in rows))


@given(rows_of, optimizations.filter(lambda o: o.loss != "truncated"))
@settings(max_examples=50, deadline=None)
def test_the_gradient_is_that_of_finite_differences(rows: list[Row], optimization: Optimization) -> None:
    assume(not near_a_kink(rows, optimization))
    _, gradient, _ = evaluate(rows, optimization)
    step = 1e-5
    for n, slope in enumerate(gradient):
        sides = [
            evaluate([*rows[:n], replace(rows[n], logp=rows[n].logp + d), *rows[n + 1 :]], optimization)[0]
            for d in (step, -step)
        ]
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("advantages", "ratio", "wanted"),
    [((1.5, -1.0), 0.7, -1.05), ((1.5, -1.0), 1.5, 1.5), ((1.0, -1.5), 0.7, -0.7), ((1.0, -1.5), 1.5, 2.25)],
)
def test_events_at_one_node_keep_their_own_advantages(advantages, ratio: float, wanted: float) -> None:
    """Known values: their summed advantage would give -0.35, 0, 0 and 0.75."""
    node = torch.tensor(math.log(ratio), dtype=DOUBLE, requires_grad=True)
    zeros = torch.zeros(2, dtype=DOUBLE)
    events = Events(zeros, torch.tensor(advantages, dtype=DOUBLE), zeros + 1)
    loss, _ = objective(Optimization())(node.expand(2), events)
    [gradient] = torch.autograd.grad(loss, node)
    assert gradient.item() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.2, 1.0, -1.2, -1.2, 0),
        (1.5, 1.0, -1.28, 0.0, 1),  # enough
        (0.5, 1.0, -0.5, -0.5, 0),  # a good token may come back from far below
        (0.5, -1.0, 0.8, 0.0, 1),  # enough
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token may come back from far above
    ],
)
def test_the_bounds_stop_only_what_goes_too_far(ratio, advantage, loss, gradient, clipped) -> None:
    for settings_ in (Optimization(), WIDE):
        found, [slope], stats = evaluate([Row(math.log(ratio), 0.0, advantage)], settings_)
        assert (found, slope, stats.clipped_tokens) == pytest.approx((loss, gradient, clipped))


def test_a_cap_bounds_the_ratio_where_the_advantage_is_negative() -> None:
    capped = Optimization(truncate=2.0)
    assert evaluate([Row(math.log(5), 0.0, -1.0)], capped)[:2] == (pytest.approx(2.0), [0.0])
    assert evaluate([Row(math.log(1.9), 0.0, -1.0)], capped)[1] == pytest.approx([1.9])
    cut, free = Optimization(loss="truncated", truncate=3.0), Optimization(loss="truncated")
    assert evaluate([Row(math.log(5), 0.0, -1.0)], cut)[1] == pytest.approx([3.0]), "bounded, and not stopped"
    assert evaluate([Row(math.log(5), 0.0, -1.0)], free)[1] == pytest.approx([2.0])
    assert evaluate([Row(math.log(5), 0.0, -1.0)], cut)[2].clipped_tokens == 1
    assert evaluate([Row(-1.0, -1.0 - math.log(1.5), 2.0)], cut)[1] == pytest.approx([-3.0]), "a weight, not a ratio"


def test_at_its_bounds_a_ratio_still_counts_as_inside() -> None:
    """Exactly on the kink autograd has a choice; it must be the same for a token that is computed once or often."""
    for bound, advantage in ((0.5, -1.0), (2.0, 1.0)):
        edge = Optimization(clip_low=0.5, clip_high=2.0)
        row = Row(math.log(bound), 0.0, advantage)
        assert math.exp(row.logp) == bound
        _, [slope], stats = evaluate([row], edge)
        assert (slope, stats.clipped_tokens) == (-bound * advantage, 0)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    st.lists(
        st.tuples(st.lists(logs, min_size=1, max_size=4), st.floats(-3, 3), st.floats(0.1, 2)), min_size=1, max_size=4
    )
)
@settings(max_examples=30, deadline=None)
def test_at_ratio_one_every_loss_is_the_plain_policy_gradient(loss, sequences) -> None:
    rows = [Row(logp, logp, a, w, sequence=n) for n, (logps, a, w) in enumerate(sequences) for logp in logps]
    _, gradient, stats = evaluate(rows, Optimization(loss=loss))
    assert gradient == pytest.approx([-row.weight * row.advantage for row in rows])
    assert (stats.clipped_tokens, stats.max_ratio) == (0, pytest.approx(1.0))
    assert stats.ratio_sum**2 / stats.ratio_square_sum == pytest.approx(len(rows))


@given(rows_of, optimizations, st.floats(0.01, 100), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_scales_come_out_of_the_loss_and_order_does_not_matter(rows, optimization, factor: float, rng) -> None:
    loss, gradient, _ = evaluate(rows, optimization)
    heavier, slopes, _ = evaluate([replace(row, weight=row.weight * factor) for row in rows], optimization)
    assert (heavier, *slopes) == pytest.approx((loss * factor, *(slope * factor for slope in gradient)), abs=1e-9)
    order = list(range(len(rows)))
    rng.shuffle(order)
    other, turned, _ = evaluate([rows[n] for n in order], optimization)
    assert other == pytest.approx(loss, abs=1e-9)
    assert turned == pytest.approx([gradient[n] for n in order], abs=1e-9)
    plain = Optimization(loss=optimization.loss, truncate=optimization.truncate)
    loss, gradient, _ = evaluate(rows, plain)
    better, slopes, _ = evaluate([replace(row, advantage=row.advantage * factor) for row in rows], plain)
    assert (better, *slopes) == pytest.approx((loss * factor, *(slope * factor for slope in gradient)), abs=1e-9)


@given(rows_of, optimizations)
@settings(max_examples=60, deadline=None)
def test_parts_that_keep_sequences_whole_add_up(rows: list[Row], optimization: Optimization) -> None:
    loss, _, stats = evaluate(rows, optimization)
    total, sums = 0.0, LossStats()
    for number in {row.sequence for row in rows}:
        part, _, found = evaluate([row for row in rows if row.sequence == number], optimization)
        total += part
        sums.merge(found)
    assert total == pytest.approx(loss, abs=1e-9)
    for field in fields(LossStats):
        assert getattr(sums, field.name) == pytest.approx(getattr(stats, field.name), abs=1e-9), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_absurd_log_probs_stay_finite(loss, dtype: torch.dtype) -> None:
    far = [(0.0, -1e4), (-1e4, 0.0), (0.0, -90.0), (-90.0, 0.0), (-1e4, -1e4)]
    rows = [
        Row(logp, behaviour, a, 1.0, n, reference)
        for n, (logp, behaviour) in enumerate(far)
        for a in (-1.0, 1.0)
        for reference in (0.0, -1e4)
    ]
    for estimator in ("k2", "k3"):
        value, gradient, stats = evaluate(rows, Optimization(loss=loss, kl=0.1, kl_estimator=estimator), dtype)
        figures = [getattr(stats, field.name) for field in fields(stats) if field.name != "gap_by_age"]
        assert all(map(math.isfinite, (value, *gradient, *figures, *stats.gap_by_age.values())))


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_table_has_no_loss(loss) -> None:
    value, gradient, stats = evaluate([], Optimization(loss=loss, kl=0.1, max_age=1))
    assert (value, gradient) == (0.0, [])
    assert stats == LossStats()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_that_is_too_old_has_no_part_in_the_loss(loss) -> None:
    rows = [Row(-1.0, -1.2, 1.0, age=2), Row(-0.5, -0.4, 1.0, age=1), Row(-3.0, -0.1, -2.0, age=3)]
    masked = Optimization(loss=loss, max_age=1, kl=0.5)
    value, gradient, stats = evaluate(rows, masked)
    alone, [slope], _ = evaluate(rows[1:2], masked)
    assert (value, gradient) == (pytest.approx(alone), [0.0, pytest.approx(slope), 0.0])
    assert (stats.tokens, stats.masked_tokens, stats.kl_sum) == (3, 2, pytest.approx(math.exp(-0.1) - 0.9))


def test_the_gap_to_the_engine_is_that_of_tokens_of_the_same_version() -> None:
    rows = [Row(-1.0, -1.25, 1.0), Row(-2.0, -1.5, 1.0), Row(-1.0, -3.0, 1.0, age=1)]
    _, _, stats = evaluate(rows, Optimization())
    assert (stats.logprob_gap_sum, stats.logprob_gap_tokens, stats.logprob_gap_max) == (0.75, 2, 0.5)
    assert (stats.offset_sum, stats.offset_square_sum) == (-0.25, 0.25**2 + 0.5**2)
    assert (stats.behaviour_sum, stats.behaviour_square_sum) == (-2.75, 1.25**2 + 1.5**2)
    assert stats.offset_behaviour_sum == 0.25 * -1.25 + -0.5 * -1.5
    assert stats.gap_by_age == {0: 0.75, 1: 2.0}
    stats.merge(evaluate(rows[2:], Optimization())[2])
    assert (stats.gap_by_age, stats.logprob_gap_max) == ({0: 0.75, 1: 4.0}, 0.5)


def test_the_effective_number_of_tokens_falls_with_unequal_ratios() -> None:
    _, _, stats = evaluate([Row(math.log(3.0), 0.0, 1.0), Row(0.0, 0.0, 1.0)], Optimization())
    assert stats.ratio_sum**2 / stats.ratio_square_sum == pytest.approx(16 / 10)


@pytest.mark.parametrize(
    ("optimization", "column"),
    [(WIDE, "sequence"), (Optimization(kl=0.1), "reference"), (Optimization(max_age=1), "age")],
)
def test_a_column_that_the_settings_need_is_asked_for_by_name(optimization: Optimization, column: str) -> None:
    logp, events = table([Row(-1.0, -1.0, 1.0)])
    with pytest.raises(ValueError, match=f"no {column}"):
        objective(optimization)(logp, replace(events, **{column: None}))


def test_columns_of_another_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weight is \[3\]; allowed is the shape of behaviour, \[2\]"):
        Events(torch.zeros(2), torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_divergences_are_those_that_they_estimate(estimator) -> None:
    """From tokens of the behaviour: KL(behaviour || policy). Of the reference: KL(policy || reference), for k2 its
    gradient."""
    generator = torch.Generator().manual_seed(1)
    size, count = 5, 60_000
    scores, other = (torch.randn(size, generator=generator, dtype=DOUBLE) / 2 for _ in "ab")
    scores.requires_grad_()
    policy, reference = torch.log_softmax(scores, -1), torch.log_softmax(other, -1)
    ones = torch.ones(count, dtype=DOUBLE)
    drawn = torch.multinomial(reference.exp(), count, replacement=True, generator=generator)
    _, stats = objective(Optimization())(policy[drawn], Events(reference[drawn], ones, ones))
    assert stats.kl_sum / count == pytest.approx(
        float((reference.exp() * (reference - policy)).sum().detach()), rel=0.05
    )

    divergence = (policy.exp() * (policy - reference)).sum()
    [wanted] = torch.autograd.grad(divergence, scores, retain_graph=True)
    drawn = torch.multinomial(policy.detach().exp(), count, replacement=True, generator=generator)
    events = Events(policy[drawn].detach(), 0 * ones, ones / count, reference=reference[drawn])
    loss, stats = objective(Optimization(kl=1.0, kl_estimator=estimator))(policy[drawn], events)
    if estimator == "k3":
        assert stats.reference_kl_sum / count == pytest.approx(float(divergence.detach()), rel=0.05)
    else:
        [found] = torch.autograd.grad(loss, scores)
        assert torch.allclose(found, wanted, atol=0.02)
