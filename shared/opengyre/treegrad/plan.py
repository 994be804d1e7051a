"""Where the segments of a forest are cut into chunks; pure, needs no torch.

A chunk is a range of consecutive nodes of one segment, computed at once. More chunks change rounding only.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from opengyre.treegrad.forest import Forest


@dataclass(frozen=True, slots=True)
class Chunk:
    """Nodes `[low, high)`, the first of them at `position` of its path."""

    low: int
    high: int
    position: int

    @property
    def tokens(self) -> int:
        return self.high - self.low


def plan(forest: Forest, chunk: int, cuts: Collection[int] = ()) -> list[list[Chunk]]:
    """Chunks of each segment, in order, each of at most `chunk` tokens; a chunk begins at each node of `cuts` too."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; allowed are whole numbers of tokens from 1")
    wanted = np.asarray(sorted(cuts), np.int64)
    result: list[list[Chunk]] = []
    for segment in range(forest.segments):
        low, high = int(forest.first[segment]), int(forest.first[segment + 1])
        inside = wanted[(wanted > low) & (wanted < high)].tolist()
        bounds: list[int] = []
        for begin, end in zip([low, *inside], [*inside, high], strict=True):
            bounds.extend(range(begin, end, chunk))
        position = int(forest.depth[segment]) - low
        result.append([Chunk(b, e, b + position) for b, e in zip(bounds, [*bounds[1:], high], strict=True)])
    return result
