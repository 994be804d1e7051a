"""The table of events that a loss is a function of: one row a trained token, in the order of the log-probs given to it.

Weights are absolute: they are fixed before anything is packed (`opengyre.trees.weights`), so the loss of an update is
the plain sum over its events, in whatever parts they come. A sequence is never split over tables.
"""

from dataclasses import dataclass, field, fields
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Events:
    """Columns `[events]`; the first three and `reference` of one floating type, the others int64."""

    behaviour: Tensor
    """Log-prob under the policy and temperature that sampled the token, nats."""
    advantage: Tensor
    weight: Tensor
    sequence: Tensor | None = None
    """Which sequence of this table the event is of: any numbers from 0. What has a ratio of its own needs it."""
    execution: Tensor | None = None
    """Which execution of this table."""
    reference: Tensor | None = None
    """Log-prob under the reference policy, at the same temperature. A KL term needs it."""
    age: Tensor | None = None
    """Versions between the one that sampled the token and the one that is trained; 0: sampled by the latter."""

    def __post_init__(self) -> None:
        """Raises `ValueError` where a column has another shape than `behaviour`."""
        for column in fields(self):
            tensor = getattr(self, column.name)
            if tensor is not None and tensor.shape != self.behaviour.shape:
                raise ValueError(
                    f"{column.name} is {list(tensor.shape)}; allowed is the shape of behaviour, "
                    f"{list(self.behaviour.shape)}"
                )


GREATEST: Final = {"max_ratio", "logprob_gap_max"}
"""Figures of which the greater one counts; of the others the sum."""


@dataclass(slots=True)
class LossStats:
    """What the events looked like, summed, under the names of `proto.update.UpdateStats`; `merge` adds another's.

    Masked events count in `tokens` and `masked_tokens`, and in the gap to the engine. A ratio is that which the loss
    uses (a token's or a sequence's), `exp(logp - behaviour)` before any bound.
    """

    tokens: int = 0
    loss: float = 0.0
    masked_tokens: int = 0
    """Events that are older than the loss allows."""
    clipped_tokens: int = 0
    """Events whose gradient the bounds stopped, or whose importance weight was cut."""
    kl_sum: float = 0.0
    """Of the k3 estimate of KL(behaviour || policy): `r - 1 - log r`."""
    reference_kl_sum: float = 0.0
    """Of the estimate of KL(policy || reference) that the loss has."""
    max_ratio: float = 0.0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    """With `ratio_sum`: an effective sample size, `ratio_sum ** 2 / ratio_square_sum` (Kish)."""
    logprob_gap_sum: float = 0.0
    """Of |logp - behaviour| over events of age 0: trainer and engine at one version."""
    logprob_gap_tokens: int = 0
    logprob_gap_max: float = 0.0
    offset_sum: float = 0.0
    """Of logp - behaviour over the same events, with its sign."""
    offset_square_sum: float = 0.0
    behaviour_sum: float = 0.0
    behaviour_square_sum: float = 0.0
    offset_behaviour_sum: float = 0.0
    gap_by_age: dict[int, float] = field(default_factory=dict)
    """Age -> sum of |logp - behaviour|."""

    def merge(self, other: "LossStats") -> None:
        for column in fields(other):
            mine, theirs = getattr(self, column.name), getattr(other, column.name)
            if isinstance(mine, dict):
                value = {age: mine.get(age, 0.0) + theirs.get(age, 0.0) for age in sorted({*mine, *theirs})}
            else:
                value = max(mine, theirs) if column.name in GREATEST else mine + theirs
            setattr(self, column.name, value)


def live(events: Events, max_age: int | None) -> Tensor:
    """Which events have a loss, `[events]` of bool: those of at most `max_age`, or all. Raises `ValueError` without
    ages."""
    if max_age is None:
        return torch.ones_like(events.behaviour, dtype=torch.bool)
    if events.age is None:
        raise ValueError("the events have no age; max_age needs it")
    return events.age <= max_age
