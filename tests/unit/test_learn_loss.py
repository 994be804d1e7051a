"""The clipped loss on its table of events."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opengyre.learn.loss import Clip, Events, policy_loss

pytestmark = pytest.mark.torch


def _loss(ratio: float, advantage: float, clip: Clip, weight: float = 1.0) -> tuple[float, float, int]:
    """Loss, its gradient by log-prob, and how many events were stopped, of one event."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss, stats = policy_loss(logp, Events(zero, one * advantage, one * weight), clip)
    [gradient] = torch.autograd.grad(loss, logp)
    return float(loss.detach()), float(gradient), stats.clipped_tokens


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
    assert _loss(ratio, advantage, Clip()) == pytest.approx((loss, gradient, clipped))


def test_truncation_bounds_negative_advantages_too() -> None:
    assert _loss(5.0, -1.0, Clip(truncate=2.0)) == pytest.approx((2.0, 0.0, 1))
    assert _loss(1.9, -1.0, Clip(truncate=2.0)) == pytest.approx((1.9, 1.9, 0))


@given(st.floats(0.1, 5), st.floats(-3, 3), st.floats(0.001, 10))
def test_weights_are_absolute(ratio: float, advantage: float, weight: float) -> None:
    loss, gradient, _ = _loss(ratio, advantage, Clip())
    assert _loss(ratio, advantage, Clip(), weight)[:2] == pytest.approx((loss * weight, gradient * weight))


def test_an_absurd_ratio_stays_finite() -> None:
    logp = torch.tensor([0.0], requires_grad=True)
    loss, stats = policy_loss(logp, Events(torch.tensor([-500.0]), torch.ones(1), torch.ones(1)), Clip())
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(stats.max_ratio)


def test_k3_is_the_divergence_it_estimates() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, behaviour = (torch.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), -1) for _ in "ab")
    drawn = torch.multinomial(behaviour.exp(), 60_000, replacement=True, generator=generator)
    ones = torch.ones(60_000, dtype=torch.float64)
    _, stats = policy_loss(policy[drawn], Events(behaviour[drawn], ones, ones), Clip())
    exact = float((behaviour.exp() * (behaviour - policy)).sum())
    assert stats.kl_sum / 60_000 == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("bounds", [(1.1, 1.2), (0.5, 0.9), (-0.1, 1.2)])
def test_bounds_that_exclude_one_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="low <= 1 <= high"):
        Clip(*bounds)
    with pytest.raises(ValueError, match="truncate"):
        Clip(truncate=1.0)
