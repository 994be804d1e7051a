"""Behaviour cloning: cross-entropy on the demonstrator's turns.

Muon on the matrices, AdamW on embeddings and norms, both decaying linearly to 0: with AdamW alone a small decoder does
not learn to copy arguments within a minute. Deterministic in its arguments: batches come from a seeded generator, and
the number of steps is fixed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - the common name

from opengyre.shelltasks.demonstrate import Demonstration
from opengyre.tiny.model import TinyModel
from opengyre.tiny.tokenizer import TinyTokenizer

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each position the token that follows it where that is to be learned, else -100."""

    tokens: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class CloneSettings:
    steps: int = 256
    batch: int = 64
    matrix_rate: float = 0.02
    other_rate: float = 1e-2


def example(tokenizer: TinyTokenizer, demonstration: Demonstration) -> Example:
    """A demonstration as a policy would have met it: what it says itself is learned, all else is given."""
    tokens: list[int] = []
    targets: list[int] = []
    history: list[dict[str, str]] = []
    for message in demonstration.messages():
        if message["role"] == "assistant":
            prompt = tokenizer.render(history)
            said = tokenizer.render([*history, message], generation_prompt=False)[len(prompt) :]
            targets.extend([_IGNORED] * (len(prompt) - 1 - len(targets)))
            targets.extend(said)
            tokens = [*prompt, *said]
        history.append(message)
    # The last token is followed by nothing.
    targets.append(_IGNORED)
    return Example(tokens, targets)


def clone(
    model: TinyModel,
    examples: Sequence[Example],
    settings: CloneSettings,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train `model` in place; `progress` is told step and loss. Returns the mean loss of the last tenth of steps."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = (settings.matrix_rate, settings.other_rate)
    rng = random.Random(f"clone:{seed}")  # noqa: S311 - batches, not secrets
    losses: list[float] = []
    for step in range(settings.steps):
        batch = rng.sample(examples, min(settings.batch, len(examples)))
        length = max(len(item.tokens) for item in batch)
        tokens = torch.tensor([item.tokens + [0] * (length - len(item.tokens)) for item in batch])
        targets = torch.tensor([item.targets + [_IGNORED] * (length - len(item.targets)) for item in batch])
        learned = targets != _IGNORED
        loss = F.cross_entropy(model.logits(model.hidden(tokens)[learned]), targets[learned])
        loss.backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / settings.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if progress is not None:
            progress(step + 1, losses[-1])
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)
