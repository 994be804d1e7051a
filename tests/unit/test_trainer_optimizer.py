"""The learning rate as a function of the settings and the update's number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.run import Optimization
from opengyre.trainer.optimizer import learning_rate

pytestmark = pytest.mark.torch


def rates(updates: int, **settings) -> list[float]:
    chosen = Optimization(learning_rate=0.5, **settings)
    return [learning_rate(chosen, update, updates) for update in range(1, updates + 1)]


def test_the_rates_of_each_schedule() -> None:
    assert rates(3) == [0.5, 0.5, 0.5]
    assert rates(4, warmup_updates=2) == [0.25, 0.5, 0.5, 0.5]
    assert rates(4, schedule="linear") == [0.5, 0.375, 0.25, 0.125]
    assert rates(6, schedule="linear", warmup_updates=2) == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]
    assert rates(4, schedule="cosine")[1:3] == pytest.approx([0.25 * (1 + math.sqrt(0.5)), 0.25])
    assert rates(3, canary=True) == [0.0, 0.0, 0.0]


def test_a_run_without_an_end_has_a_constant_rate() -> None:
    assert learning_rate(Optimization(learning_rate=0.5, schedule="linear"), 10**9, None) == 0.5


@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 400))
def test_every_rate_is_within_its_bounds_and_only_the_warm_up_rises(
    updates: int, warm: int, schedule: str, update: int
) -> None:
    chosen = Optimization(learning_rate=0.5, warmup_updates=min(warm, updates), schedule=schedule)  # type: ignore[arg-type]  # drawn from the allowed
    rate, after = (learning_rate(chosen, number, updates) for number in (update, update + 1))
    assert 0 <= rate <= 0.5
    if update < chosen.warmup_updates:
        assert after > rate
    elif update > chosen.warmup_updates:
        assert after <= rate
    if update <= updates:
        assert rate > 0, "every update of the run learns something"
