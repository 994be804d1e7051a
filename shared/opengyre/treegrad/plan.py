"""How a forest is computed: units in preorder, each cut into chunks; pure, needs no torch.

A unit is a segment, cut into chunks of consecutive nodes, or a pack: neighbouring whole subtrees below one segment (or
several roots), computed in one chunk under a mask by which a node sees its ancestors. Nothing is below a pack. More
chunks, and packs, change rounding only.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opengyre.treegrad.forest import ROOT, Forest, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Columns `[tokens]` of a chunk that is no chain."""

    positions: Ints
    """In the path."""
    previous: Ints
    """The predecessor's place in the chunk, plus 1; 0 where it lies before the chunk."""
    ends: Ints
    """Place after the last descendant: node i sees node j where `j <= i < ends[j]`."""

    def sees(self) -> NDArray[np.bool_]:
        """`[tokens, tokens]`: row sees column."""
        at = np.arange(len(self.ends))
        return (at[None] <= at[:, None]) & (at[:, None] < self.ends[None])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Nodes `[low, high)`, after `position` tokens of their path."""

    low: int
    high: int
    position: int
    pack: Pack | None = None

    @property
    def tokens(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Unit:
    """`parent` is a unit, or `ROOT`."""

    parent: int
    chunks: list[Chunk]

    @property
    def packed(self) -> bool:
        return self.chunks[0].pack is not None


def plan(forest: Forest, chunk: int, pack: int = 0, cuts: Collection[int] = ()) -> list[Unit]:
    """The units, each parent before its children. A chunk has at most `chunk` tokens, a pack at most `pack` (and
    `chunk`; 0 or 1: none). A chunk begins at each node of `cuts` besides, and then nothing is packed."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; allowed are whole numbers of tokens from 1")
    wanted = np.asarray(sorted(cuts), np.int64)
    heads = _packs(forest, 0 if len(wanted) else min(pack, chunk))
    place: dict[int, int] = {}
    units: list[Unit] = []
    segment = 0
    while segment < forest.segments:
        above = int(forest.parent[segment])
        place[segment] = len(units)
        until = heads.get(segment)
        found = [_pack(forest, segment, until)] if until else _chunks(forest, segment, chunk, wanted)
        units.append(Unit(ROOT if above == ROOT else place[above], found))
        segment = until or segment + 1
    return units


def _packs(forest: Forest, limit: int) -> dict[int, int]:
    """First segment of each pack -> segment after its last one. Greedy, over neighbouring children of one parent."""
    after = np.arange(1, forest.segments + 1)
    for segment in reversed(range(forest.segments)):
        above = int(forest.parent[segment])
        if above != ROOT:
            after[above] = max(after[above], after[segment])
    found: dict[int, int] = {}
    segment = 0
    while segment < forest.segments:
        above, until = int(forest.parent[segment]), segment
        while (
            until < forest.segments
            and forest.parent[until] == above
            and forest.first[after[until]] - forest.first[segment] <= limit
        ):
            until = int(after[until])
        if until > segment + 1:
            found[segment] = until
        segment = max(until, segment + 1)
    return found


def _pack(forest: Forest, segment: int, until: int) -> Chunk:
    low, high = int(forest.first[segment]), int(forest.first[until])
    lengths = forest.lengths()[segment:until]
    own = np.repeat(np.arange(segment, until), lengths)
    nodes = np.arange(low, high)
    positions = forest.depth[own] + nodes - forest.first[own]
    above = forest.parent[own]
    outside = above < segment
    last = np.where(outside, 0, forest.first[np.where(outside, 0, above) + 1] - low)
    previous = np.where(nodes == forest.first[own], last, nodes - low)
    ends = np.arange(segment + 1, until + 1)
    for number in reversed(range(segment, until)):
        parent = int(forest.parent[number])
        if parent >= segment:
            ends[parent - segment] = max(ends[parent - segment], ends[number - segment])
    return Chunk(
        low, high, int(forest.depth[segment]), Pack(positions, previous, forest.first[ends[own - segment]] - low)
    )


def _chunks(forest: Forest, segment: int, chunk: int, wanted: Ints) -> list[Chunk]:
    low, high = int(forest.first[segment]), int(forest.first[segment + 1])
    inside = wanted[(wanted > low) & (wanted < high)].tolist()
    bounds: list[int] = []
    for begin, end in zip([low, *inside], [*inside, high], strict=True):
        bounds.extend(range(begin, end, chunk))
    position = int(forest.depth[segment]) - low
    return [Chunk(b, e, b + position) for b, e in zip(bounds, [*bounds[1:], high], strict=True)]
