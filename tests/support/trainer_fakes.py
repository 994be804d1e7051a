"""A trainer in the test's process, and cells that train without a host."""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from opengyre.proto import subjects
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Dispatch, RunSpec
from opengyre.proto.update import (
    HandOver,
    HandOverReply,
    PullReply,
    PullRequest,
    UpdateStats,
    WorkItem,
)
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, call, read
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import Settings
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.trainer.service import Trainer
from opengyre.weights.manifest import verify
from support.gradients import flatten

RUN = "r"
B, G, MU = 2, 2, 2
CONFIG = TinyConfig(vocab_size=16, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)


def ready(number: int, version: int = 0, run: str = RUN, size: int = G, **changes) -> GroupReady:
    group = f"{run}-g{number:06d}"
    span = Span(start=1, end=3, logprobs=(-0.5, -0.5), versions=(version, version), temperature=1.0)
    members = tuple(
        Member(
            execution=f"{group}-e{member:02d}", score=float(member % 2), advantage=1.0 - 2 * (member % 2),
            sequences=(Sequence(tokens=(1, 2, 3), spans=(span,)),), trained_tokens=2, path_tokens=3,
        )
        for member in range(size)
    )  # fmt: skip
    names = tuple(member.execution for member in members)
    fields = {"members": members, "executions": names, "group_size": size, **changes}
    return GroupReady(run=run, group=group, task=f"t{number % 3}", version=version, **fields)


@dataclass
class Cell:
    """A host that trains, without a host: its gradient of a group is a number that the group's name gives."""

    bus: Bus
    blobs: Blobs
    host: str
    boot: str = "b0"
    gradient: Callable[[WorkItem], float] = lambda item: int(item.group.group[-6:]) % 7 / 100
    held: list[WorkItem] = field(default_factory=list)
    total: float = 0.0
    handed: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def holding(self) -> tuple[str, ...]:
        return tuple(name for item in self.held for name in item.executions)

    async def pull(self, **changes) -> PullReply:
        request = PullRequest(
            host=self.host,
            boot=self.boot,
            update=self.held[0].update if self.held else None,
            attempt=self.held[0].attempt if self.held else None,
            holding=self.holding,
        )
        request = msgspec.structs.replace(request, **changes)
        return await call(self.bus, "trainer", "any", "pull", request, PullReply, timeout_s=1, patience_s=60)

    async def hand_over(self, *, leaving: bool = False, times: int = 1, killed: bool = False) -> HandOverReply:
        """`killed`: the trainer may be killed between two requests; another attempt refuses what the former took."""
        tensors = {name: torch.full(p.shape, self.total) for name, p in TinyModel(CONFIG).named_parameters()}
        # A figure that is not finite has no place in JSON.
        loss = self.total if math.isfinite(self.total) else 0.0
        stats = UpdateStats(tokens=2 * len(self.holding), loss=loss)
        request = HandOver(
            host=self.host, boot=self.boot, update=self.held[0].update, attempt=self.held[0].attempt,
            contribution=f"{self.boot}-{self.handed}", executions=self.holding,
            # Not synced, as a host's: a busy disk takes longer than some tests let a cell be silent.
            gradient=await self.blobs.put(flatten(tensors), durable=False), stats=stats, leaving=leaving,
        )  # fmt: skip
        self.handed += 1
        replies = [
            await call(self.bus, "trainer", "any", "hand_over", request, HandOverReply, timeout_s=1, patience_s=60)
            for _ in range(times)
        ]
        same = len(set(replies)) == 1 or (killed and not replies[-1].accepted)
        assert same, "the same request has the same answer"
        self.held, self.total = [], 0.0
        return replies[0]

    def add(self, item: WorkItem) -> None:
        assert not set(item.executions) & set(self.holding)
        assert tuple(member.execution for member in item.group.members) == item.executions or item.group.blob
        self.held.append(item)
        self.total += self.gradient(item)
        self.seen[item.group.group] += 1

    async def train(self, rng: random.Random | None = None, *, killed: bool = False) -> None:
        """Until `stop`; with `rng`, it now and then leaves, forgets what it holds, or asks twice."""
        while not self.stop.is_set():
            reply = await self.pull()
            luck = rng.random() if rng else 1.0
            if reply.discard:
                self.held, self.total = [], 0.0
            elif reply.item is not None and luck > 0.1:
                self.add(reply.item)
            elif reply.flush or (self.held and luck < 0.2):
                await self.hand_over(leaving=not reply.flush, times=2 if rng else 1, killed=killed)
            elif luck < 0.25:
                self.boot = f"{self.boot}x"
                self.held, self.total = [], 0.0
            if reply.wait is not None:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def trainer(bus: Bus, blobs: Blobs, tmp_path: Path, name: str, **settings) -> AsyncIterator[Context]:
    """A trainer in this process, which is stopped in order."""
    chosen = Settings.model_validate({"state_dir": tmp_path / "state", "trainer": settings})
    context = Context("trainer", name, chosen, bus, blobs, "http://nowhere")
    running = asyncio.create_task(Trainer(context).run())
    try:
        yield context
    finally:
        context.stopping.set()
        await asyncio.wait([running], timeout=60)
        running.cancel()
        await asyncio.wait([running], timeout=5)
    running.result()


async def start_run(bus: Bus, model: Path, updates: int | None = None, mu: int = MU) -> RunSpec:
    spec = RunSpec(
        run=RUN, model=str(model), updates=updates, dispatch=Dispatch(phi=1, mu=mu, batch_groups=B, group_size=G)
    )
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)
    return spec


async def offer(bus: Bus, *groups: GroupReady) -> None:
    for group in groups:
        await bus.publish(subjects.group_ready(group.run), group)


async def events(bus: Bus, stream: str, subject: str) -> list:
    return [stored.event() for stored in await read(bus, stream, subject)]


async def check_exactly_once(bus: Bus, groups: int, updates: int) -> None:
    """Law 3 and law 4 from the streams alone."""
    done = await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))
    assert [event.version for event in done] == list(range(1, updates + 1))
    executions = [name for event in done for name in event.executions]
    assert sorted(executions) == sorted(m.execution for n in range(groups) for m in ready(n).members)
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    assert sorted((c.group, c.outcome) for c in consumed) == [(f"{RUN}-g{n:06d}", "trained") for n in range(groups)]
    at_version = {group: event.version - 1 for event in done for group in event.groups}
    assert all(c.version == at_version[c.group] for c in consumed)
    published = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    assert [p.manifest.version for p in published] == [v for v in range(updates + 1) if v % MU == 0 or v == updates]
    for event in published[-1:]:
        verify(event.manifest)
