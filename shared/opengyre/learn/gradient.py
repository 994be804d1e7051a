"""The gradient of a set of sequences, added to an accumulator.

The loss is a plain sum over trained tokens with absolute weights, so gradients of parts add up to the gradient of the
whole, in whatever parts and order they come (to rounding). Sequences are batched by length under a bound of padded
tokens. The hidden states of trained tokens are gathered before the output embedding, so logits exist for those only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from opengyre.learn.events import Events, LossStats
from opengyre.learn.objective import Objective, objective
from opengyre.proto import group
from opengyre.proto.run import Optimization

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
    """A sequence with what it is worth: `weight` is the absolute weight of each trained token, times its span's.

    `advantage` is that of the tokens of which no span says another.
    """

    sequence: group.Sequence
    advantage: float
    weight: float


@dataclass(slots=True)
class GradientStats(LossStats):
    """Sums over the trained tokens; `merge` adds another's."""

    sequences: int = 0
    entropy_sum: float = 0.0


class InvalidSequenceError(ValueError):
    """A sequence whose spans do not fit its tokens."""


def zero_gradients(model: PolicyModel) -> Gradients:
    """An empty accumulator for `model`."""
    return {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}


LOGPROB_MAX: Final = 0.1
"""Above it a log-prob is none, however roughly an engine rounds: a probability, perhaps."""
LOGPROB_MIN: Final = -1e4
"""Below it nothing is ever sampled: what is multiplied and summed in float32 has to stay far from where that ends."""
MAGNITUDE: Final = 1e6
"""Of advantages and weights."""
TEMPERATURES: Final = (0.01, 100.0)


def check(sequence: group.Sequence) -> None:
    """Raise `InvalidSequenceError`, naming the field, unless spans are apart, lie in the sequence after its first
    token, have for each token a log-prob and a version, and hold no number that float32 arithmetic cannot bear."""
    if sequence.adapter is not None or sequence.media or sequence.routes:
        raise InvalidSequenceError(
            "the sequence was sampled with an adapter, media or recorded routes; allowed are token ids alone, since "
            "the trainer would compute other log-probs"
        )
    end = 1
    for span in sorted(sequence.spans, key=lambda span: span.start):
        if not 1 <= span.start <= span.end <= len(sequence.tokens):
            raise InvalidSequenceError(
                f"a span is [{span.start}, {span.end}); allowed is a range within [1, {len(sequence.tokens)})"
            )
        if span.start < end:
            raise InvalidSequenceError(
                f"spans overlap at token {span.start}; allowed is a loss in one place for each token"
            )
        end = span.end
        if not len(span.logprobs) == len(span.versions) == span.end - span.start:
            raise InvalidSequenceError(
                f"the span [{span.start}, {span.end}) has {len(span.logprobs)} log-probs and {len(span.versions)} "
                f"versions; it needs one for each token"
            )
        if (fault := _range_fault(span)) is not None:
            raise InvalidSequenceError(fault)
        if min(span.versions, default=0) < 0:
            raise InvalidSequenceError(f"versions has {min(span.versions)}; allowed are values from 0")


def _range_fault(span: group.Span) -> str | None:
    """The first of its numbers that is out of range (not-a-number is, too)."""
    low, high = TEMPERATURES
    if not low <= span.temperature <= high:
        return f"a span's temperature is {span.temperature}; allowed are values from {low:g} to {high:g}"
    if not 0 <= span.weight <= MAGNITUDE:
        return f"a span's weight is {span.weight}; allowed are values from 0 to {MAGNITUDE:.0f}"
    if span.advantage is not None and not abs(span.advantage) <= MAGNITUDE:
        return f"a span's advantage is {span.advantage}; allowed are values from {-MAGNITUDE:.0f} to {MAGNITUDE:.0f}"
    for at, logprob in enumerate(span.logprobs, span.start):
        if not LOGPROB_MIN <= logprob <= LOGPROB_MAX:
            return f"logprobs has {logprob} for token {at}; allowed are values from {LOGPROB_MIN:.0f} to 0"
    return None


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
    events: Events


def _table(batch: Sequence[Item], dtype: torch.dtype, base_version: int | None) -> _Table:
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
            advantage.extend([item.advantage if span.advantage is None else span.advantage] * count)
            weight.extend([item.weight * span.weight] * count)
    at, before = torch.tensor(rows), torch.tensor(columns)
    return _Table(
        tokens=tokens,
        rows=at,
        columns=before,
        targets=tokens[at, before + 1],
        temperature=torch.tensor(temperature, dtype=dtype),
        events=Events(
            behaviour=torch.tensor(behaviour, dtype=dtype),
            advantage=torch.tensor(advantage, dtype=dtype),
            weight=torch.tensor(weight, dtype=dtype),
            sequence=at,
            age=base_version - torch.tensor(versions) if base_version is not None else None,
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
    loss: Objective | None = None,
    base_version: int | None = None,
    reference: PolicyModel | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> GradientStats:
    """Add the gradient of the items' loss at `model`'s weights to `accumulator`; returns sums over their tokens.

    `loss`: the default settings' without it. `base_version` is the version of `model`'s weights: ages count from it,
    and over tokens that it sampled, the gap between the engine's and the trainer's log-probs is measured. `reference`:
    the model of a KL term. The models' own `.grad` fields are left alone. Raises `InvalidSequenceError` before anything
    is added, `ValueError` where the loss needs a version or a reference that is not given.
    """
    items = list(items)
    for item in items:
        check(item.sequence)
    loss = loss or objective(Optimization())
    named = list(model.named_parameters())
    parameters = [parameter for _, parameter in named]
    total = GradientStats()
    for batch in batches(items, batch_tokens):
        table = _table(batch, parameters[0].dtype, base_version)
        events = table.events
        if reference is not None:
            with torch.no_grad():
                events = replace(events, reference=_log_probs(reference, table)[0])
        with torch.enable_grad():
            logp, entropy = _log_probs(model, table)
            value, stats = loss(logp, events)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                accumulator[name].add_(gradient)
        total.merge(stats)
        total.sequences += len(batch)
        total.entropy_sum += float(entropy.sum())
    return total
