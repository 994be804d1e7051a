"""The allocator as a process, over a real broker: boundaries, takeover, fencing, wishes."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opengyre.allocator.service import LEASE
from opengyre.proto import subjects
from opengyre.proto.decision import (
    CellsReport,
    Decision,
    GroupEntry,
    StalenessReport,
    StalenessRequest,
    WishReply,
    WishRequest,
)
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import DesiredRole, HostCommand, HostState, HostStatus, Sampler
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.service import Empty
from opengyre.proto.task import GroupConsumed, GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bucket, Bus, LeaseOwner, RpcFailedError, bootstrap, call, message_at, read
from support import eventually

RUN = RunSpec(
    run="r",
    model="/nowhere",
    dispatch=Dispatch(phi=0.5, mu=2, batch_groups=2, group_size=2),
    elastic=Elastic(dwell_s=0.0),
)
DEPTH = 5


class Replicas:
    """Allocator processes of a test; all are ended with it."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "GYRE_BUS__URL": self._url,
            "GYRE_STATE_DIR": str(self._folder / "state"),
            "GYRE_ALLOCATOR__LEASE_S": "60",
            "GYRE_ALLOCATOR__TICK_S": "0.05",
            **environment,
        }
        with (self._folder / "allocator.log").open("ab") as out:
            process = subprocess.Popen([sys.executable, "-m", "opengyre.allocator"], env=env, stdout=out, stderr=out)
        self._processes.append(process)
        return process

    def log(self) -> str:
        return (self._folder / "allocator.log").read_text(errors="replace")

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(60)


@pytest.fixture
def replicas(nats_server, tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(nats_server.url, tmp_path)
    yield made
    made.end()


class Stage:
    """What the other services would do on the bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.ledger = Bucket(bus, subjects.KV_LEDGER, GroupEntry)
        self.desired = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self.hosts = Bucket(bus, subjects.KV_HOSTS, HostStatus)
        self.leases = Bucket(bus, subjects.KV_LEASES, LeaseOwner)
        self.beats = itertools.count()

    async def kill(self, leader: subprocess.Popen[bytes]) -> None:
        """kill -9, and its lease is over at once."""
        leader.kill()
        leader.wait(60)
        await self.leases.delete(LEASE)

    async def begin(self, run: RunSpec = RUN, tasks: int = 40, **fields: Any) -> None:
        await Bucket(self.bus, subjects.KV_RUNS, RunSpec).create(run.run, run)
        await self.submit(*(f"t{number}" for number in range(tasks)), run=run.run, **fields)

    async def submit(self, *names: str, run: str = "r", **fields: Any) -> None:
        for name in names:
            spec = TaskSpec(task=name, instruction="x", **fields)
            await self.bus.publish(subjects.task(run, name, "submitted"), TaskSubmitted(run=run, task=name, spec=spec))

    async def publish(self, version: int) -> None:
        manifest = Manifest(run="r", version=version, parent=None, step=version, directory="d", files=())
        await self.bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))

    async def score(self, group: str, outcome: Any = "ready") -> None:
        event = GroupScored(
            run="r", task="t", group=group, outcome=outcome, reason="infra" if outcome == "dropped" else None,
            scores={}, sampled_version_min=0, sampled_version_max=0, tokens=1,
        )  # fmt: skip
        await self.bus.publish(subjects.task("r", "t", "scored"), event)

    async def consume(self, group: str, version: int) -> None:
        event = GroupConsumed(run="r", task="t", group=group, outcome="trained", version=version)
        await self.bus.publish(subjects.task("r", "t", "consumed"), event)

    async def report(self, run: str = "r") -> StalenessReport:
        return await call(
            self.bus, "allocator", "any", "staleness", StalenessRequest(run=run), StalenessReport,
            timeout_s=2, patience_s=60,
        )  # fmt: skip

    async def admissions(self) -> list[int]:
        """How many groups each admission made."""
        found = await read(self.bus, subjects.DECISIONS, subjects.decision("r"))
        events = [stored.event() for stored in found]
        return [len(e.admitted) for e in events if isinstance(e, Decision) and e.kind == "admission"]

    async def admitted(self, count: int) -> bool:
        """Whether so many groups were made, and all that was to be published for them was."""
        return sum(await self.admissions()) == count

    async def dispatched(self) -> list[EpisodeDispatch]:
        """A work queue that nobody works on, message by message."""
        last = (await self.bus.stream_info(subjects.EPISODES)).state.last_seq
        found = await asyncio.gather(*(message_at(self.bus, subjects.EPISODES, n + 1) for n in range(last)))
        events = [stored.event() for stored in found if stored is not None]
        return [event for event in events if isinstance(event, EpisodeDispatch)]

    async def host(self, name: str, state: HostState = HostState.ROLLOUT, epoch: int = 0, cell: str = "") -> None:
        status = HostStatus(
            host=name, cell=cell or f"cell_{name}", boot="b", state=state, epoch=epoch, url="http://x", engine="tiny",
            sampler=Sampler(), since_s=100.0 + next(self.beats),
        )  # fmt: skip
        await self.hosts.put(name, status)

    async def wish(self, cell: str, wish: Any) -> WishReply:
        request = WishRequest(cell=cell, wish=wish)
        return await call(self.bus, "allocator", "any", "wish", request, WishReply, timeout_s=2, patience_s=60)

    async def cells(self) -> CellsReport:
        return await call(self.bus, "allocator", "any", "cells", Empty(), CellsReport, patience_s=60)

    async def role(self, host: str) -> str | None:
        found = await self.desired.get(host)
        return found[0].role if found else None


@pytest.fixture
def stage(bus: Bus) -> Stage:
    return Stage(bus)


def groups_of(events: list[EpisodeDispatch]) -> list[str]:
    return sorted({event.group for event in events})


async def test_groups_are_admitted_at_boundaries_only(stage: Stage, replicas: Replicas) -> None:
    await stage.begin()
    replicas.start()
    assert (await stage.report()).groups.dispatched == 0, "no version is published yet"
    await stage.publish(0)
    await eventually(lambda: stage.admitted(DEPTH))
    events = await stage.dispatched()
    assert len(events) == DEPTH * 2
    assert [event.task.task for event in events if event.execution.endswith("e00")] == [f"t{n}" for n in range(DEPTH)]
    assert len({event.seed for event in events}) == len(events)

    groups = groups_of(events)
    for group in groups[:4]:
        await stage.score(group)
    for version, pair in enumerate((groups[:2], groups[2:4])):
        for group in pair:
            await stage.consume(group, version)

    async def trained(count: int) -> bool:
        return (await stage.report()).groups.trained == count

    await eventually(lambda: trained(4))
    assert (await stage.report()).groups.dispatched == DEPTH, "within a burst nothing is admitted"
    await stage.publish(2)
    await eventually(lambda: stage.admitted(DEPTH + 4))
    report = await stage.report()
    assert (report.groups.balances, report.executions.balances) == (True, True)
    assert (report.published_version, report.trainer_version, report.predicted) == (2, 2, 1.0)
    assert report.distribution == {0: 2, 1: 2}
    assert {event.version for event in (await stage.dispatched())[-8:]} == {2}
    assert await stage.admissions() == [DEPTH, 4]
    admissions = await read(stage.bus, subjects.TASKS, subjects.task("r", "*", "admitted"))
    told = [event.group for stored in admissions if isinstance(event := stored.event(), TaskAdmitted)]
    assert sorted(told) == groups_of(await stage.dispatched())


async def test_a_version_is_evaluated_once_it_is_published(stage: Stage, replicas: Replicas) -> None:
    await stage.begin(tasks=0)
    await stage.submit("after", purpose="evaluate", from_version=2)
    await stage.submit("before", purpose="evaluate")
    await stage.submit("trains")
    first = replicas.start()
    await stage.report()
    await stage.publish(0)
    await eventually(lambda: stage.admitted(2))
    assert {event.task.task for event in await stage.dispatched()} == {"before", "trains"}
    await stage.kill(first)
    replicas.start()  # what waits is read from the log
    await stage.publish(2)
    await eventually(lambda: stage.admitted(3))
    last = (await stage.dispatched())[-1]
    assert (last.task.task, last.version) == ("after", 2)


async def test_a_replica_takes_over_from_one_killed_while_it_admits(stage: Stage, replicas: Replicas) -> None:
    run = RunSpec(run="r", model="/x", dispatch=Dispatch(phi=0, mu=10, batch_groups=10, group_size=8))
    await stage.begin(run, tasks=100)
    first = replicas.start()
    await stage.report()
    await stage.bus.js.delete_stream(subjects.EPISODES)  # so that it is at it for as long as it lives
    await stage.publish(0)

    async def begun() -> bool:
        return (await stage.bus.stream_info(f"KV_{subjects.KV_LEDGER}")).state.messages > 20

    await eventually(begun)
    await stage.kill(first)
    async with stage.ledger.view() as view:
        assert view.values
        assert not any(entry.dispatched for entry in view.values.values())
    assert subjects.EPISODES in await bootstrap(stage.bus)
    replicas.start()

    async def whole() -> bool:
        async with stage.ledger.view() as view:
            return sum(entry.dispatched for entry in view.values.values()) == 100

    await eventually(whole)
    async with stage.ledger.view() as view:
        entries = sorted(view.values.values(), key=lambda entry: entry.sequence)
    assert [entry.sequence for entry in entries] == list(range(100))
    assert [entry.task for entry in entries] == [f"t{number}" for number in range(100)], "none lost, none twice"
    executions = [event.execution for event in await stage.dispatched()]
    assert len(executions) == len(set(executions)) == 800


async def test_a_frozen_leader_that_wakes_up_changes_nothing(stage: Stage, replicas: Replicas) -> None:
    await stage.begin()
    await stage.host("h0")
    # It looks at its lease again soon after it wakes up.
    first = replicas.start(GYRE_ALLOCATOR__LEASE_S="6")
    await stage.report()
    first.send_signal(signal.SIGSTOP)
    replicas.start()
    await stage.publish(0)
    await eventually(lambda: stage.admitted(DEPTH))
    await stage.wish("cell_h0", "cordon")
    first.send_signal(signal.SIGCONT)

    async def deposed() -> bool:
        return "the term is over" in replicas.log()

    await eventually(deposed)
    assert (await stage.report()).groups.dispatched == DEPTH
    async with stage.ledger.view() as view:
        assert len(view.values) == DEPTH
    found = await stage.desired.get("h0")
    assert found is not None
    assert (found[0].role, found[0].wish, found[0].epoch) == ("cordoned", "cordoned", 1)


async def test_wishes_are_levels_with_growing_epochs_and_survive_a_restart(stage: Stage, replicas: Replicas) -> None:
    await stage.host("h0")
    await stage.host("h1")
    first = replicas.start()

    async def both() -> bool:
        return [cell.cell for cell in (await stage.cells()).cells] == ["cell_h0", "cell_h1"]

    await eventually(both)
    assert (await stage.wish("cell_h0", "drain")).state == "rollout"
    assert (await stage.wish("cell_h0", "drain")).wish == "drain", "a repeat changes nothing"
    found = await stage.desired.get("h0")
    assert found is not None
    assert (found[0].role, found[0].wish, found[0].epoch) == ("train", "train", 1)
    await stage.kill(first)
    replicas.start()

    async def wished() -> bool:
        cells = {cell.cell: cell for cell in (await stage.cells()).cells}
        return cells["cell_h0"].wish == "train"

    await eventually(wished)
    await stage.wish("cell_h0", "resume")
    found = await stage.desired.get("h0")
    assert found is not None
    assert (found[0].role, found[0].wish, found[0].epoch) == ("rollout", None, 2)
    commands = [s.event() for s in await read(stage.bus, subjects.HOSTS, subjects.host("h0", "command"))]
    assert [c.desired.epoch for c in commands if isinstance(c, HostCommand)] == [1, 2]
    with pytest.raises(RpcFailedError, match="there is no cell 'nope'; allowed: cell_h0, cell_h1") as refused:
        await stage.wish("nope", "drain")
    assert refused.value.kind == "not_found"
    with pytest.raises(RpcFailedError, match="there is no run 'nope'") as refused:
        await stage.report("nope")
    assert refused.value.kind == "not_found"


async def test_cells_follow_work_and_a_lost_host_is_not_counted(stage: Stage, replicas: Replicas) -> None:
    await stage.begin()
    await stage.host("h0")
    await stage.host("h1")
    replicas.start()
    await stage.publish(0)
    await eventually(lambda: stage.admitted(DEPTH))
    assert await stage.role("h0") is None, "nothing waits: every cell stays where it is"
    for group in groups_of(await stage.dispatched())[:2]:
        await stage.score(group)

    async def sent(host: str, role: str) -> bool:
        return await stage.role(host) == role

    await eventually(lambda: sent("h0", "train"))
    await stage.host("h0", HostState.TRAIN, epoch=1)
    assert await stage.role("h1") is None, "the last cell that serves stays"
    await stage.hosts.delete("h1")

    async def called_back() -> bool:
        await stage.host("h0", HostState.TRAIN, epoch=1)  # heartbeats: it has nothing to train
        return await sent("h0", "rollout")

    await eventually(called_back, every_s=0.2)
    states = {cell.cell: cell.state for cell in (await stage.cells()).cells}
    assert states == {"cell_h0": "train", "cell_h1": "lost"}
    roles = [s.event() for s in await read(stage.bus, subjects.DECISIONS, subjects.decision("r"))]
    inputs = [d.input for d in roles if isinstance(d, Decision) and d.kind == "roles"]
    assert all(given is not None and given.cells for given in inputs)


async def test_negative_staleness_stops_the_service_with_a_sentence(stage: Stage, replicas: Replicas) -> None:
    await stage.begin()
    process = replicas.start()
    await stage.publish(3)
    await eventually(lambda: stage.admitted(DEPTH))
    await stage.consume("r-g000000", 2)

    async def gone() -> bool:
        return process.poll() is not None

    await eventually(gone)
    assert process.returncode != 0
    assert "staleness of group r-g000000 is negative: admitted at version 3, consumed at version 2" in replicas.log()


async def test_the_leader_lives_through_a_restart_of_the_broker(stage: Stage, replicas: Replicas, nats_server) -> None:
    await stage.begin()
    process = replicas.start()
    await stage.publish(0)
    await eventually(lambda: stage.admitted(DEPTH))
    await asyncio.to_thread(nats_server.kill)
    await asyncio.to_thread(nats_server.start)
    for number in range(4):
        await stage.score(f"r-g{number:06d}")
        await stage.consume(f"r-g{number:06d}", number // 2)
    await stage.publish(2)
    await eventually(lambda: stage.admitted(DEPTH + 4))
    assert process.poll() is None
    report = await stage.report()
    assert (report.groups.dispatched, report.groups.trained, report.groups.balances) == (DEPTH + 4, 4, True)
