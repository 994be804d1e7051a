"""The loss on a table of events: one row a trained token.

`F = - sum_e w_e * min(r_e * A_e, clip(r_e, low, high) * A_e)` with `r_e = exp(logp_e - behaviour_e)`. The weights are
absolute, so the loss of an update is the plain sum over its events, in whatever parts they come. The bounds are
asymmetric (DAPO's clip-higher); `truncate` caps the ratio before all else, which also bounds it where the advantage is
negative.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the probability ratio, as ratios; 0 <= low <= 1 <= high."""

    low: float = 0.8
    high: float = 1.28
    truncate: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"clip is ({self.low}, {self.high}); allowed are 0 <= low <= 1 <= high")
        if self.truncate is not None and self.truncate < self.high:
            raise ValueError(f"truncate is {self.truncate}; allowed are values from high ({self.high})")


@dataclass(frozen=True, slots=True)
class Events:
    """Columns of the table, each `[events]`, of one floating type."""

    behaviour: Tensor
    """Log-prob under the policy and temperature that sampled the token."""
    advantage: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class LossStats:
    """What the events looked like, summed."""

    clipped: int
    """Events whose gradient the bounds stopped."""
    kl_sum: float
    """Sum of the k3 estimate of KL(behaviour || policy): `r - 1 - log r` (Schulman)."""
    max_ratio: float


def policy_loss(logp: Tensor, events: Events, clip: Clip) -> tuple[Tensor, LossStats]:
    """The loss (a scalar that carries a graph if `logp` does) of the events with log-probs `logp` (`[events]`)."""
    log_ratio = logp - events.behaviour
    # exp overflows float32 at 88; nothing that large is ever kept by the bounds.
    raw = torch.exp(log_ratio.clamp(max=30.0))
    ratio = raw if clip.truncate is None else raw.clamp(max=clip.truncate)
    free = ratio * events.advantage
    bound = ratio.clamp(clip.low, clip.high) * events.advantage
    loss = -(events.weight * torch.minimum(free, bound)).sum()
    with torch.no_grad():
        stopped = bound < free
        if clip.truncate is not None:
            stopped |= raw > clip.truncate
        stats = LossStats(
            clipped=int(stopped.sum()),
            kl_sum=float((raw - 1 - log_ratio).sum()),
            max_ratio=float(raw.max()) if raw.numel() else 0.0,
        )
    return loss, stats
