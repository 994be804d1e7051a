"""Real gradients of groups, with torch, and their figures.

Torch computes in one thread, which lives from `open` to `close`.

Awaits: `add` is woken by the end of the thread's work of one item.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from opengyre.host.learners import Accumulator, UntrainableError, counted, plus
from opengyre.learn.codec import flatten
from opengyre.learn.gradient import GradientStats, InvalidSequenceError, Item, accumulate, zero_gradients
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


def figures(members: Sequence[Member], found: GradientStats, base: int) -> UpdateStats:
    """The figures of one group at the version `base`; token sums are over tokens of members with an advantage.

    A sum that is not finite is given as 0: JSON has no such numbers. What is wrong shows in the gradient, which the
    trainer checks and refuses by the group's name.
    """
    return msgspec.structs.replace(
        counted(members, base),
        tokens=found.tokens,
        loss=_finite(found.loss),
        clipped_tokens=found.clipped_tokens,
        kl_sum=_finite(found.kl_sum),
        entropy_sum=_finite(found.entropy_sum),
        logprob_gap_sum=_finite(found.logprob_gap_sum),
        logprob_gap_tokens=found.logprob_gap_tokens,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


class TorchLearner:
    """The model at the base version, and gradients at it. `threads` are torch's."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._base: Manifest | None = None
        self._model: TinyModel | None = None

    def open(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="train", initializer=self._prepare)

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.compute, item, members, into, name)

    async def encoded(self, accumulator: Accumulator) -> bytes:
        return await asyncio.to_thread(flatten, accumulator.gradients)

    def close(self) -> None:
        self._base = self._model = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _prepare(self) -> None:
        # Both settings belong to the thread that computes.
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)

    def model(self, base: Manifest) -> TinyModel:
        """The policy of `base`, verified; raises `WeightsError` or `ModelDirectoryError`."""
        if self._model is None or self._base != base:
            self._model = None
            verify(base)
            self._model = load_pretrained(Path(base.directory))
            self._base = base
        return self._model

    def compute(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        """`add`, in this thread."""
        began = time.monotonic()
        model = self.model(item.base)
        _check_vocabulary(members, model.config.vocab_size)
        into = into or Accumulator(item.update, item.attempt, name, zero_gradients(model))
        optimization = item.optimization
        try:
            found = accumulate(
                model,
                items_of(members, item.weight),
                into.gradients,
                clip=Clip(low=optimization.clip_low, high=optimization.clip_high),
                base_version=item.base.version,
            )
        except InvalidSequenceError as error:
            raise UntrainableError(str(error)) from error
        into.groups.append(item.group.group)
        busy = UpdateStats(busy_s=time.monotonic() - began)
        into.stats = plus(plus(into.stats, figures(members, found, item.base.version)), busy)
        return into


def _check_vocabulary(members: Sequence[Member], size: int) -> None:
    for member in members:
        for sequence in member.sequences:
            if not all(0 <= token < size for token in sequence.tokens):
                raise UntrainableError(f"{member.execution} holds a token outside the vocabulary of {size}")
