"""The gradient of a set of sequences, added to an accumulator.

The loss is a plain sum over trained tokens with absolute weights, so gradients of parts add up to the gradient of the
whole, in whatever parts and order they come (to rounding). Sequences are batched by length under a bound of padded
tokens. The hidden states of trained tokens are gathered before the output embedding, so logits exist for those only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from opengyre.learn.loss import Clip, Events, policy_loss
from opengyre.proto import group

Gradients = dict[str, Tensor]
"""Parameter name -> float32 gradient."""

BATCH_TOKENS: Final = 4096


class PolicyModel(Protocol):
    """What is needed of a policy."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states `[batch, length, size]` of right-padded `tokens` (`[batch, length]`)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[events, vocab]` of hidden states `[events, size]`."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """A sequence with what it is worth: `weight` is the absolute weight of each trained token, times its span's."""

    sequence: group.Sequence
    advantage: float
    weight: float


@dataclass(slots=True)
class GradientStats:
    """Sums over the trained tokens; `merge` adds another's."""

    sequences: int = 0
    tokens: int = 0
    loss: float = 0.0
    clipped_tokens: int = 0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    max_ratio: float = 0.0
    logprob_gap_sum: float = 0.0
    """Of |trainer log-prob - behaviour log-prob| over tokens that the base version sampled."""
    logprob_gap_tokens: int = 0

    def merge(self, other: "GradientStats") -> None:
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.loss += other.loss
        self.clipped_tokens += other.clipped_tokens
        self.kl_sum += other.kl_sum
        self.entropy_sum += other.entropy_sum
        self.max_ratio = max(self.max_ratio, other.max_ratio)
        self.logprob_gap_sum += other.logprob_gap_sum
        self.logprob_gap_tokens += other.logprob_gap_tokens


class InvalidSequenceError(ValueError):
    """A sequence whose spans do not fit its tokens."""


def zero_gradients(model: PolicyModel) -> Gradients:
    """An empty accumulator for `model`."""
    return {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}


def check(sequence: group.Sequence) -> None:
    """Raise `InvalidSequenceError` unless every span lies in the sequence, after its first token, with a log-prob, a
    version and a positive temperature for each token."""
    for span in sequence.spans:
        if not 1 <= span.start <= span.end <= len(sequence.tokens):
            raise InvalidSequenceError(
                f"a span is [{span.start}, {span.end}); allowed is a range within [1, {len(sequence.tokens)})"
            )
        if not len(span.logprobs) == len(span.versions) == span.end - span.start:
            raise InvalidSequenceError(
                f"the span [{span.start}, {span.end}) has {len(span.logprobs)} log-probs and {len(span.versions)} "
                f"versions; it needs one for each token"
            )
        if not span.temperature > 0:
            raise InvalidSequenceError(f"a span's temperature is {span.temperature}; allowed are values above 0")


def batches(items: Sequence[Item], limit: int = BATCH_TOKENS) -> list[list[Item]]:
    """Items with something to train, of like length together; a batch has at most `limit` padded tokens or one item."""
    trained = [item for item in items if any(span.end > span.start for span in item.sequence.spans)]
    trained.sort(key=lambda item: len(item.sequence.tokens), reverse=True)
    result: list[list[Item]] = []
    longest = 0
    for item in trained:
        if result and (len(result[-1]) + 1) * longest <= limit:
            result[-1].append(item)
        else:
            result.append([item])
            longest = len(item.sequence.tokens)
    return result


@dataclass(frozen=True, slots=True)
class _Table:
    """A batch as tensors. `rows`, `columns`: where the hidden state lies that predicts each event's token."""

    tokens: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    temperature: Tensor
    versions: Tensor
    events: Events


def _table(batch: Sequence[Item], dtype: torch.dtype) -> _Table:
    length = max(len(item.sequence.tokens) for item in batch)
    tokens = torch.tensor([[*item.sequence.tokens, *[0] * (length - len(item.sequence.tokens))] for item in batch])
    rows: list[int] = []
    columns: list[int] = []
    behaviour: list[float] = []
    advantage: list[float] = []
    weight: list[float] = []
    temperature: list[float] = []
    versions: list[int] = []
    for row, item in enumerate(batch):
        for span in item.sequence.spans:
            count = span.end - span.start
            rows.extend([row] * count)
            columns.extend(range(span.start - 1, span.end - 1))
            behaviour.extend(span.logprobs)
            versions.extend(span.versions)
            temperature.extend([span.temperature] * count)
            advantage.extend([item.advantage] * count)
            weight.extend([item.weight * span.weight] * count)
    at, before = torch.tensor(rows), torch.tensor(columns)
    return _Table(
        tokens=tokens,
        rows=at,
        columns=before,
        targets=tokens[at, before + 1],
        temperature=torch.tensor(temperature, dtype=dtype),
        versions=torch.tensor(versions),
        events=Events(
            behaviour=torch.tensor(behaviour, dtype=dtype),
            advantage=torch.tensor(advantage, dtype=dtype),
            weight=torch.tensor(weight, dtype=dtype),
        ),
    )


def _log_probs(model: PolicyModel, table: _Table) -> tuple[Tensor, Tensor]:
    """Log-prob of each event's token under the policy at its temperature, and the entropy there (without a graph)."""
    hidden = model.hidden(table.tokens)[table.rows, table.columns]
    scores = torch.log_softmax(model.logits(hidden) / table.temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, table.targets[:, None]).squeeze(-1), entropy


def accumulate(
    model: PolicyModel,
    items: Iterable[Item],
    accumulator: Gradients,
    *,
    clip: Clip | None = None,
    base_version: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> GradientStats:
    """Add the gradient of the items' loss at `model`'s weights to `accumulator`; returns sums over their tokens.

    `base_version` is the version of `model`'s weights: over tokens that it sampled, the gap between the engine's and
    the trainer's log-probs is measured. The model's own `.grad` fields are left alone. Raises `InvalidSequenceError`
    before anything is added.
    """
    items = list(items)
    for item in items:
        check(item.sequence)
    named = list(model.named_parameters())
    parameters = [parameter for _, parameter in named]
    total = GradientStats()
    for batch in batches(items, batch_tokens):
        table = _table(batch, parameters[0].dtype)
        with torch.enable_grad():
            logp, entropy = _log_probs(model, table)
            loss, stats = policy_loss(logp, table.events, clip or Clip())
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                accumulator[name].add_(gradient)
        same = table.versions == base_version if base_version is not None else torch.zeros_like(table.versions).bool()
        gap = (logp.detach() - table.events.behaviour).abs()[same]
        total.merge(
            GradientStats(
                sequences=len(batch),
                tokens=len(table.targets),
                loss=float(loss.detach()),
                clipped_tokens=stats.clipped,
                kl_sum=stats.kl_sum,
                entropy_sum=float(entropy.sum()),
                max_ratio=stats.max_ratio,
                logprob_gap_sum=float(gap.sum()),
                logprob_gap_tokens=gap.numel(),
            )
        )
    return total
