"""A learner of several processes: the executions of each group are shared among the ranks of this cell.

States: closed -> open (no process yet) -> started with the first group -> closed. When a rank is lost all ranks end,
with what was added so far: `add` and `write` raise `LearnerLostError`, the next group starts new ranks, and the
trainer gives out again what the worker then no longer holds.

Awaits: the ranks' answers, `WORK_S` at most (a group is as long as its executions; a rank that dies is seen at once).
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from opengyre.host.compute import Work, forest_of
from opengyre.host.gradients import check_vocabulary, executions_of, figures, items_of
from opengyre.host.learners import Accumulator, LearnerLostError, plus
from opengyre.host.ranked import Added, Part, add, load, total
from opengyre.learn.gradient import GradientStats
from opengyre.proto.group import Member
from opengyre.proto.update import WorkItem
from opengyre.proto.weights import Manifest
from opengyre.ranks.crew import Crew, RanksError, crew
from opengyre.ranks.sharing import share
from opengyre.shared.blobs import Written
from opengyre.tiny.config import ModelDirectoryError
from opengyre.weights.manifest import verify

WORK_S: Final = 3600.0
LOAD_S: Final = 600.0
COLLECTIVE_S: Final = 600.0
"""Ranks wait for each other at the end of a group: as long as one may work longer than another."""


class CrewLearner:
    """`world` ranks of `threads` threads each; `chunk`, `offload`, `forest_tokens` (of a rank) as in `TorchLearner`."""

    def __init__(
        self,
        world: int,
        threads: int,
        *,
        backend: str = "gloo",
        chunk: int = 2048,
        offload: bool,
        forest_tokens: int | None = None,
    ) -> None:
        self._world, self._threads, self._backend = world, threads, backend
        self._chunk, self._offload, self._forest_tokens = chunk, offload, forest_tokens
        self._crew: Crew | None = None
        self._ends: asyncio.Event | None = None
        self._running: asyncio.Task[None] | None = None
        self._loaded: tuple[Manifest, Manifest | None] | None = None
        self._vocabulary = 0
        self._name: str | None = None
        """The contribution that the ranks hold a sum of."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks, when there are any."""
        return self._crew.pids if self._crew is not None else ()

    def open(self) -> None:
        """The ranks are started with the first group: many cells never get one."""

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        began = time.monotonic()
        fresh = into is None
        if not fresh and self._name != into.contribution:
            raise LearnerLostError("the ranks that held the sum have ended")
        await self._load(item.base, item.reference)
        check_vocabulary(members, self._vocabulary)
        items, executions = items_of(members, item), executions_of(members, item.optimization)
        work = Work(items, executions, item.optimization, item.base.version)
        # Refused here, where nothing was added: ranks are past that when one of them fails.
        await asyncio.to_thread(forest_of, work)
        parts = [
            Part(part, fresh, self._chunk, self._offload, self._forest_tokens) for part in parts_of(work, self._world)
        ]
        self._name = None
        added: list[Added] = await self._burst(add, parts, WORK_S)
        self._name = name
        stats = GradientStats()
        for found in added:
            stats.merge(found.stats)
        told = figures(members, stats, item)
        if not all(found.finite for found in added):
            told = msgspec.structs.replace(told, broken=(item.group.group,))
        held = into or Accumulator(item.update, item.attempt, name, {})
        held.groups.append(item.group.group)
        unique = sum(found.unique_tokens for found in added)
        busy = time.monotonic() - began
        held.stats = plus(held.stats, msgspec.structs.replace(told, busy_s=busy, unique_tokens=unique))
        return held

    async def write(self, accumulator: Accumulator, path: Path) -> Written:
        """The sum, which the first rank writes. Raises `LearnerLostError`, also where the file cannot be written."""
        if self._name != accumulator.contribution:
            raise LearnerLostError("the ranks that held the sum have ended")
        # As slow as the disk: as long as a group's work.
        found = await self._burst(total, [path] * self._world, WORK_S)
        return found[0]

    def close(self) -> None:
        """The processes are killed; their remains are removed by the task that started them."""
        if self._crew is not None:
            self._crew.kill()
        if self._ends is not None:
            self._ends.set()
        self._crew = self._ends = self._loaded = self._name = None

    async def ended(self) -> None:
        """After `close`: no process is left, and nothing of them."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _load(self, base: Manifest, reference: Manifest | None) -> None:
        """Have the ranks hold these weights, verified."""
        if self._loaded == (base, reference):
            return
        for manifest in (base, reference):
            if manifest is not None:
                await asyncio.to_thread(verify, manifest)
        self._loaded = self._name = None
        found = await self._burst(load, [(base, reference)] * self._world, LOAD_S)
        if fault := next((answer for answer in found if isinstance(answer, str)), None):
            raise ModelDirectoryError(fault)
        self._vocabulary = found[0]
        self._loaded = (base, reference)

    async def _burst(self, work: Any, given: Sequence[Any], timeout_s: float) -> list[Any]:
        try:
            found = self._crew or await self._start()
            return await found.burst(work, given, timeout_s=timeout_s)
        except RanksError as error:
            self.close()
            raise LearnerLostError(str(error)) from error
        except asyncio.CancelledError:
            self.close()
            raise

    async def _start(self) -> Crew:
        await self.ended()
        started: asyncio.Future[Crew] = asyncio.get_running_loop().create_future()
        self._ends = asyncio.Event()
        self._running = asyncio.create_task(self._run(started, self._ends))
        self._crew = await started
        return self._crew

    async def _run(self, started: asyncio.Future[Crew], ends: asyncio.Event) -> None:
        """The crew's life; who waits for its start is told a fault of it."""
        try:
            async with crew(
                self._world, backend=self._backend, threads=self._threads, collective_s=COLLECTIVE_S
            ) as found:
                if not started.done():
                    started.set_result(found)
                await ends.wait()
        except RanksError as error:
            if not started.done():
                started.set_exception(error)
        except OSError as error:  # no process, no file to spare
            if started.done():
                raise
            started.set_exception(RanksError(f"no ranks can be started: {error}"))


def parts_of(work: Work, ranks: int) -> list[Work]:
    """A group's executions shared by their tokens; those of one stay together."""
    costs: dict[int, int] = {}
    for item, execution in zip(work.items, work.executions, strict=True):
        costs[execution] = costs.get(execution, 0) + len(item.sequence.tokens)
    names = list(costs)
    shares = share([float(costs[name]) for name in names], ranks)
    parts = []
    for mine in shares:
        chosen = {names[at] for at in mine}
        kept = [(i, e) for i, e in zip(work.items, work.executions, strict=True) if e in chosen]
        parts.append(Work([i for i, _ in kept], [e for _, e in kept], work.optimization, work.version))
    return parts


def backend_of(ranks: int, gpus: int) -> str:
    """NCCL where each rank has a GPU, else gloo."""
    return "nccl" if gpus >= ranks else "gloo"
