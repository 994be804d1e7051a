"""From hidden states to log-probs and back, a few rows at a time: `[tokens, vocab]` never exists."""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from opengyre.treegrad.drivers.base import Driver
from opengyre.treegrad.kernels import wide

LOGITS: Final = 1 << 24
"""Numbers of the logits that exist at once."""


def log_probs(
    driver: Driver, hidden: Tensor, targets: Tensor, temperature: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob `[rows]` of each target after its hidden state (`[rows, hidden]`), and the entropy there, without a
    graph."""
    found, spread = [], []
    with torch.no_grad():
        for rows in _parts(len(targets), driver.vocab_size):
            scores = _scores(driver, hidden[rows], temperature[rows])
            found.append(scores.gather(-1, targets[rows, None]).squeeze(-1))
            if entropy:
                spread.append(-(scores.exp() * scores).sum(-1))
    if not found:
        return temperature.new_zeros(0), temperature.new_zeros(0) if entropy else None
    return torch.cat(found), torch.cat(spread) if entropy else None


def backpropagate(driver: Driver, hidden: Tensor, targets: Tensor, temperature: Tensor, g: Tensor) -> Tensor:
    """Back-propagate `sum g * log-prob` into the output embedding's parameters; returns the gradient of `hidden`."""
    gradient = torch.empty_like(hidden)
    for rows in _parts(len(targets), driver.vocab_size):
        with torch.enable_grad():
            leaf = hidden[rows].detach().requires_grad_()
            scores = _scores(driver, leaf, temperature[rows])
            objective = (scores.gather(-1, targets[rows, None]).squeeze(-1) * g[rows]).sum()
            objective.backward()
        assert leaf.grad is not None
        gradient[rows] = leaf.grad
    return gradient


def _scores(driver: Driver, hidden: Tensor, temperature: Tensor) -> Tensor:
    logits = driver.logits(hidden)
    return torch.log_softmax(logits.to(wide(logits.dtype)) / temperature[:, None], dim=-1)


def _parts(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, LOGITS // vocab)
    for low in range(0, rows, step):
        yield slice(low, min(rows, low + step))
