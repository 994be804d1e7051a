"""Health checks: how long they are waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.task import Healthcheck
from opengyre.sandbox.health import Again, failed

CHECK = Healthcheck(command="true", interval_s=3, timeout_s=2, start_period_s=10, start_interval_s=1, retries=3)


def test_failures_of_the_start_period_do_not_count() -> None:
    assert failed(CHECK, 0.0, 0) == Again(1, 0)
    assert failed(CHECK, 9.9, 2) == Again(1, 0)
    assert failed(CHECK, 10.0, 0) == Again(3, 1)
    assert failed(CHECK, 20.0, 2) is None


@pytest.mark.parametrize("retries", [1, 2])
def test_without_a_start_period_the_last_failure_is_the_end(retries: int) -> None:
    check = Healthcheck(command="true", retries=retries)
    assert (failed(check, 0.0, 0) is None) is (retries == 1)


times = st.floats(min_value=0.5, max_value=20)


@given(times, times, st.floats(min_value=0, max_value=50), times, st.integers(1, 5), st.floats(0, 1))
def test_it_is_given_up_within_the_longest_time(
    interval: float, timeout: float, start: float, start_interval: float, retries: int, part: float
) -> None:
    check = Healthcheck(
        command="false", interval_s=interval, timeout_s=timeout, start_period_s=start, start_interval_s=start_interval,
        retries=retries,
    )  # fmt: skip
    elapsed, failures = 0.0, 0
    for _ in range(10_000):
        elapsed += timeout * part
        again = failed(check, elapsed, failures)
        if again is None:
            break
        elapsed, failures = elapsed + again.pause_s, again.failures
    else:
        pytest.fail("it was never given up")
    assert elapsed <= check.longest_s + 1e-6
