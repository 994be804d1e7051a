"""Laws of group-relative advantages."""

import inspect
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre import learn
from opengyre.learn import advantage as advantage_module
from opengyre.learn.advantage import advantage, advantages, baseline

scores = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0]), min_size=2, max_size=16)


@given(scores, st.sampled_from(["grpo", "loo", "no_std"]))
def test_advantages_sum_to_nothing(values: list[float], kind) -> None:
    assert sum(advantages(values, kind)) == pytest.approx(0, abs=1e-6)


@given(scores)
def test_grpo_has_unit_variance_or_none(values: list[float]) -> None:
    result = advantages(values, "grpo")
    if len(set(values)) == 1:
        assert result == [0.0] * len(values)
    else:
        assert statistics.pvariance(result) == pytest.approx(1)


@given(scores)
def test_leave_one_out_is_the_distance_from_the_others(values: list[float]) -> None:
    for at, found in enumerate(advantages(values, "loo")):
        others = values[:at] + values[at + 1 :]
        assert found == pytest.approx(values[at] - sum(others) / len(others), abs=1e-9)


def test_equal_scores_that_have_no_exact_mean_have_no_advantage() -> None:
    assert advantages([0.7] * 7, "grpo") == [0.0] * 7


def test_a_late_member_is_judged_by_the_frozen_baseline() -> None:
    frozen = baseline([0.0, 1.0], "grpo")
    assert advantage(1.0, frozen) == pytest.approx(1.0)
    assert advantage(0.5, frozen) == pytest.approx(0.0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="scores"):
        advantages([])
    with pytest.raises(ValueError, match="grpo, loo and no_std"):
        advantages([1.0], "ppo")  # pyright: ignore[reportArgumentType]  # the wrong type is what is tested


def test_the_module_needs_no_torch() -> None:
    for module in (learn, advantage_module):
        assert "torch" not in [line.split()[1] for line in inspect.getsource(module).splitlines() if "import " in line]
