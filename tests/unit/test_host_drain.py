"""Which calls of a draining host are moved, and which may end there."""

from hypothesis import given
from hypothesis import strategies as st

from opengyre.host.drain import to_move
from opengyre.host.engine import CallProgress


def test_short_calls_finish_and_long_ones_move() -> None:
    calls = [CallProgress("short", 5, 90, 100), CallProgress("long", 5, 90, 1000), CallProgress("late", 5, 10, 100)]
    ages = {"short": 9.0, "long": 9.0, "late": 1.0}
    assert to_move(calls, ages, 0.5, 1.0) == ["short", "long", "late"]
    assert to_move(calls, ages, 1.5, 1.0) == ["long", "late"]
    assert to_move(calls, ages, 9.5, 1.0) == ["long"]
    assert to_move(calls, ages, 0.0, 1.0) == ["short", "long", "late"]


def test_a_call_without_a_token_is_judged_by_the_usual_speed() -> None:
    calls = [CallProgress("a", 5, 0, 10), CallProgress("b", 5, 0, 100)]
    assert to_move(calls, {}, 1.0, 20.0) == ["b"]
    assert to_move(calls, {}, 1.0, 0.0) == []


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.floats(0.01, 100)), max_size=10),
    st.floats(0, 10), st.floats(0, 10), st.floats(0, 50),
)  # fmt: skip
def test_a_longer_grace_moves_no_more(
    calls: list[tuple[int, int, float]], grace: float, more: float, usual: float
) -> None:
    progress = [CallProgress(f"c{n}", 1, min(a, b), max(a, b)) for n, (a, b, _) in enumerate(calls)]
    ages = {f"c{n}": age for n, (_, _, age) in enumerate(calls)}
    assert set(to_move(progress, ages, grace + more, usual)) <= set(to_move(progress, ages, grace, usual))
