"""Ranks share work so that they end together."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from opengyre.ranks.sharing import share


@given(st.lists(st.integers(0, 1000).map(float), max_size=7), st.integers(1, 3))
@example([1.0, 1.0, 1.0, 1.0, 4.0], 2)
def test_the_busiest_rank_has_at_most_a_third_more_than_at_best(costs: list[float], ranks: int) -> None:
    found = share(costs, ranks)
    assert sorted(index for mine in found for index in mine) == list(range(len(costs)))
    assert found == share(costs, ranks)
    busiest = max(sum(costs[index] for index in mine) for mine in found)
    best = min(
        max(sum(cost for cost, rank in zip(costs, ranks_of, strict=True) if rank == one) for one in range(ranks))
        for ranks_of in itertools.product(range(ranks), repeat=len(costs))
    )
    assert busiest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_a_rank_may_get_nothing() -> None:
    assert share([5.0], 3) == [(0,), (), ()]
    assert share([], 2) == [(), ()]
