"""The clipped loss on a table of events, by itself: what `objective` makes of the default settings."""

from dataclasses import dataclass

from torch import Tensor

from opengyre.learn.events import Events, LossStats
from opengyre.learn.objective import objective
from opengyre.proto.run import Optimization

__all__ = ["Clip", "Events", "LossStats", "policy_loss"]


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


def policy_loss(logp: Tensor, events: Events, clip: Clip) -> tuple[Tensor, LossStats]:
    """The loss (a scalar that carries a graph if `logp` does) of the events with log-probs `logp` (`[events]`)."""
    return objective(Optimization(clip_low=clip.low, clip_high=clip.high, truncate=clip.truncate))(logp, events)
