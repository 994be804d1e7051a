"""Which outputs go when those of a sandbox are too much."""

from hypothesis import given
from hypothesis import strategies as st

from opengyre.sandbox.launch.spools import to_drop

KEPT = st.lists(
    st.tuples(st.floats(0, 100), st.integers(0, 10**6).map(str), st.integers(0, 100)), unique_by=lambda row: row[1]
)


@given(KEPT, st.integers(0, 100), st.integers(0, 500))
def test_what_is_kept_is_within_the_bound_and_no_older_than_what_went(
    kept: list[tuple[float, str, int]], running: int, bound: int
) -> None:
    gone = to_drop(kept, running, bound)
    left = [row for row in kept if row[1] not in gone]
    dropped = [row for row in kept if row[1] in gone]
    assert running + sum(size for _, _, size in left) <= max(bound, running)
    assert all(size for _, _, size in dropped), "an empty one frees nothing"
    assert all(row < other for row in dropped for other in left if other[2]), "the oldest first"
    if dropped:  # and no more than needed
        assert running + sum(size for _, _, size in left) + max(dropped)[2] > bound
