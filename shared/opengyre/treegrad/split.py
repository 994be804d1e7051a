"""What a forest costs, and where to cut one that costs too much; pure, needs no torch.

`J^T g` is linear in g, so parts that share no event add up to the whole, whatever they share otherwise: each part
computes the trunk it needs again. Paths are never cut, so whatever a loss says of one sequence it says of it in its
part; what couples sequences (weights, baselines) must be fixed before, as it is in the events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from opengyre.treegrad.forest import Forest, Ints


@dataclass(frozen=True, slots=True)
class CostModel:
    """Work of one token: `token`, and `pair` for each token that it attends to (itself too). In any one unit."""

    token: float = 1.0
    pair: float = 0.0

    def __post_init__(self) -> None:
        if self.token <= 0 or self.pair < 0:
            raise ValueError(
                f"the cost of (token, pair) is ({self.token}, {self.pair}); allowed are token > 0, pair >= 0"
            )

    def upto(self, length: float) -> float:
        """Of the tokens at positions below `length`."""
        return self.token * length + self.pair * length * (length + 1) / 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one forest."""

    unique: int
    path: int
    """Tokens of all paths, without sharing."""
    longest: int
    """Tokens of the longest path: what keys, values and their gradients take memory for."""
    work: float
    flat_work: float
    """Of each path in full."""


def cost(forest: Forest, model: CostModel) -> Cost:
    """What the forest's tokens, and its paths in full, cost."""
    begin, end = forest.depth, forest.depth + forest.lengths()
    work = sum(model.upto(int(e)) - model.upto(int(b)) for b, e in zip(begin, end, strict=True))
    lengths = forest.path_lengths()
    flat = sum(model.upto(int(length)) for length in lengths)
    return Cost(forest.nodes, int(lengths.sum()), forest.longest(), work, flat)


def leaf_order(forest: Forest) -> tuple[Ints, Ints]:
    """The paths that have events, in the order of the walk, and how many tokens each shares with the one before it
    (0 for the first)."""
    order = np.flatnonzero(forest.ends >= 0)
    # Preorder of the end nodes: a path that ends inside another comes before it.
    order = order[np.argsort(forest.ends[order], kind="stable")]
    used = [forest.prefix_lengths(int(sequence)) for sequence in order]
    shared = [0] * min(1, len(used)) + [_shared(left, right) for left, right in pairwise(used)]
    return order, np.asarray(shared, np.int64)


def _shared(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    total = 0
    for (one, length), (other, wanted) in zip(left, right, strict=False):
        if one != other:
            break
        total += min(length, wanted)
    return total


def split(forest: Forest, budget: float, model: CostModel | None = None) -> list[list[int]]:
    """Sequences of each part, so that no part costs more than `budget` unless it is one sequence alone, and all parts
    together cost as little as cuts between neighbouring paths allow. One part if the forest fits. Quadratic in the
    paths of a part."""
    if not budget > 0:
        raise ValueError(f"budget is {budget}; allowed are values above 0")
    model = model or CostModel()
    order, shared = leaf_order(forest)
    lengths = forest.path_lengths()[order]
    whole = [model.upto(int(length)) for length in lengths]
    more = [w - model.upto(int(s)) for w, s in zip(whole, shared, strict=True)]
    best = _cuts(whole, more, budget)
    parts: list[list[int]] = []
    end = len(order)
    while end:
        parts.append(order[best[end] : end].tolist())
        end = best[end]
    return parts[::-1]


def _cuts(whole: Sequence[float], more: Sequence[float], budget: float) -> list[int]:
    """`begin[j]`: where the part that ends before path j begins, in the cheapest cut of the first j paths."""
    total = [0.0] + [float("inf")] * len(whole)
    begin = [0] * (len(whole) + 1)
    for end in range(1, len(whole) + 1):
        added = 0.0
        for start in range(end - 1, -1, -1):
            part = whole[start] + added
            if part > budget and start < end - 1:
                break
            # Of cuts that cost the same, to rounding, the one with the larger part.
            if total[start] + part <= total[end] * (1 + 1e-12):
                total[end], begin[end] = total[start] + part, start
            added += more[start]
    return begin
