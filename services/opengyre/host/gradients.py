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

from opengyre.host.learners import Accumulator, UntrainableError, counted, plus, trained_of
from opengyre.learn.codec import flatten
from opengyre.learn.gradient import GradientStats, InvalidSequenceError, Item, accumulate, zero_gradients
from opengyre.learn.objective import objective
from opengyre.proto.group import Member
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest
from opengyre.tiny.checkpoint import load_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.weights.manifest import verify


def items_of(members: Sequence[Member], work: WorkItem) -> list[Item]:
    """What is trained of a group."""
    return [
        Item(sequence=sequence, advantage=member.advantage, weight=token_weight(member, work))
        for member in trained_of(members, work.optimization)
        for sequence in member.sequences
    ]


def token_weight(member: Member, work: WorkItem) -> float:
    """Of each trained token of the member, which has some, before its span's."""
    return work.token_weights.get(member.execution, work.weight / member.trained_tokens)


def figures(members: Sequence[Member], found: GradientStats, work: WorkItem) -> UpdateStats:
    """The figures of one group; sums over tokens are over those of `trained_of` the members.

    A sum that is not finite is given as 0: JSON has no such numbers. What is wrong shows in the gradient, which the
    trainer checks and refuses by the group's name.
    """
    sums = {name: getattr(found, name) for name in UpdateStats.__struct_fields__ if hasattr(found, name)}
    return msgspec.structs.replace(
        counted(members, work.base.version, work.optimization),
        **{name: _finite(value) for name, value in sums.items()},
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0


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
        try:
            found = accumulate(
                model,
                items_of(members, item),
                into.gradients,
                loss=objective(item.optimization),
                base_version=item.base.version,
            )
        except InvalidSequenceError as error:
            raise UntrainableError(str(error)) from error
        into.groups.append(item.group.group)
        busy = UpdateStats(busy_s=time.monotonic() - began)
        into.stats = plus(plus(into.stats, figures(members, found, item)), busy)
        return into


def _check_vocabulary(members: Sequence[Member], size: int) -> None:
    for member in members:
        for sequence in member.sequences:
            if not all(0 <= token < size for token in sequence.tokens):
                raise UntrainableError(f"{member.execution} holds a token outside the vocabulary of {size}")
