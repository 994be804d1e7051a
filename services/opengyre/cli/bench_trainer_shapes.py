"""Sequences to measure the trainer with: a shared prefix, a chain, an agent's tree. Pure; needs no torch.

All of it follows from the numbers and the seed. A sampled token has a loss in the first path that leads through it and
in no other, as the sequences of an execution have it; behaviour log-probs lie around those of a random model.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from opengyre.proto.group import Sequence, Span
from opengyre.treegrad.forest import Path

VOCABULARY: Final = 512
SAMPLED: Final = 0.3
"""Share of a turn that the model sampled."""
NEAR: Final = 0.005
"""How far an agent's path tokens may be from those asked for, relatively."""
TRIES: Final = 20_000
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """`kind` is `prefix` (`prefix` tokens and `leaves` branches of `branch` tokens that are trained), `chain` (`unique`
    tokens, all trained) or `agent` (`nodes` turns in a tree with `leaves`, of `unique` tokens in all and `path` tokens
    over its paths)."""

    kind: str
    leaves: int = 1
    prefix: int = 0
    branch: int = 0
    unique: int = 0
    path: int = 0
    nodes: int = 0

    def times(self, scale: float) -> "Shape":
        """The same, with so many times the tokens."""
        size = (max(2, round(n * scale)) if n else 0 for n in (self.prefix, self.branch, self.unique, self.path))
        prefix, branch, unique, path = size
        return Shape(self.kind, self.leaves, prefix, branch, unique, path, self.nodes)


def paths(shape: Shape, seed: int = 0) -> list[Path]:
    """Raises `ValueError` where no tree has such numbers."""
    rng = np.random.default_rng(seed)
    if shape.kind == "prefix":
        prefix = _ids(rng, shape.prefix)
        found = [np.concatenate([prefix, [1 + leaf], _ids(rng, shape.branch - 1)]) for leaf in range(shape.leaves)]
        return _weighted(rng, [(tokens, [(shape.prefix, len(tokens))]) for tokens in found])
    if shape.kind == "chain":
        return _weighted(rng, [(_ids(rng, shape.unique), [(1, shape.unique)])])
    if shape.kind == "agent":
        return _agent(rng, shape)
    raise ValueError(f"kind is {shape.kind!r}; allowed are prefix, chain and agent")


def turns(shape: Shape, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Parent (-1: none) and tokens of each turn of an agent's tree; a parent comes before its children.

    A main line, and branches that leave it or one another for some turns: retries, forks, sub-agents that begin with
    the context. Trees are drawn until one has the path tokens that were asked for.
    """
    for _ in range(TRIES):
        lengths = _lengths(rng, shape.nodes, shape.unique)
        parent = _tree(rng, shape.nodes, shape.leaves)
        total = sum(_depths(parent, lengths)[leaf] for leaf in _leaves(parent))
        if abs(total - shape.path) <= NEAR * shape.path:
            return parent, lengths
    raise ValueError(
        f"no tree of {shape.nodes} turns with {shape.leaves} leaves and {shape.unique} tokens was found whose paths "
        f"have {shape.path} tokens"
    )


def pairs(forest_depth: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Pairs of a token and one that it attends to, of segments of `lengths` that begin at these depths."""
    end = forest_depth + lengths
    return int((end * (end + 1) // 2 - forest_depth * (forest_depth + 1) // 2).sum())


def _tree(rng: np.random.Generator, nodes: int, leaves: int) -> list[int]:
    main = int(rng.integers(nodes // 2, nodes - leaves + 2)) if leaves > 1 else nodes
    parent = list(range(-1, main - 1))
    rest, branches = nodes - main, leaves - 1
    if not branches:
        return parent
    cuts = np.sort(rng.choice(np.arange(1, rest), branches - 1, replace=False)) if branches > 1 else []
    lowest = int(rng.integers(0, main - 1))
    inner = list(range(lowest, main - 1))
    for length in np.diff([0, *cuts, rest]).tolist():
        at = inner[int(rng.integers(len(inner)))]
        begin = len(parent)
        parent.append(at)
        parent.extend(range(begin, begin + length - 1))
        inner.extend(range(begin, begin + length - 1))
    return parent


def _lengths(rng: np.random.Generator, nodes: int, total: int) -> list[int]:
    """Turns of at least two tokens, lognormal, `total` in all."""
    drawn = rng.lognormal(0.0, 0.8, nodes)
    found = 2 + np.floor(drawn / drawn.sum() * (total - 2 * nodes)).astype(np.int64)
    found[0] += total - int(found.sum())
    return found.tolist()


def _leaves(parent: list[int]) -> list[int]:
    inner = set(parent)
    return [node for node in range(len(parent)) if node not in inner]


def _depths(parent: list[int], lengths: list[int]) -> list[int]:
    """Tokens up to the end of each turn."""
    found: list[int] = []
    for above, length in zip(parent, lengths, strict=True):
        found.append(length + (found[above] if above >= 0 else 0))
    return found


def _agent(rng: np.random.Generator, shape: Shape) -> list[Path]:
    parent, lengths = turns(shape, rng)
    tokens = [_ids(rng, length) for length in lengths]
    owned: set[int] = set()
    found: list[tuple[Tokens, list[tuple[int, int]]]] = []
    for leaf in _leaves(parent):
        line = [leaf]
        while parent[line[-1]] >= 0:
            line.append(parent[line[-1]])
        line.reverse()
        spans, end = [], 0
        for turn in line:
            end += lengths[turn]
            if turn not in owned:
                spans.append((end - max(1, round(SAMPLED * lengths[turn])), end))
        owned.update(line)
        found.append((np.concatenate([tokens[turn] for turn in line]), spans))
    return _weighted(rng, found)


def _weighted(rng: np.random.Generator, given: list[tuple[Tokens, list[tuple[int, int]]]]) -> list[Path]:
    weight = 1 / sum(end - begin for _, spans in given for begin, end in spans)
    advantages = np.linspace(-1.0, 1.0, len(given)) if len(given) > 1 else np.ones(1)
    return [
        Path(
            Sequence(tokens=tuple(tokens.tolist()), spans=tuple(_span(rng, *span) for span in spans)),
            float(advantage),
            weight,
            execution,
        )
        for execution, ((tokens, spans), advantage) in enumerate(zip(given, advantages, strict=True))
    ]


def _span(rng: np.random.Generator, start: int, end: int) -> Span:
    logprobs = rng.normal(-math.log(VOCABULARY), 0.3, end - start)
    return Span(start=start, end=end, logprobs=tuple(logprobs.tolist()), versions=(0,) * (end - start), temperature=1.0)


def _ids(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(1, VOCABULARY, count, dtype=np.int64)
