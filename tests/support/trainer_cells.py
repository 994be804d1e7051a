"""Cells that train for real, without hosts: in the test's process, or in one of their own that can be killed.

As a program: `python -m support.trainer_cells URL STATE HOST STOP` trains as HOST until it was given its STOP-th piece
of work, says so on its standard output and holds it, and all before it, until it is killed.
"""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from opengyre.host.gradients import TorchLearner
from opengyre.host.learners import Accumulator
from opengyre.host.worker import Worker
from opengyre.proto.group import GroupReady, Member, Span
from opengyre.proto.group import Sequence as Path_
from opengyre.proto.update import WorkItem
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import CacheSettings, Settings

Gate = Callable[[int], Awaitable[None]]
"""Called before the n-th piece of work of a cell, from 1, is computed."""


class Gated(TorchLearner):
    """Waits at its gate. Of the group `wild` it computes what overflows, as a fault of its weights or numbers would."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(1)
        self._gate = gate
        self.taken = 0
        self.wild: str | None = None

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        self.taken += 1
        await self._gate(self.taken)
        if item.group.group == self.wild:
            members = [msgspec.structs.replace(members[0], advantage=1e39), *members[1:]]
        return await super().add(item, members, into, name)


async def through(_: int) -> None:
    """No gate."""


class TrainingCell:
    """A cell in this process: `leave` lets it hand over and go."""

    def __init__(self, bus: Bus, blobs: Blobs, folder: Path, host: str, gate: Gate = through) -> None:
        settings = Settings.model_validate({"state_dir": folder / "state"})
        context = Context("host", host, settings, bus, blobs, "http://nowhere")
        self.learner = Gated(gate)
        self.worker = Worker(context, host, f"{host}-boot", self.learner)
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self.worker.train(self._leaving))

    async def leave(self) -> None:
        self._leaving.set()
        await asyncio.wait_for(self._task, 30)
        await self.worker.leave()

    async def kill(self) -> None:
        """Gone without a word, as far as the trainer can see."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.worker.close()


@contextlib.asynccontextmanager
async def cells(bus: Bus, blobs: Blobs, folder: Path, *gates: Gate) -> AsyncIterator[list[TrainingCell]]:
    """One cell for each gate; what is left of them at the end is ended."""
    there = [TrainingCell(bus, blobs, folder, f"h{number}", gate) for number, gate in enumerate(gates)]
    try:
        yield there
    finally:
        for cell in there:
            await cell.kill()


def real_group(run: str, number: int, size: int, vocabulary: int = 16) -> GroupReady:
    """Executions of several lengths that share a prompt, with advantages that add up to 0; drawn by `number`."""
    rng = random.Random(number)
    group = f"{run}-g{number:06d}"
    prompt = tuple(rng.randrange(vocabulary) for _ in range(6))
    members: list[Member] = []
    for place in range(size):
        tokens = (*prompt, *(rng.randrange(vocabulary) for _ in range(rng.randint(3, 12))))
        count = len(tokens) - len(prompt)
        span = Span(
            start=len(prompt), end=len(tokens), logprobs=tuple(rng.uniform(-4, -2) for _ in range(count)),
            versions=(0,) * count, temperature=1.0,
        )  # fmt: skip
        members.append(
            Member(
                execution=f"{group}-e{place:02d}", score=rng.random(), advantage=1.0 - 2 * (place % 2),
                sequences=(Path_(tokens=tokens, spans=(span,)),), trained_tokens=count, path_tokens=len(tokens),
            )
        )  # fmt: skip
    names = tuple(member.execution for member in members)
    return GroupReady(
        run=run, group=group, task=f"t{number}", version=0, members=tuple(members), executions=names, group_size=size
    )


async def main(url: str, state: Path, host: str, stop: int) -> None:
    async def gate(number: int) -> None:
        if number == stop:
            print("held", flush=True)
            await asyncio.Event().wait()

    async with Bus(url, "host") as bus, Blobs(state / "blobs", CacheSettings()) as blobs:
        TrainingCell(bus, blobs, state.parent, host, gate)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
