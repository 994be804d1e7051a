"""Credit inside an execution: progress along the way, and baselines by tree.

Progress is a potential in [0, 1] that was measured out of the policy's reach before a turn (a share of checks that
pass); the score is the potential that an execution ends with. With gamma 1 a turn earns the difference of the
potentials around it, so that what is earned from turn t to the end telescopes to the return to go

    G_t = sum of (Phi_{k+1} - Phi_k) for k from t on = R - Phi(s_t).

Shaping by potential differences leaves the best policy as it is (Ng, Harada, Russell 1999). Against a baseline that is
the same in all states it would only shift: `-Phi(s_t)` is then all that it adds, and where every member gets everything
done each later turn would look bad (it is the same as a value function that begins as Phi: Wiewiora 2003). So the
baseline depends on the state: what the *other* members of the group got, in the end, from where they stood as far.
Their least-squares line of score on potential is `V(s) = center + slope * (Phi(s) - mean)`, and

    A_t = (G_t - (V(s_t) - Phi(s_t))) * scale = (R - center - slope * (Phi(s_t) - mean)) * scale,

a linear control variate as in Greensmith, Bartlett, Baxter 2004. `center` and `scale` are the group's (GRPO's, the
leave-one-out, or unscaled). The correction is made of what was known before the turn and of other members, which are
independent of its action, so its expected gradient is zero: with a scale that is fixed (`loo`, `no_std`) the expected
gradient is exactly that of the execution's advantage, and the best policy stays the best, however misleading the
potential is. Slope 0: the potential foretold nothing, and the advantage is the execution's; slope 1: what was measured
counts as earned. A step back costs what a step forward earned: `A_t - A_{t+1} = slope * scale * (Phi_{t+1} - Phi_t)`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final


def rewards(score: float, potentials: Sequence[float]) -> list[float]:
    """Of each turn: the potential after it less that before it; after the last comes the score. `potentials`: before
    each turn. Raises `ValueError` unless all are in [0, 1]."""
    _check([*potentials, score])
    return [after - before for before, after in pairwise([*potentials, score])]


def to_go(score: float, potentials: Sequence[float]) -> list[float]:
    """Of each turn: the sum of `rewards` from it on, which is the score less the potential before it."""
    _check([*potentials, score])
    return [score - before for before in potentials]


def _check(potentials: Sequence[float]) -> None:
    if any(not 0 <= value <= 1 for value in potentials):
        raise ValueError("a potential is outside [0, 1]")


@dataclass(frozen=True, slots=True)
class Course:
    """What a member tells of how far potentials foretell scores: its score, and over its turns the potential's mean,
    mean square, least and greatest."""

    score: float
    mean: float
    square: float
    low: float
    high: float


def course(score: float, potentials: Sequence[float | None]) -> Course | None:
    """Of a member with this potential before each of its turns (None: not measured yet); None where there is none."""
    known = [value for value in potentials if value is not None]
    if not known:
        return None
    _check([*known, score])
    mean = math.fsum(known) / len(known)
    return Course(score, mean, math.fsum(value * value for value in known) / len(known), min(known), max(known))


@dataclass(frozen=True, slots=True)
class Foretold:
    """A line of score on potential: `slope * (potential - mean)` above the mean score."""

    slope: float = 0.0
    """In [0, 1]: a score is no more than what is measured, and progress that foretells failure is chance."""
    mean: float = 0.0


NOTHING: Final = Foretold()


def foretold(courses: Sequence[Course]) -> Foretold:
    """The least-squares line through all turns of these members, each member with the same weight. Flat where fewer
    than two have potentials, and where potentials or scores do not vary."""
    if len({one.score for one in courses}) < 2:
        return NOTHING
    if min(one.low for one in courses) == max(one.high for one in courses):
        return NOTHING
    count = len(courses)
    mean = math.fsum(one.mean for one in courses) / count
    center = math.fsum(one.score for one in courses) / count
    spread = math.fsum(one.square for one in courses) / count - mean * mean
    along = math.fsum((one.score - center) * (one.mean - mean) for one in courses) / count
    if not spread > 0 or not along > 0:
        return NOTHING
    return Foretold(min(1.0, along / spread), mean)


def by_turn(score: float, potential: float | None, line: Foretold, center: float, scale: float) -> float:
    """Advantage of the tokens of a turn (the module's formula); `line` is made from other members than its own.
    Without a potential it is the execution's advantage, to the bit, and so it is on a flat line."""
    if potential is None:
        return (score - center) * scale
    return (score - center - line.slope * (potential - line.mean)) * scale


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
