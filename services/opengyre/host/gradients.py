"""What a cell has accumulated for an update: the gradient of the groups that it holds, and their figures.

Invariants: everything in an accumulator belongs to one attempt of one update, at one base version; a group is in it
once; a group whose gradient failed left nothing in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from opengyre.learn.codec import flatten
from opengyre.learn.gradient import Gradients, GradientStats, InvalidSequenceError, Item, accumulate, zero_gradients
from opengyre.learn.loss import Clip
from opengyre.proto.group import Member
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest
from opengyre.tiny.checkpoint import load_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.weights.manifest import verify


def items_of(members: Sequence[Member], execution_weight: float) -> list[Item]:
    """What is trained of a group. A token's weight is its execution's over the execution's trained tokens.

    Members without an advantage are left out: their gradient is zero exactly.
    """
    return [
        Item(sequence=sequence, advantage=member.advantage, weight=execution_weight / member.trained_tokens)
        for member in members
        if member.advantage != 0 and member.trained_tokens > 0
        for sequence in member.sequences
    ]


def figures(members: Sequence[Member], found: GradientStats) -> UpdateStats:
    """The figures of one group; token sums are over tokens of members with an advantage.

    A sum that is not finite is given as 0: JSON has no such numbers. What is wrong shows in the gradient, which the
    trainer checks and refuses by the group's name.
    """
    return UpdateStats(
        executions=len(members),
        tokens=found.tokens,
        path_tokens=sum(member.path_tokens for member in members),
        loss=_finite(found.loss),
        clipped_tokens=found.clipped_tokens,
        kl_sum=_finite(found.kl_sum),
        entropy_sum=_finite(found.entropy_sum),
        logprob_gap_sum=_finite(found.logprob_gap_sum),
        logprob_gap_tokens=found.logprob_gap_tokens,
        score_sum=sum(member.score for member in members),
        zero_variance_groups=int(all(member.advantage == 0 for member in members)),
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def plus(one: UpdateStats, other: UpdateStats) -> UpdateStats:
    """Field by field; every field is a sum."""
    return UpdateStats(**{name: getattr(one, name) + getattr(other, name) for name in UpdateStats.__struct_fields__})


@dataclass(slots=True)
class Accumulator:
    """Made for the first group of a contribution."""

    update: int
    attempt: str
    contribution: str
    gradients: Gradients
    groups: list[str] = field(default_factory=list)
    stats: UpdateStats = field(default_factory=UpdateStats)

    def belongs(self, item: WorkItem) -> bool:
        """Whether the item is of the same attempt of the same update."""
        return (self.update, self.attempt) == (item.update, item.attempt)


class Learner:
    """The model at the base version, and gradients at it. Runs in the training thread only."""

    def __init__(self) -> None:
        self._base: Manifest | None = None
        self._model: TinyModel | None = None

    def model(self, base: Manifest) -> TinyModel:
        """The policy of `base`, verified; raises `WeightsError` or `ModelDirectoryError`."""
        if self._model is None or self._base != base:
            self._model = None
            verify(base)
            self._model = load_pretrained(Path(base.directory))
            self._base = base
        return self._model

    def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        """Add the item's group to `into`, or to a new accumulator called `name`; return it.

        Raises `InvalidSequenceError` before anything is added.
        """
        model = self.model(item.base)
        _check_vocabulary(members, model.config.vocab_size)
        into = into or Accumulator(item.update, item.attempt, name, zero_gradients(model))
        optimization = item.optimization
        found = accumulate(
            model,
            items_of(members, item.weight),
            into.gradients,
            clip=Clip(low=optimization.clip_low, high=optimization.clip_high),
            base_version=item.base.version,
        )
        into.groups.append(item.group.group)
        into.stats = plus(into.stats, figures(members, found))
        return into


def _check_vocabulary(members: Sequence[Member], size: int) -> None:
    for member in members:
        for sequence in member.sequences:
            if not all(0 <= token < size for token in sequence.tokens):
                raise InvalidSequenceError(f"{member.execution} holds a token outside the vocabulary of {size}")


def encoded(accumulator: Accumulator) -> bytes:
    """The gradient as safetensors."""
    return flatten(accumulator.gradients)


def members_of(blob: bytes) -> tuple[Member, ...]:
    """The members of a group that was too large for a message; raises `msgspec.DecodeError`."""
    return msgspec.json.decode(blob, type=tuple[Member, ...])
