"""What a training worker computes with: the interface, and what it accumulates. Needs no torch.

Invariants: everything in an accumulator belongs to one attempt of one update, at one base version; a group is in it
once; a group whose gradient failed left nothing in it.

Awaits: `add` is woken by the end of one item's work, `write` by a thread or a process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from opengyre.proto.group import Member
from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.shared.blobs import Written


class UntrainableError(Exception):
    """A group that no gradient can be taken of; the message says why."""


class LearnerLostError(Exception):
    """What was accumulated is gone, with the process that held it."""


@dataclass(slots=True)
class Accumulator:
    """Made for the first group of a contribution."""

    update: int
    attempt: str
    contribution: str
    gradients: dict[str, Any]
    groups: list[str] = field(default_factory=list)
    """One name for each item that was added."""
    executions: list[str] = field(default_factory=list)
    stats: UpdateStats = field(default_factory=UpdateStats)

    def belongs(self, item: WorkItem) -> bool:
        """Whether the item is of the same attempt of the same update."""
        return (self.update, self.attempt) == (item.update, item.attempt)


class Learner(Protocol):
    """Gradients at a base version."""

    def open(self) -> None:
        """Be ready to compute; repeating it changes nothing."""
        ...

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        """Add the item's members to `into`, or to a new accumulator called `name`; return it, `busy_s` counted.

        Raises `UntrainableError`, `WeightsError` or `ModelDirectoryError` before anything is added, and
        `LearnerLostError` when nothing is left of `into`.
        """
        ...

    async def write(self, accumulator: Accumulator, path: Path) -> Written:
        """Write the gradient as safetensors, float32, to an empty file that is there, a tensor at a time.

        Raises `LearnerLostError` and `OSError`.
        """
        ...

    def close(self) -> None:
        """Free everything, without waiting for work under way."""
        ...

    async def ended(self) -> None:
        """After `close`: nothing of it holds memory that an engine needs."""
        ...


def plus(one: UpdateStats, other: UpdateStats) -> UpdateStats:
    """Field by field; every field is a sum."""
    return one + other


def trained_of(members: Sequence[Member], optimization: Optimization) -> list[Member]:
    """Members whose gradient is not zero exactly: with an advantage, or any where the loss has a KL term."""
    return [m for m in members if m.trained_tokens > 0 and (optimization.kl > 0 or m.judged)]


def counted(members: Sequence[Member], base: int, optimization: Optimization | None = None) -> UpdateStats:
    """What can be counted of one group without computing; sums over trained tokens are of `trained_of` the members.

    `base` is the version that is trained.
    """
    trained = trained_of(members, optimization or Optimization())
    versions = Counter(
        version
        for member in trained
        for sequence in member.sequences
        for span in sequence.spans
        for version in span.versions
    )
    return UpdateStats(
        executions=len(members),
        tokens=sum(member.trained_tokens for member in trained),
        path_tokens=sum(member.path_tokens for member in members),
        score_sum=sum(member.score for member in members),
        zero_variance_groups=int(not any(member.judged for member in members)),
        token_staleness_sum=sum((base - version) * tokens for version, tokens in versions.items()),
        token_versions=dict(sorted(versions.items())),
    )


def members_of(blob: bytes) -> tuple[Member, ...]:
    """The members of a group that was too large for a message; raises `msgspec.DecodeError`."""
    return msgspec.json.decode(blob, type=tuple[Member, ...])
