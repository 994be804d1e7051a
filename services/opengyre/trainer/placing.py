"""Which executions of an update are given to a cell together. Pure.

A *part* is some units (executions) of one message, given to one cell at a time: they are computed as one forest, so
what they share (their prompt) is computed once for the part. Parts wait in one list, costliest first, and a cell that
asks is given the first: for identical cells that is LPT (longest processing time first; Graham, SIAM J. Appl. Math. 17,
1969), whose makespan is at most `4/3 - 1/(3 m)` of the best one for these parts.

Whole groups share most and end unevenly; single executions are the reverse. So several cuts are made, from whole
groups to single executions, each is laid out over `cells`, and the one whose last cell ends first is taken: it is at
most 4/3 of the best schedule of single executions and of the best one of whole groups.

An execution is never in two parts: it is what the frontier counts and what a lease is of, and a loss on sequences needs
all of its tokens. However large it is, a cell holds the keys and values of one path; with `host.forest_tokens` it walks
a forest that has more distinct tokens in parts, one after the other, whose gradients add up to the whole's.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opengyre.proto.group import Member

OVERHEAD: Final = 64.0
"""What giving a part costs beside its tokens, in tokens: a request, a forest, kernels that start."""
ATTENTION: Final = 16_384
"""Depth in tokens at which attention costs a token as much as everything else: `6 d` of a layer of width `d` by FLOPs
(`4 d` a key against `24 d^2` a token), here for d of some 2,700; what matters is that long chains count more."""
FINER: Final = (1, 2, 3, 4, 6, 8, 16, 32)
"""Into how many parts of a cell's fair share it is tried to cut."""


@dataclass(frozen=True, slots=True)
class Load:
    """Units of one message, in order of arrival. `costs`: of each alone, in tokens; `shared`: how much of that all of
    them have in common, so that `n` together cost `sum(costs) - (n - 1) * shared`."""

    units: tuple[str, ...]
    costs: tuple[float, ...]
    shared: float = 0.0

    @property
    def own(self) -> float:
        """What its units cost beside what they share."""
        return sum(cost - self.shared for cost in self.costs if cost > 0)

    def cost(self, chosen: Sequence[int]) -> float:
        """Of these of its units as one part; units without work share nothing."""
        work = [self.costs[at] for at in chosen if self.costs[at] > 0]
        return sum(work) - (len(work) - 1) * self.shared + OVERHEAD if work else 0.0


def cost_of(member: Member, *, every: bool = False) -> float:
    """Estimated cost of one execution's gradient, in tokens of a short sequence; 0 for one without an advantage, unless
    `every` one is computed (a loss with a KL term).

    Its distinct tokens, each counted up by its mean depth for attention. O(its sequences).
    """
    ends = [sequence.spans[-1].end for sequence in member.sequences if sequence.spans]
    if not (member.judged or every) or not sum(ends):
        return 0.0
    unique = min(member.unique_tokens or sum(ends), sum(ends))
    depth = sum(end * end for end in ends) / (2 * sum(ends))
    return unique * (1 + depth / ATTENTION)


def shared_by(members: Iterable[Member]) -> float:
    """Estimated cost of the prompt that these have in common; 0 unless all begin with it."""
    heads = [
        (sequence.tokens, sequence.spans[0].start)
        for member in members
        for sequence in member.sequences[:1]
        if sequence.spans
    ]
    if len(heads) < 2:
        return 0.0
    length = min(start for _, start in heads)
    prompt = heads[0][0][:length]
    if any(tokens[:length] != prompt for tokens, _ in heads):
        return 0.0
    return length * (1 + length / 2 / ATTENTION)


def load_of(units: tuple[str, ...], members: Iterable[Member], *, every: bool = False) -> Load:
    """What these units of one message cost (`every`: see `cost_of`); a unit that is no member is no work."""
    known = {member.execution: member for member in members if member.execution in units}
    costs = tuple(cost_of(known[unit], every=every) if unit in known else 0.0 for unit in units)
    work = [cost for cost in costs if cost > 0]
    return Load(units, costs, min([shared_by(known.values()), *work]) if work else 0.0)


def pieces(load: Load, room: float, grain: int) -> list[tuple[int, ...]]:
    """Cut one load into parts that are alike, each of about `room` beside what its units share and of `grain` units at
    most; indices into its units."""
    count = len(load.units)
    work = sum(cost > 0 for cost in load.costs)
    wanted = work if room * work <= load.own else math.ceil(load.own / room - 1e-9)
    bins = max(wanted, -(-count // grain), 1)
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, at) for at in range(bins)]
    for index in sorted(range(count), key=lambda at: (-load.costs[at], at)):
        total, at = heapq.heappop(heap)
        filled[at].append(index)
        if len(filled[at]) < grain:
            heapq.heappush(heap, (total + max(0.0, load.costs[index] - load.shared), at))
    return [tuple(sorted(part)) for part in filled if part]


def makespan(costs: Iterable[float], cells: int) -> float:
    """When the last of `cells` that take the next of `costs` as they become free ends."""
    heap = [0.0] * cells
    for cost in costs:
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


def plan(loads: Sequence[Load], cells: int, grain: int) -> tuple[tuple[str, ...], ...]:
    """Every unit in exactly one part, in the order in which cells are to be given them. Deterministic."""
    loads = [load for load in loads if load.units]
    fair = sum(load.own for load in loads) / cells
    best: list[tuple[float, int, tuple[str, ...]]] = []
    ends = math.inf
    for room in (math.inf, *(fair / finer for finer in FINER), 0.0):
        parts: list[tuple[float, int, tuple[str, ...]]] = []
        for load in loads:
            for chosen in pieces(load, room, grain):
                parts.append((-load.cost(chosen), len(parts), tuple(load.units[at] for at in chosen)))
        parts.sort()
        found = makespan((-cost for cost, _, _ in parts), cells)
        if found < ends:
            best, ends = parts, found
        if cells == 1:  # Cutting only adds.
            break
    return tuple(units for _, _, units in best)


def loads_of(
    units: Iterable[str], source: Mapping[str, str], costs: Mapping[str, float], shared: Mapping[str, float]
) -> list[Load]:
    """Units by message, messages in order of their first unit."""
    by_source: dict[str, list[str]] = {}
    for unit in units:
        by_source.setdefault(source[unit], []).append(unit)
    return [
        Load(tuple(found), tuple(costs.get(unit, 0.0) for unit in found), shared.get(message, 0.0))
        for message, found in by_source.items()
    ]
