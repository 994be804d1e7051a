"""Group-relative advantages of executions; needs no torch.

A baseline is frozen from the members that were there when the group closed, so a late member is judged by what the
others were judged by.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["grpo", "loo", "no_std"]

_FLAT: Final = 1e-6
"""A standard deviation below this is a group without variance: it teaches nothing."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """An advantage is `(score - center) * scale`."""

    center: float
    scale: float


def baseline(scores: Sequence[float], kind: Kind = "grpo") -> Baseline:
    """Baseline of a group with these scores, at least one.

    `grpo`: mean and standard deviation (of the population); scale 0 without variance. `no_std`: mean, unscaled (Dr.
    GRPO). `loo`: leave-one-out (RLOO), which for a member is `n / (n - 1)` times its distance from the mean.
    """
    if not scores:
        raise ValueError("scores is empty; a group has at least one scored member")
    count = len(scores)
    # Equal scores must have the same mean to the bit, or rounding would be taken for variance.
    center = scores[0] if min(scores) == max(scores) else sum(scores) / count
    if kind == "no_std":
        return Baseline(center, 1.0)
    if kind == "loo":
        return Baseline(center, count / (count - 1) if count > 1 else 0.0)
    if kind == "grpo":
        deviation = (sum((score - center) ** 2 for score in scores) / count) ** 0.5
        return Baseline(center, 1.0 / deviation if deviation > _FLAT else 0.0)
    raise ValueError(f"kind is {kind!r}; allowed are grpo, loo and no_std")


def advantage(score: float, base: Baseline) -> float:
    """Advantage of one execution; for `loo` exact only for a member that the baseline was made from."""
    return (score - base.center) * base.scale


def advantages(scores: Sequence[float], kind: Kind = "grpo") -> list[float]:
    """Advantage of each member of a group, in order."""
    base = baseline(scores, kind)
    return [advantage(score, base) for score in scores]
