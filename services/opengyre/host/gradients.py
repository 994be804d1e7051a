"""Real gradients of groups, with torch, and their figures.

Invariants: a group whose loss or gradient is not finite leaves nothing in the sum and is named in the figures, by which
the trainer skips the update; the weights are verified before they are loaded.

Torch computes in one thread, which lives from `open` to `close`.

Awaits: `add` is woken by the end of the thread's work of one item, `write` by that of a thread which writes.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from opengyre.host.compute import Work, gradient
from opengyre.host.learners import Accumulator, UntrainableError, counted, plus, trained_of
from opengyre.learn.codec import write_file
from opengyre.learn.gradient import GradientStats, Item
from opengyre.policy.open import Policy, open_policy, refill
from opengyre.proto.group import Member
from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest, ShardFile
from opengyre.shared.blobs import Written
from opengyre.tiny.config import CONFIG_FILE
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

    A sum that is not finite is given as 0: JSON has no such numbers. What is wrong is said by `broken`.
    """
    sums = {name: getattr(found, name) for name in UpdateStats.__struct_fields__ if hasattr(found, name)}
    return msgspec.structs.replace(
        counted(members, work.base.version, work.optimization),
        **{name: _finite(value) for name, value in sums.items()},
        version_gaps={work.base.version - age: _finite(gap) for age, gap in sorted(found.gap_by_age.items())},
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0


def executions_of(members: Sequence[Member], optimization: Optimization) -> list[int]:
    """For each of `items_of` the members, the number of its execution."""
    trained = trained_of(members, optimization)
    return [number for number, member in enumerate(trained) for _ in member.sequences]


class TorchLearner:
    """The model at the base version, and gradients at it.

    `threads` are torch's; a forest is computed `chunk` tokens at a time, with its keys and values in host memory if
    `offload`, and in parts if it has more distinct tokens than `forest_tokens`.
    """

    def __init__(
        self, threads: int, *, chunk: int = 2048, offload: bool = False, forest_tokens: int | None = None
    ) -> None:
        self._threads = threads
        self._chunk, self._offload, self._forest_tokens = chunk, offload, forest_tokens
        self._pool: ThreadPoolExecutor | None = None
        self._opened: dict[str, tuple[Manifest, Policy]] = {}
        """`base` and `reference`: what is loaded of each."""

    def open(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="train", initializer=self._prepare)

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.compute, item, members, into, name)

    async def write(self, accumulator: Accumulator, path: Path) -> Written:
        return await asyncio.to_thread(write_file, path, accumulator.gradients)

    def close(self) -> None:
        self._opened = {}
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    async def ended(self) -> None:
        """It has main memory only, of this process; a group that is computed still ends soon."""

    def _prepare(self) -> None:
        # Both settings belong to the thread that computes.
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)

    def policy(self, manifest: Manifest, use: str = "base") -> Policy:
        """The policy of this version, verified; raises `WeightsError` or `ModelDirectoryError`."""
        found = self._opened.pop(use, None)
        if found is not None and found[0] == manifest:
            self._opened[use] = found
            return found[1]
        verify(manifest)
        directory = Path(manifest.directory)
        if found is not None and _config(found[0]) == _config(manifest):
            # A large model takes long to build, and two of them need not be in memory at once.
            refill(found[1], directory)
            policy = found[1]
        else:
            found = None
            policy = open_policy(directory)
        self._opened[use] = (manifest, policy)
        return policy

    def compute(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        """`add`, in this thread."""
        began = time.monotonic()
        policy = self.policy(item.base)
        reference = self.policy(item.reference, "reference") if item.reference is not None else None
        check_vocabulary(members, policy.vocabulary)
        items = items_of(members, item)
        work = Work(items, executions_of(members, item.optimization), item.optimization, item.base.version)
        into = into or Accumulator(item.update, item.attempt, name, zero_gradients(policy.parameters()))
        found = gradient(
            policy,
            work,
            into.gradients,
            reference=reference,
            chunk=self._chunk,
            offload=self._offload,
            forest_tokens=self._forest_tokens,
        )
        stats = figures(members, found.stats, item)
        if not (math.isfinite(found.stats.loss) and all(bool(g.isfinite().all()) for g in into.gradients.values())):
            # The update is skipped, so what others added before does not count either.
            for tensor in into.gradients.values():
                tensor.zero_()
            stats = msgspec.structs.replace(stats, broken=(item.group.group,))
        into.groups.append(item.group.group)
        busy = time.monotonic() - began
        into.stats = plus(into.stats, msgspec.structs.replace(stats, busy_s=busy, unique_tokens=found.unique_tokens))
        return into


def _config(manifest: Manifest) -> ShardFile | None:
    return next((file for file in manifest.files if file.name == CONFIG_FILE), None)


def zero_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An empty accumulator."""
    return {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}


def check_vocabulary(members: Sequence[Member], size: int) -> None:
    """Raises `UntrainableError` for a token that the model does not have."""
    for member in members:
        for sequence in member.sequences:
            if not all(0 <= token < size for token in sequence.tokens):
                raise UntrainableError(f"{member.execution} holds a token outside the vocabulary of {size}")
