"""Losses of an event, without its weight: pure functions of log-probs and the table of events.

With `r = exp(logp - behaviour)`, `A` the advantage and `sg` a constant to the gradient:

- `clip`: `-min(r * A, clip(r, low, high) * A)` (PPO; asymmetric bounds are DAPO's clip-higher);
- `truncated`: `-sg(min(r, cap)) * A * logp` (truncated importance sampling; CISPO);
- `sequence`: as `clip`, with `s = exp(mean of logp - behaviour over the event's sequence)` for `r` (GSPO);
- `reinforce`: `-A * logp`.

At r = 1 all of them have the gradient of `-A * logp`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from opengyre.learn.events import Events
from opengyre.learn.ratio import log_ratio, ratio_of


@dataclass(frozen=True, slots=True)
class Terms:
    """Columns `[events]`. `loss`: to be weighted and summed; `ratio`: before any bound, without a graph; `stopped`:
    the event's gradient is stopped by a bound, or its importance weight is cut."""

    loss: Tensor
    ratio: Tensor
    stopped: Tensor


def clipped(logp: Tensor, events: Events, low: float, high: float, truncate: float | None = None) -> Terms:
    """The clipped surrogate of each token. `truncate` caps the ratio before all else, which also bounds it where the
    advantage is negative (dual clip)."""
    ratio = ratio_of(log_ratio(logp, events))
    return _surrogate(ratio, events.advantage, low, high, truncate)


def truncated(logp: Tensor, events: Events, cap: float) -> Terms:
    """The policy gradient with truncated importance weights: a token is never masked, only its weight is bounded."""
    with torch.no_grad():
        ratio = ratio_of(log_ratio(logp, events))
    return Terms(-ratio.clamp(max=cap) * events.advantage * logp, ratio, ratio > cap)


def sequence_clipped(logp: Tensor, events: Events, low: float, high: float, kept: Tensor | None = None) -> Terms:
    """The clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios. `kept` (`[events]` of
    bool): the tokens that count in it. Raises `ValueError` without a sequence column."""
    if events.sequence is None:
        raise ValueError("the events have no sequence; a sequence-level loss needs it")
    apart = log_ratio(logp, events)
    counts = torch.ones_like(apart) if kept is None else kept.to(apart.dtype)
    apart = apart if kept is None else torch.where(kept, apart, 0.0)
    size = int(events.sequence.max()) + 1 if events.sequence.numel() else 0
    total = apart.new_zeros(size).index_add(0, events.sequence, apart)
    number = apart.new_zeros(size).index_add(0, events.sequence, counts).clamp(min=1)
    ratio = ratio_of(total / number)[events.sequence]
    return _surrogate(ratio, events.advantage, low, high, None)


def reinforce(logp: Tensor, events: Events) -> Terms:
    """The policy gradient without a correction; the ratio is for the statistics."""
    with torch.no_grad():
        ratio = ratio_of(log_ratio(logp, events))
    return Terms(-events.advantage * logp, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def _surrogate(raw: Tensor, advantage: Tensor, low: float, high: float, truncate: float | None) -> Terms:
    ratio = raw if truncate is None else raw.clamp(max=truncate)
    free = ratio * advantage
    bound = ratio.clamp(low, high) * advantage
    with torch.no_grad():
        stopped = bound < free
        if truncate is not None:
            stopped |= raw > truncate
    return Terms(-torch.minimum(free, bound), raw.detach(), stopped)
