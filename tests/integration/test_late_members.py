"""Late members train late, through allocator, trajectory and trainer as processes, which are killed under way."""

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto import subjects
from opengyre.proto.base import tag_of
from opengyre.proto.decision import StalenessReport, StalenessRequest
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import Member
from opengyre.proto.run import Dispatch, RunSpec
from opengyre.proto.task import Check, GroupConsumed, GroupScored, TaskSpec, TaskSubmitted
from opengyre.proto.traj import Call, Ended, Overdue, Part, Started, TrajEvent, Verified, VersionSpan
from opengyre.proto.update import Committed, RunFinished
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, call, follow, pulling, read
from opengyre.shared.bus.topology import consumers
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trajectory.replay import replay_groups
from support import eventually
from support.trainer_fakes import CONFIG, RUN, Cell, events

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

B, G, UPDATES = 2, 4, 8


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


class Services:
    """Processes, killed and started again as a supervisor would."""

    def __init__(self, url: str, folder: Path) -> None:
        self._env = {
            **os.environ, "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(folder / "state"), "OMP_NUM_THREADS": "1",
            "GYRE_ALLOCATOR__TICK_S": "0.05",
        }  # fmt: skip
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as out:
            command = [sys.executable, "-m", f"opengyre.{name}"]
            self._running[name] = subprocess.Popen(command, env=self._env, stdout=out, stderr=out, cwd=self._folder)

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait(60)

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(60)


@dataclass
class Rollout:
    """Writes the logs of the episodes that are dispatched. In every third group two members hang until it has closed;
    one execution in eleven has no score."""

    bus: Bus
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    closed: dict[str, asyncio.Event] = field(default_factory=dict)

    def event_of(self, group: str) -> asyncio.Event:
        return self.closed.setdefault(group, asyncio.Event())

    async def run(self) -> None:
        async with pulling(self.bus, *subjects.ROLLOUT_EPISODES) as puller, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch())
            while True:
                delivery = await puller.take(1.0)
                if delivery is not None:
                    event = await delivery.event()
                    assert isinstance(event, EpisodeDispatch)
                    tasks.create_task(self.play(event))
                    await delivery.ack()

    async def watch(self) -> None:
        async for stored in follow(self.bus, subjects.TASKS, subjects.task(RUN, "*", "scored")):
            event = stored.event()
            assert isinstance(event, GroupScored)
            self.event_of(event.group).set()

    async def play(self, dispatch: EpisodeDispatch) -> None:
        sequence, member = int(dispatch.group[-6:]), int(dispatch.execution[-2:])
        ids: dict[str, Any] = {
            "run": RUN, "group": dispatch.group, "execution": dispatch.execution, "attempt": 0,
        }  # fmt: skip
        await self.append(Started(**ids, index=0, dispatch=dispatch, replica="x"))
        await self.append(
            Call(
                **ids, index=1, call="c", turn=0, request_digest="d", parent=None, prefix_tokens=0, prompt_ids=(1, 2),
                sampled_ids=(3, member), logprobs=(-0.5, -0.5), temperature=1.0, finish_reason="stop", text="x",
                versions=(VersionSpan(version=dispatch.version, start=0, end=2),), hosts=("h",),
            )
        )  # fmt: skip
        await asyncio.sleep(self.rng.random() * 0.3)
        if sequence % 3 == 0 and member >= 2:
            await self.event_of(dispatch.group).wait()
        failed = (sequence * G + member) % 11 == 10
        part = Part(name="a", weight=1, value=self.rng.random())
        await self.append(Verified(**ids, index=2, parts=(part,), infra_error="it is gone" if failed else None))
        await self.append(
            Ended(
                **ids, index=3, reason="done", turns=1, sampled_tokens=2, duration_s=1, members=dispatch.members
            )
        )  # fmt: skip

    async def append(self, event: TrajEvent) -> None:
        name = tag_of(event).split(".")[1]
        await self.bus.publish(subjects.traj(event.run, event.group, event.execution, name), event)


async def begin(bus: Bus, tmp_path: Path) -> None:
    save_pretrained(TinyModel(CONFIG, seed=1), tmp_path / "model")
    dispatch = Dispatch(phi=1, mu=2, batch_groups=B, group_size=G, close_at=3, min_members=2, deadline_s=0.6, d_max=4)
    spec = RunSpec(run=RUN, model=str(tmp_path / "model"), updates=UPDATES, dispatch=dispatch)
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)
    task = TaskSpec(
        task="t", instruction="x", repeat=2 * UPDATES * B, checks=(Check(name="a", command="true", weight=1),)
    )
    await bus.publish(subjects.task(RUN, "t", "submitted"), TaskSubmitted(run=RUN, task="t", spec=task))


async def test_each_execution_is_trained_once_though_trainer_and_trajectory_are_killed(
    bus: Bus, blobs: Blobs, nats_server, tmp_path: Path
) -> None:
    for stream, config in consumers():
        if stream in (subjects.TRAJ, subjects.GROUPS, subjects.TASKS):
            # What a killed process held comes back after this.
            await bus.js.add_consumer(stream, config.evolve(ack_wait=1))
    await begin(bus, tmp_path)
    services = Services(nats_server.url, tmp_path)
    rollout, given = Rollout(bus), Given()
    cell = Cell(bus, blobs, "h0", gradient=given.take)
    kills = 0
    try:
        for name in ("allocator", "trajectory", "trainer"):
            services.start(name)
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(rollout.run())
            training = tasks.create_task(cell.train(random.Random(1)))
            async with asyncio.timeout(300):
                async for stored in follow(bus, subjects.UPDATES, subjects.update(RUN, "*")):
                    event = stored.event()
                    if isinstance(event, RunFinished):
                        break
                    if isinstance(event, Committed) and event.version in (1, 3, 4, 6):
                        victim = ("trainer", "trajectory")[kills % 2]
                        services.kill(victim)
                        services.start(victim)
                        kills += 1

            async def settled() -> bool:
                report = await staleness(bus)
                return report.executions.trained + report.executions.dropped.get("infra", 0) >= UPDATES * B * G

            await eventually(settled)
            report = await staleness(bus)
            cell.stop.set()
            await training
            playing.cancel()
    finally:
        services.stop()
    assert kills == 4
    await check(bus, report, given)


async def staleness(bus: Bus) -> StalenessReport:
    request = StalenessRequest(run=RUN)
    return await call(bus, "allocator", "any", "staleness", request, StalenessReport, timeout_s=1, patience_s=60)


@dataclass
class Given:
    """The members that cells were given, by execution."""

    members: dict[str, Member] = field(default_factory=dict)

    def take(self, item) -> float:
        for member in item.group.members:
            assert self.members.setdefault(member.execution, member) == member, "always the same"
        return 0.01


async def check(bus: Bus, report: StalenessReport, given: Given) -> None:
    done: list[Committed] = await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))
    assert [event.version for event in done] == list(range(1, UPDATES + 1))
    assert {len(event.executions) + len(event.unscored) for event in done} == {B * G}
    places = Counter(name for event in done for name in (*event.executions, *event.unscored))
    assert set(places.values()) == {1}, "each execution is in one update"
    told: list[GroupConsumed] = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    consumed = Counter(name for event in told for name in event.executions if event.outcome == "trained")
    assert consumed == places
    assert report.groups.balances
    assert report.executions.balances
    assert report.by_execution_maximum is not None
    assert report.by_execution_maximum <= 4
    assert sum(report.by_execution.values()) == sum(len(event.executions) for event in done)
    log = [stored.event() for stored in await read(bus, subjects.TRAJ, f"{subjects.PREFIX}.traj.{RUN}.>")]
    marks = [event for event in log if isinstance(event, Overdue)]
    assert marks, "some groups closed by their deadline"
    assert len({mark.group for mark in marks}) == len(marks), "each mark is there once"
    replayed = {member.execution: member for group in replay_groups(log) for member in group.members}
    late = [group for group in replay_groups(log) if group.late]
    assert late
    for execution, member in given.members.items():
        # Law 9: the log alone makes the very advantages that were trained.
        assert replayed[execution] == member
