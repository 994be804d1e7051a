"""What measurements of the trainer say beside each other; pure, needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from opengyre.cli.bench_trainer_job import Measured

Arrays = Mapping[str, NDArray[Any]]


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient beside another: norm of the difference by the norm of the other, and their cosine."""

    relative: float
    cosine: float


class WayRow(msgspec.Struct, frozen=True, kw_only=True):
    way: str
    seconds: float
    cpu_s: float
    peak_mb: float
    """Above the weights."""
    path_tokens_per_s: float
    unique_tokens_per_s: float
    forward_tokens: int


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """The tree against each path in full."""

    part: str
    unique_tokens: int
    path_tokens: int
    longest: int
    events: int
    model: str
    tree: WayRow
    flat: WayRow
    of_flat: float
    """The tree's seconds by the flat ones."""
    of_ideal: float
    """The tree's seconds by flat seconds x unique / path tokens."""
    cpu_of_ideal: float
    """The same of processor seconds, which other load on the machine changes little."""
    pairs_of_ideal: float
    """The same of the pairs of tokens that attend to each other: unique by path pairs, by unique by path tokens. A
    unique token lies deeper than a path's token does, so of attention alone no tree can take less than this."""
    memory_of_flat: float
    gradient: Apart
    """The tree's, beside the flat one."""


class ChainRow(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int
    tree: WayRow
    state_mb: float
    """Keys, values and their gradients, as the model's numbers say."""


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """`growth_bytes`: a token's, of the tree's peak, by a straight line through the rows; `beyond_bytes`: beyond keys,
    values and their gradients, `state_bytes`."""

    model: str
    rows: tuple[ChainRow, ...]
    growth_bytes: float
    state_bytes: int
    beyond_bytes: float
    against: Against | None = None
    """At the longest, where it was measured in full too."""


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    members: int
    tree: WayRow
    detached: WayRow
    gradient: Apart
    """The detached one, beside the tree's."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """`tree_member_mb`, `detached_member_mb`: by which the peak grows for each further member."""

    model: str
    prompt: int
    branch: int
    rows: tuple[GroupRow, ...]
    tree_member_mb: float
    detached_member_mb: float


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Each beside the flat gradient in float32; `bfloat16_tree_flat`: beside the flat one in bfloat16."""

    model: str
    unique_tokens: int
    float32_tree: Apart
    bfloat16_tree: Apart
    bfloat16_flat: Apart
    bfloat16_tree_flat: Apart


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; a part that was not asked for is missing."""

    device: str
    dtype: str
    threads: int
    chunk: int
    scale: float
    seconds: float = 0.0
    """All of it."""
    prefix: tuple[Against, ...] = ()
    """With two models."""
    chain: Chain | None = None
    agent: Against | None = None
    group: Group | None = None
    precision: Precision | None = None


def row(measured: Measured) -> WayRow:
    return WayRow(
        way=measured.way,
        seconds=round(measured.seconds, 3),
        cpu_s=round(measured.cpu_s, 3),
        peak_mb=round(measured.peak_bytes / 1e6, 2),
        path_tokens_per_s=round(measured.path_tokens / measured.seconds, 1),
        unique_tokens_per_s=round(measured.unique_tokens / measured.seconds, 1),
        forward_tokens=measured.forward_tokens,
    )


def against(part: str, model: str, tree: Measured, flat: Measured, gradient: Apart) -> Against:
    share = tree.unique_tokens / tree.path_tokens
    return Against(
        part=part,
        unique_tokens=tree.unique_tokens,
        path_tokens=tree.path_tokens,
        longest=tree.longest,
        events=tree.events,
        model=model,
        tree=row(tree),
        flat=row(flat),
        of_flat=round(tree.seconds / flat.seconds, 4),
        of_ideal=round(tree.seconds / flat.seconds / share, 4),
        cpu_of_ideal=round(tree.cpu_s / max(1e-9, flat.cpu_s) / share, 4),
        pairs_of_ideal=round(tree.unique_pairs / tree.path_pairs / share, 4),
        memory_of_flat=round(tree.peak_bytes / max(1, flat.peak_bytes), 4),
        gradient=gradient,
    )


def chain(model: str, trees: Sequence[Measured], state_bytes: int, beside: Against | None) -> Chain:
    growth = slope([m.unique_tokens for m in trees], [m.peak_bytes for m in trees])
    return Chain(
        model=model,
        rows=tuple(
            ChainRow(
                tokens=m.unique_tokens, tree=row(m), state_mb=round(m.unique_tokens * state_bytes / 1e6, 2)
            )
            for m in trees
        ),
        growth_bytes=round(growth, 1),
        state_bytes=state_bytes,
        beyond_bytes=round(growth - state_bytes, 1),
        against=beside,
    )  # fmt: skip


def group(model: str, prompt: int, branch: int, found: Sequence[tuple[int, Measured, Measured, Apart]]) -> Group:
    """`found`: members, the tree's, the detached, the detached gradient beside the tree's."""
    members = [many for many, *_ in found]
    return Group(
        model=model,
        prompt=prompt,
        branch=branch,
        rows=tuple(
            GroupRow(members=many, tree=row(tree), detached=row(detached), gradient=gradient)
            for many, tree, detached, gradient in found
        ),
        tree_member_mb=round(slope(members, [tree.peak_bytes for _, tree, _, _ in found]) / 1e6, 3),
        detached_member_mb=round(slope(members, [detached.peak_bytes for _, _, detached, _ in found]) / 1e6, 3),
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line of least squares; 0 for a single point."""
    if len(x) < 2:
        return 0.0
    return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def apart(found: Arrays, wanted: Arrays) -> Apart:
    """Raises `ValueError` where they do not name the same parameters."""
    if set(found) != set(wanted):
        raise ValueError(f"only one of two gradients has {min(set(found) ^ set(wanted))}")
    squares = inner = mine = theirs = 0.0
    for name in wanted:
        one, other = found[name].astype(np.float64), wanted[name].astype(np.float64)
        squares += float(np.square(one - other).sum())
        inner += float((one * other).sum())
        mine += float(np.square(one).sum())
        theirs += float(np.square(other).sum())
    # Two equal gradients of zero are alike.
    if not mine * theirs:
        return Apart(relative=0.0 if mine == theirs else 1.0, cosine=1.0 if mine == theirs else 0.0)
    return Apart(relative=(squares / theirs) ** 0.5, cosine=inner / (mine * theirs) ** 0.5)
