"""Who of some ranks does what. Pure."""

import heapq
from collections.abc import Sequence


def share(costs: Sequence[float], ranks: int) -> list[tuple[int, ...]]:
    """Indices of `costs` for each rank, in order: longest first, to whom has least, so that no rank has more than 4/3
    of what the best sharing gives the busiest (LPT). A rank may get nothing. Deterministic."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        total, rank = heap[0]
        found[rank].append(index)
        heapq.heapreplace(heap, (total + costs[index], rank))
    return [tuple(sorted(mine)) for mine in found]
