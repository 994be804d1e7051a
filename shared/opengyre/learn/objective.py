"""The objective of a run: its settings as a function `(logp, events) -> (loss, stats)`.

A loss is a sum over events, `F = sum_e w_e * f_e`; which `f` is `Optimization.loss` (`opengyre.learn.losses`). The
gradient by parameters is then `sum_e (dF/dlogp_e) * grad logp_e`, whatever the loss.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from opengyre.learn.events import Events, LossStats, live
from opengyre.learn.losses import Terms, clipped, reinforce, sequence_clipped, truncated
from opengyre.learn.ratio import log_ratio, ratio_of, reference_kl
from opengyre.proto.run import Optimization

TRUNCATE: Final = 2.0
"""The cap of a `truncated` loss's importance weights where the settings name none."""

Objective = Callable[[Tensor, Events], tuple[Tensor, LossStats]]
"""`logp` is `[events]`; the loss is a scalar that carries a graph if `logp` does. Raises `ValueError` where the events
lack a column that the settings need."""


def objective(settings: Optimization) -> Objective:
    """The function that these settings say. Its weights are those of the events."""

    def terms(logp: Tensor, events: Events, kept: Tensor) -> Terms:
        match settings.loss:
            case "clip":
                return clipped(logp, events, settings.clip_low, settings.clip_high, settings.truncate)
            case "truncated":
                return truncated(logp, events, settings.truncate if settings.truncate is not None else TRUNCATE)
            case "sequence":
                return sequence_clipped(logp, events, settings.sequence_low, settings.sequence_high, kept)
            case "reinforce":
                return reinforce(logp, events)

    def evaluate(logp: Tensor, events: Events) -> tuple[Tensor, LossStats]:
        kept = live(events, settings.max_age)
        found = terms(logp, events, kept)
        values = found.loss
        estimate = None
        if settings.kl > 0:
            if events.reference is None:
                raise ValueError("the events have no reference log-probs; kl above 0 needs them")
            estimate = reference_kl(logp, events.reference, settings.kl_estimator)
            values = values + settings.kl * estimate
        loss = torch.where(kept, events.weight * values, 0.0).sum()
        return loss, _stats(logp, events, kept, found, estimate, loss)

    return evaluate


@torch.no_grad()
def _stats(
    logp: Tensor, events: Events, kept: Tensor, found: Terms, estimate: Tensor | None, loss: Tensor
) -> LossStats:
    apart = log_ratio(logp, events)[kept]
    ratio = found.ratio[kept]
    stats = LossStats(
        tokens=logp.numel(),
        loss=float(loss),
        masked_tokens=int((~kept).sum()),
        clipped_tokens=int(found.stopped[kept].sum()),
        kl_sum=float((ratio_of(apart) - 1 - apart).sum()),
        reference_kl_sum=float(estimate[kept].sum()) if estimate is not None else 0.0,
        max_ratio=float(ratio.max()) if ratio.numel() else 0.0,
        ratio_sum=float(ratio.sum()),
        ratio_square_sum=float(ratio.double().square().sum()),
    )
    if events.age is not None:
        offset = (logp - events.behaviour).double()
        for age in torch.unique(events.age).tolist():
            stats.gap_by_age[age] = float(offset[events.age == age].abs().sum())
        _parity(stats, offset[events.age == 0], events.behaviour[events.age == 0].double())
    return stats


def _parity(stats: LossStats, offset: Tensor, behaviour: Tensor) -> None:
    """Over events of one version: how far trainer and engine are apart, and which way."""
    stats.logprob_gap_sum, stats.logprob_gap_tokens = float(offset.abs().sum()), offset.numel()
    stats.logprob_gap_max = float(offset.abs().max()) if offset.numel() else 0.0
    stats.offset_sum, stats.offset_square_sum = float(offset.sum()), float(offset.square().sum())
    stats.behaviour_sum, stats.behaviour_square_sum = float(behaviour.sum()), float(behaviour.square().sum())
    stats.offset_behaviour_sum = float((offset * behaviour).sum())
