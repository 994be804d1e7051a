"""A radix tree over integer tokens that grows by appending.

It is kept as *runs*: a run is a buffer of consecutive tokens that begins at a place of another run (its parent) and
grows in place while what is added goes on from its end. So nothing is ever split or copied: a fork inside a run is an
entry in its `forks`, and the segments of a radix tree are the pieces of runs between them. How tokens are spread over
runs depends on the order of insertion; positions' prefixes, sizes, leaves and segments do not.

Invariants: the path to a position is unique; of the continuations at one depth (the run's own and its forks) no two
begin with the same token, so following tokens from the root always finds the longest match. Run 0 is the root and
empty. A parent's number is below its children's. Following a path compares memory run by run; where it leads through
more than `HOPS` runs the block hashes find the deepest known block instead, in a binary search.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from opengyre.trees.blocks import BLOCK, Lanes, Tokens, advance, key
from opengyre.trees.keys import Keys

HOPS: Final = 16


class Position(NamedTuple):
    """A prefix of `depth` tokens whose last one lies in `run`; the root is (0, 0)."""

    run: int
    depth: int


ROOT: Final = Position(0, 0)
NOTHING: Final = np.zeros(2, np.uint64)
"""Hash of no tokens."""


class Segment(NamedTuple):
    """Tokens between two branching points: `[start, end)` of every path through them."""

    run: int
    start: int
    end: int


@dataclass(slots=True)
class _Run:
    parent: int
    base: int
    """Depth at which it begins."""
    buffer: Tokens
    began: Lanes
    """Hash at `base`."""
    hashed: Lanes
    """At the end."""
    hashes: list[Lanes] = field(default_factory=list)
    """At its block boundaries, `[n, 2]` pieces."""
    size: int = 0
    forks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Depth -> first token -> run, of what leaves the run there."""

    @property
    def end(self) -> int:
        return self.base + self.size

    def tokens(self, start: int, end: int) -> Tokens:
        return self.buffer[start - self.base : end - self.base]


def common(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


class Trie:
    def __init__(self) -> None:
        self._runs = [_Run(-1, 0, np.empty(0, np.int32), NOTHING, NOTHING)]
        self._blocks: dict[int, int] = {}
        """Hash of a prefix that ends at a block boundary -> its run."""
        self.size = 0
        """Tokens, each once at each prefix."""
        self.keys = Keys()
        """Of the tokens that stand in more than the tokens before them; what is negative in a path is of these."""

    def walk(self, start: Position, tokens: Tokens, hops: int | None = None) -> tuple[Position, bool]:
        """Follow `tokens` from `start` as far as they are known, through at most `hops` runs; also whether the end of
        what is known was reached."""
        run, depth = start
        taken, total = 0, len(tokens)
        while taken < total:
            here = self._runs[run]
            matched = common(here.tokens(depth, here.end), tokens[taken:])
            taken, depth = taken + matched, depth + matched
            if taken == total:
                break
            child = here.forks.get(depth, {}).get(int(tokens[taken]))
            if child is None:
                break
            if hops is not None:
                if hops == 0:
                    return Position(run, depth), False
                hops -= 1
            run = child
        return Position(run, depth), True

    def seek(self, tokens: Tokens) -> Position:
        """The longest known prefix of `tokens`, from the root."""
        found, ended = self.walk(ROOT, tokens, HOPS)
        if ended:
            return found
        hashes, _ = advance(NOTHING, tokens, 0)
        low, high = 0, len(hashes)
        while low < high:  # Known blocks come first.
            middle = (low + high) // 2
            if key(hashes[middle]) in self._blocks:
                low = middle + 1
            else:
                high = middle
        if low * BLOCK > found.depth:
            found = Position(self._blocks[key(hashes[low - 1])], low * BLOCK)
        return self.walk(found, tokens[found.depth :])[0]

    def insert(self, start: Position, tokens: Tokens) -> Position:
        """Where `tokens` after `start` end; those that are not known are added."""
        found = self.seek(tokens) if start == ROOT else self.walk(start, tokens)[0]
        rest = tokens[found.depth - start.depth :]
        if not len(rest):
            return found
        run = self._runs[found.run]
        if found.run == 0 or found.depth < run.end:
            number = len(self._runs)
            run.forks.setdefault(found.depth, {})[int(rest[0])] = number
            hashed = self._hash(found)
            run = _Run(found.run, found.depth, np.empty(len(rest), np.int32), hashed, hashed)
            self._runs.append(run)
        else:
            number = found.run
        self._append(number, run, rest)
        return Position(number, run.end)

    def _append(self, number: int, run: _Run, tokens: Tokens) -> None:
        size = run.size + len(tokens)
        if size > len(run.buffer):
            grown = np.empty(max(size, 2 * len(run.buffer)), np.int32)
            grown[: run.size] = run.buffer[: run.size]
            run.buffer = grown
        run.buffer[run.size : size] = tokens
        boundaries, run.hashed = advance(run.hashed, tokens, run.end)
        if len(boundaries):
            run.hashes.append(boundaries)
            self._blocks.update((key(lanes), number) for lanes in boundaries)
        run.size = size
        self.size += len(tokens)

    def _hash(self, at: Position) -> Lanes:
        """Of the prefix that ends at `at`: from the last block boundary before it in its run, or the run's begin."""
        run = self._runs[at.run]
        if at.depth == run.end:
            return run.hashed
        first = -(-(run.base + 1) // BLOCK)
        place = at.depth // BLOCK - first
        if place < 0:
            return advance(run.began, run.tokens(run.base, at.depth), run.base)[1]
        for piece in run.hashes:
            if place < len(piece):
                boundary = (at.depth // BLOCK) * BLOCK
                return advance(piece[place], run.tokens(boundary, at.depth), boundary)[1]
            place -= len(piece)
        raise AssertionError("a run has a hash for each of its block boundaries")

    def up(self, at: Position) -> Position:
        """Where the run of `at` begins: a place of its parent."""
        run = self._runs[at.run]
        return Position(max(run.parent, 0), run.base)

    def prefix(self, at: Position, depth: int) -> Position:
        """The first `depth` tokens of the path to `at`."""
        while at.run and self._runs[at.run].base >= depth:
            at = self.up(at)
        return Position(at.run, min(at.depth, depth))

    def shared(self, left: Position, right: Position) -> int:
        """How many tokens two paths have in common."""
        while left.run != right.run:
            if left.run > right.run:
                left = self.up(left)
            else:
                right = self.up(right)
        return min(left.depth, right.depth)

    def tokens(self, at: Position, start: int = 0) -> Tokens:
        """Tokens `[start, at.depth)` of the path to `at`; not a copy where they lie in one run."""
        pieces: list[Tokens] = []
        while at.depth > start:
            run = self._runs[at.run]
            pieces.append(run.tokens(max(start, run.base), at.depth))
            at = self.up(at)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def ids(self, at: Position, start: int = 0) -> Tokens:
        """The same as token ids."""
        tokens = self.tokens(at, start)
        return self.keys.plain(tokens) if self.keys else tokens

    @property
    def leaves(self) -> int:
        """Places where nothing goes on."""
        return sum(run.end not in run.forks for run in self._runs[1:])

    def segments(self) -> list[Segment]:
        """The nodes of the radix tree, parents before their children."""
        found: list[Segment] = []
        for number, run in enumerate(self._runs):
            cuts = sorted({run.base, run.end, *run.forks})
            found += [Segment(number, start, end) for start, end in pairwise(cuts)]
        return found
