"""A compressed prefix forest of sequences, each token once, with the table of events on it; needs no torch.

Invariants:
- a node is one token at one exact prefix; equal prefixes of all given sequences (also of different executions) are one
  path of nodes, whoever sampled them. Events are never merged: each trained token of each sequence is a row.
- segments are in preorder: a segment's parent comes before it, and its descendants are the segments right after it;
- the nodes of a segment are consecutive, and the first one's predecessor is the last node of the parent;
- every segment has an event in it or below it: what follows the last trained token of all paths is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from opengyre.proto import group

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROOT: Final = -1


class ForestError(ValueError):
    """A sequence that cannot be put in a forest; the message names the field and what is allowed."""


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence with what it is worth. `weight` is the absolute weight of each trained token, times its span's; a
    span's own advantage goes before `advantage`. `execution` numbers the executions of an update from 0."""

    sequence: group.Sequence
    advantage: float
    weight: float
    execution: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EventTable:
    """One row a trained token, columns `[events]`: in the order of the paths, of their spans and of their tokens."""

    node: Ints
    """The trained token; its log-prob is taken at the predecessor, divided by the temperature before the softmax."""
    behaviour: Floats
    advantage: Floats
    weight: Floats
    temperature: Floats
    version: Ints
    """The weight version that sampled it."""
    sequence: Ints
    """Index of its path among those given."""
    execution: Ints

    def __len__(self) -> int:
        return len(self.node)

    def rows(self, chosen: Ints | NDArray[np.bool_]) -> "EventTable":
        """Some of the rows, in their order."""
        return EventTable(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Segments `[segments]` and nodes `[nodes]`; see the module for what holds between them."""

    tokens: Ints
    first: Ints
    """`[segments + 1]`: segment `s` has the nodes `first[s]` to `first[s + 1]`."""
    parent: Ints
    """`ROOT` where there is none."""
    depth: Ints
    """Position of a segment's first token in its path."""
    ends: Ints
    """`[sequences]`: the node of each path's last trained token; -1 for a path without one."""
    events: EventTable

    @property
    def segments(self) -> int:
        return len(self.parent)

    @property
    def nodes(self) -> int:
        """Unique tokens."""
        return len(self.tokens)

    def lengths(self) -> Ints:
        """`[segments]`: tokens."""
        return np.diff(self.first)

    def longest(self) -> int:
        """Tokens of the longest path."""
        return int((self.depth + self.lengths()).max(initial=0))

    def segment_of(self, node: Ints) -> Ints:
        """The segment of each node."""
        return np.searchsorted(self.first, node, side="right") - 1

    def path_lengths(self) -> Ints:
        """`[sequences]`: tokens up to each path's last trained one; 0 for a path without one."""
        at = self.segment_of(np.maximum(self.ends, 0)) if self.nodes else np.zeros(len(self.ends), np.int64)
        if not self.nodes:
            return np.zeros(len(self.ends), np.int64)
        return np.where(self.ends >= 0, self.depth[at] + self.ends - self.first[at] + 1, 0)

    def path_tokens(self) -> int:
        """Tokens of all paths, without sharing."""
        return int(self.path_lengths().sum())

    def lineage(self, segment: int) -> list[int]:
        """Segments from the root to `segment`."""
        found: list[int] = []
        while segment != ROOT:
            found.append(segment)
            segment = int(self.parent[segment])
        return found[::-1]

    def prefix_lengths(self, sequence: int) -> list[tuple[int, int]]:
        """`(segment, tokens of it)` along a path, from the root."""
        end = int(self.ends[sequence])
        last = int(self.segment_of(np.asarray([end], np.int64))[0])
        used = [(s, int(self.first[s + 1] - self.first[s])) for s in self.lineage(last)]
        used[-1] = (last, end - int(self.first[last]) + 1)
        return used

    def select(self, sequences: Iterable[int]) -> "Forest":
        """The forest of these paths alone, with their events. Sequences keep their numbers."""
        chosen = np.zeros(len(self.ends), bool)
        chosen[list(sequences)] = True
        needed = np.zeros(self.segments, np.int64)
        for sequence in np.flatnonzero(chosen & (self.ends >= 0)):
            for segment, length in self.prefix_lengths(int(sequence)):
                needed[segment] = max(needed[segment], length)
        kept = np.flatnonzero(needed)
        place = np.full(self.segments + 1, ROOT)
        place[kept] = np.arange(len(kept))
        nodes = np.concatenate([np.arange(self.first[s], self.first[s] + needed[s]) for s in kept] or [_NONE])
        moved = np.full(self.nodes + 1, -1)
        moved[nodes] = np.arange(len(nodes))
        events = self.events.rows(chosen[self.events.sequence])
        return Forest(
            tokens=self.tokens[nodes],
            first=np.concatenate([[0], np.cumsum(needed[kept])]).astype(np.int64),
            parent=place[self.parent[kept]],
            depth=self.depth[kept],
            ends=np.where(chosen, moved[self.ends], -1),
            events=EventTable(
                **{name: getattr(events, name) for name in EventTable.__dataclass_fields__ if name != "node"},
                node=moved[events.node],
            ),
        )


_NONE: Final = np.zeros(0, np.int64)


def check(sequence: group.Sequence) -> None:
    """Raise `ForestError` unless every span lies in the sequence, after its first token, with a log-prob, a version
    and a positive temperature for each token, and no token is in two spans."""
    before = 0
    for span in sorted(sequence.spans, key=lambda s: s.start):
        if not 1 <= span.start <= span.end <= len(sequence.tokens):
            raise ForestError(
                f"a span is [{span.start}, {span.end}); allowed is a range within [1, {len(sequence.tokens)})"
            )
        if span.start < before:
            raise ForestError(f"two spans hold the token {span.start}; allowed is one loss a token")
        if not len(span.logprobs) == len(span.versions) == span.end - span.start:
            raise ForestError(
                f"the span [{span.start}, {span.end}) has {len(span.logprobs)} log-probs and {len(span.versions)} "
                f"versions; it needs one for each token"
            )
        if not span.temperature > 0:
            raise ForestError(f"a span's temperature is {span.temperature}; allowed are values above 0")
        before = span.end


def build(paths: Sequence[Path]) -> Forest:
    """The forest of all trained tokens of `paths`. Linear in their tokens. Raises `ForestError` first of all."""
    for path in paths:
        check(path.sequence)
    trie = _Trie()
    ends = [trie.insert(_trained(path.sequence)) for path in paths]
    return _emit(trie, ends, paths)


def _trained(sequence: group.Sequence) -> Ints:
    """Tokens up to the last trained one."""
    end = max((span.end for span in sequence.spans if span.end > span.start), default=0)
    return np.asarray(sequence.tokens[:end], np.int64)


class _Trie:
    """Segments in order of insertion. A split leaves a segment's number to its lower part, so that the number of the
    segment at whose end a path ends stays right."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = []
        self.parent: list[int] = []
        self.children: list[dict[int, int]] = []
        self.roots: dict[int, int] = {}

    def insert(self, tokens: Ints) -> int:
        """The segment at whose end the path ends; `ROOT` for one without tokens."""
        at, done = ROOT, 0
        while done < len(tokens):
            below = self.roots if at == ROOT else self.children[at]
            following = below.get(int(tokens[done]))
            if following is None:
                return self._add(at, tokens[done:])
            mine = self.tokens[following]
            shared = _common(mine, tokens[done:])
            at = following if shared == len(mine) else self._split(following, shared)
            done += shared
        return at

    def _add(self, parent: int, tokens: Ints) -> int:
        number = len(self.tokens)
        self.tokens.append(tokens)
        self.parent.append(parent)
        self.children.append({})
        (self.roots if parent == ROOT else self.children[parent])[int(tokens[0])] = number
        return number

    def _split(self, segment: int, length: int) -> int:
        """The new segment of the first `length` tokens."""
        tokens = self.tokens[segment]
        upper = self._add(self.parent[segment], tokens[:length])
        self.tokens[segment] = tokens[length:]
        self.parent[segment] = upper
        self.children[upper][int(tokens[length])] = segment
        return upper


def _common(left: Ints, right: Ints) -> int:
    """Tokens that both begin with."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


def _preorder(trie: _Trie) -> list[int]:
    """Segments, children after their parent; the child with most tokens below comes last, because the walk starts at
    the last path, whose state is then still there."""
    below = [len(tokens) for tokens in trie.tokens]
    order: list[int] = []
    pending = list(trie.roots.values())
    while pending:
        order.append(pending.pop())
        pending.extend(trie.children[order[-1]].values())
    for segment in reversed(order):
        if trie.parent[segment] != ROOT:
            below[trie.parent[segment]] += below[segment]
    result: list[int] = []
    pending = sorted(trie.roots.values(), key=lambda s: -below[s])
    while pending:
        result.append(pending.pop())
        pending.extend(sorted(trie.children[result[-1]].values(), key=lambda s: -below[s]))
    return result


def _emit(trie: _Trie, ends: list[int], paths: Sequence[Path]) -> Forest:
    order = _preorder(trie)
    heads: list[int] = []
    owner: dict[int, int] = {}
    parents: list[int] = []
    begins: dict[int, int] = {}
    count = 0
    for segment in order:
        above = trie.parent[segment]
        begins[segment] = count
        count += len(trie.tokens[segment])
        if above != ROOT and len(trie.children[above]) == 1:
            owner[segment] = owner[above]
            continue
        owner[segment] = len(heads)
        parents.append(ROOT if above == ROOT else owner[above])
        heads.append(segment)
    first = np.asarray([*(begins[segment] for segment in heads), count], np.int64)
    parent = np.asarray(parents, np.int64)
    depth = np.zeros(len(heads), np.int64)
    for number, above in enumerate(parents):
        if above != ROOT:
            depth[number] = depth[above] + first[above + 1] - first[above]
    return Forest(
        tokens=np.concatenate([trie.tokens[segment] for segment in order] or [_NONE]),
        first=first,
        parent=parent,
        depth=depth,
        ends=np.asarray([begins[e] + len(trie.tokens[e]) - 1 if e != ROOT else -1 for e in ends], np.int64),
        events=_table(trie, ends, begins, paths),
    )


def _table(trie: _Trie, ends: list[int], begins: dict[int, int], paths: Sequence[Path]) -> EventTable:
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in EventTable.__dataclass_fields__}
    for index, (path, end) in enumerate(zip(paths, ends, strict=True)):
        nodes = _nodes(trie, end, begins)
        for span in path.sequence.spans:
            count = span.end - span.start
            columns["node"].append(nodes[span.start : span.end])
            columns["behaviour"].append(np.asarray(span.logprobs, np.float64))
            advantage = path.advantage if span.advantage is None else span.advantage
            columns["advantage"].append(np.full(count, advantage, np.float64))
            columns["weight"].append(np.full(count, path.weight * span.weight, np.float64))
            columns["temperature"].append(np.full(count, span.temperature, np.float64))
            columns["version"].append(np.asarray(span.versions, np.int64))
            columns["sequence"].append(np.full(count, index, np.int64))
            columns["execution"].append(np.full(count, path.execution, np.int64))
    floats = {"behaviour", "advantage", "weight", "temperature"}
    empty: dict[str, NDArray[Any]] = {name: np.zeros(0, np.float64 if name in floats else np.int64) for name in columns}
    return EventTable(**{name: np.concatenate([empty[name], *parts]) for name, parts in columns.items()})


def _nodes(trie: _Trie, end: int, begins: dict[int, int]) -> Ints:
    """Nodes of a path, by position."""
    ranges: list[Ints] = []
    while end != ROOT:
        ranges.append(np.arange(begins[end], begins[end] + len(trie.tokens[end])))
        end = trie.parent[end]
    return np.concatenate(ranges[::-1]) if ranges else _NONE
