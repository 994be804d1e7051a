"""Log-ratios of two policies, kept finite, and estimates of their divergence."""

from typing import Final, Literal

import torch
from torch import Tensor

from opengyre.learn.events import Events

LOG_RATIO_MAX: Final = 20.0
"""Beyond e^20 a ratio is a fault of the numbers and not a preference; exp overflows float32 at 88, its square at 44."""

Estimator = Literal["k2", "k3"]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, at most `exp(LOG_RATIO_MAX)`, where its gradient is 0."""
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_MAX))


def log_ratio(logp: Tensor, events: Events) -> Tensor:
    """Log of the policy's probability over the behaviour's, `[events]`."""
    return logp - events.behaviour


def reference_kl(logp: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimates of KL(policy || reference) from tokens of the policy, `[events]`, never negative (Schulman, 2020).

    `k3`: `exp(d) - 1 - d` with `d = reference - logp`, unbiased (GRPO's). `k2`: `d ** 2 / 2`, whose gradient is that of
    the divergence where the tokens are the policy's.
    """
    apart = reference - logp
    if estimator == "k2":
        return apart.square() / 2
    return ratio_of(apart) - 1 - apart
