"""Credit inside an execution: progress along the way, and baselines by tree.

Progress is a potential in [0, 1] that was measured out of the policy's reach after each turn (a share of checks that
pass). Its differences, without discount, leave the best policy as it is (Ng et al. 1999) where the potential is a
function of the state and its last value is part of the score; a step back costs what a step forward earned.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def rewards(potentials: Sequence[float]) -> list[float]:
    """Of each turn: the potential after it less that before it. `potentials`: before the first turn, then after each.

    Raises `ValueError` unless all are in [0, 1].
    """
    _check(potentials)
    return [after - before for before, after in pairwise(potentials)]


def to_go(score: float, potentials: Sequence[float]) -> list[float]:
    """Of each turn: the score, and the progress from before it to the end. They need a baseline of their state."""
    _check(potentials)
    last = potentials[-1] if potentials else 0.0
    return [score + last - before for before in potentials[:-1]]


def _check(potentials: Sequence[float]) -> None:
    if any(not 0 <= value <= 1 for value in potentials):
        raise ValueError("a potential is outside [0, 1]")


def values(parents: Mapping[str, str | None], returns: Mapping[str, float]) -> dict[str, float]:
    """The mean return of the leaves below each node (and at it). `parents`: node -> the one above, parents first;
    `returns`: leaf -> its return."""
    sums = {name: (returns[name], 1) if name in returns else (0.0, 0) for name in parents}
    for name in reversed(list(parents)):
        above = parents[name]
        if above is not None:
            sums[above] = (sums[above][0] + sums[name][0], sums[above][1] + sums[name][1])
    return {name: total / count for name, (total, count) in sums.items() if count}


def advantages(parents: Mapping[str, str | None], returns: Mapping[str, float]) -> dict[str, float]:
    """Advantage of going from a node's parent to it: its value less that of the parent's other leaves (leave one
    subtree out); 0 where no other leaf is below the parent, and for roots without siblings. Roots have one parent in
    common, so that with leaves only this is the group's leave-one-out baseline."""
    counts: dict[str | None, int] = {None: 0, **dict.fromkeys(parents, 0)}
    sums: dict[str | None, float] = {None: 0.0, **dict.fromkeys(parents, 0.0)}
    for name in reversed(list(parents)):
        if name in returns:
            counts[name] += 1
            sums[name] += returns[name]
        counts[parents[name]] += counts[name]
        sums[parents[name]] += sums[name]
    found: dict[str, float] = {}
    for name, above in parents.items():
        others = counts[above] - counts[name]
        if not counts[name] or not others:
            found[name] = 0.0
        else:
            found[name] = sums[name] / counts[name] - (sums[above] - sums[name]) / others
    return found
