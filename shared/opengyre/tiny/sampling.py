"""Sampling by counter: the noise of a token is a function of the request's seed and the token's absolute position.

So a call that was stopped after some tokens and is continued elsewhere, with its partial completion as the prompt's
end, yields the tokens that the unbroken call would have.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_MASK: Final = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finalizer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), of 53 random bits, for the token at `position` of a sequence sampled under `seed`."""
    mixed = _mix((_mix((seed + 0x9E3779B97F4A7C15) & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK)
    return (mixed >> 11) / (1 << 53)


def choose(logits: Tensor, temperature: Sequence[float], noise: Sequence[float]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs, one a row of `logits` (`[rows, vocab]`), by inverting the cumulative distribution.

    The log-prob is of the distribution that was sampled from: log-softmax of `logits / temperature`. Temperature 0
    takes the likeliest token; its log-prob is that at temperature 1.
    """
    heat = torch.tensor([value if value > 0 else 1.0 for value in temperature])
    logp = torch.log_softmax(logits / heat[:, None], dim=-1)
    cumulative = logp.double().exp().cumsum(-1)
    mark = torch.tensor(noise, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, mark, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    if min(temperature) <= 0:
        tokens = torch.where(torch.tensor([value <= 0 for value in temperature]), logits.argmax(-1), tokens)
    chosen = logp.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens.tolist(), chosen.tolist()
