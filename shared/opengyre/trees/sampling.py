"""Which paths of a tree are trained: bounded, each sampled token in one place at most (the paper's sampler).

A leaf is a call that none goes on from; its path is that call and those it goes on from. Bounded by `j_max`: from the
highest role that has tokens left, a leaf is drawn with a probability in proportion to the tokens of its path that are
not taken yet; the path is taken and its tokens are masked; and again, until nothing is left or `j_max` paths are taken.
Without a bound every leaf is taken, in log order, those that are refused last, so that they do not take their
ancestors' tokens along a path of their own.

Invariants: at most `j_max` paths; a call is in one path at most; a refused call is in none; what is taken is a function
of the tree, the bound and the seed.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opengyre.trees.calls import ROLES, Node, Role


@dataclass(frozen=True, slots=True)
class Path:
    """`calls`: those that are trained here, from the root on; all others on the way are context."""

    leaf: Node
    calls: tuple[Node, ...]
    role: Role

    @property
    def events(self) -> int:
        return sum(node.events for node in self.calls)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is trained, and what the bound left out: role -> sampled tokens."""

    paths: tuple[Path, ...]
    left_out: dict[str, int]


def choose(
    nodes: Sequence[Node], roles: Mapping[str, Role], *, j_max: int | None = None, seed: int | str = 0
) -> Chosen:
    """Paths of the nodes of one execution, in log order. Raises `ValueError` for a bound below 1."""
    if j_max is not None and j_max < 1:
        raise ValueError(f"j_max is {j_max}; allowed are values from 1, or none")
    leaves = [node for node in nodes if not node.children]
    taken: set[int] = {id(node) for node in nodes if node.refused is not None or not node.events}
    paths: list[Path] = []
    if j_max is None:
        leaves.sort(key=lambda node: node.refused is not None)
        paths.extend(_take(leaf, roles, taken) for leaf in leaves)
    else:
        rng = random.Random(f"{seed}")  # noqa: S311 - a seeded draw
        while len(paths) < j_max and (leaf := _draw(nodes, leaves, roles, taken, rng)) is not None:
            paths.append(_take(leaf, roles, taken))
    left: Counter[str] = Counter()
    for node in nodes:
        if id(node) not in taken:
            left[roles[node.call]] += node.events
    return Chosen(tuple(path for path in paths if path.calls), dict(sorted(left.items())))


def _take(leaf: Node, roles: Mapping[str, Role], taken: set[int]) -> Path:
    calls: list[Node] = []
    node: Node | None = leaf
    while node is not None:
        if id(node) not in taken:
            taken.add(id(node))
            calls.append(node)
        node = node.parent
    return Path(leaf, tuple(reversed(calls)), roles[leaf.call])


def _draw(
    nodes: Sequence[Node], leaves: Sequence[Node], roles: Mapping[str, Role], taken: set[int], rng: random.Random
) -> Node | None:
    masses: dict[int, int] = {}
    for node in nodes:  # A parent comes before its children.
        above = masses[id(node.parent)] if node.parent is not None else 0
        masses[id(node)] = above + (node.events if id(node) not in taken else 0)
    for role in ROLES:
        own = [leaf for leaf in leaves if roles[leaf.call] == role and masses[id(leaf)]]
        if own:
            place = rng.random() * sum(masses[id(leaf)] for leaf in own)
            for leaf in own:
                place -= masses[id(leaf)]
                if place < 0:
                    return leaf
            return own[-1]
    return None


def shares(nodes: Sequence[Node]) -> dict[str, float]:
    """Call -> weight of its tokens where calls with one prompt after one call are alternatives (worlds of their own):
    the share of the leaves below that alternative, times that of what it goes on from. 1 everywhere where there are
    none."""
    leaves: dict[int, int] = {}
    for node in reversed(nodes):
        live = node.refused != "superseded"
        leaves[id(node)] = sum(leaves[id(child)] for child in node.children) or int(live)
    # Worlds that went on alike have the same prompts, which are not alternatives: they go on from different calls.
    attempts: dict[tuple[object, int], list[Node]] = defaultdict(list)
    for node in nodes:
        attempts[node.question, id(node.parent)].append(node)
    found: dict[str, float] = {}
    for node in nodes:
        above = found[node.parent.call] if node.parent is not None else 1.0
        total = sum(leaves[id(other)] for other in attempts[node.question, id(node.parent)])
        found[node.call] = above * (leaves[id(node)] / total if total else 1.0)
    return found
