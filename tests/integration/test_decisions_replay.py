"""What a real allocator decided, over a real broker and through a kill, comes out the same when it is decided again."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opengyre.allocator.service import LEASE
from opengyre.proto import subjects
from opengyre.proto.decision import Decision
from opengyre.proto.host import HostState, HostStatus, Sampler
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSpec, TaskSubmitted
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bucket, Bus, LeaseOwner, read
from support import eventually
from support.gateway_cli import gyre_on

SPEC = RunSpec(
    run="r",
    model="/nowhere",
    dispatch=Dispatch(phi=0.5, mu=2, batch_groups=2, group_size=2),
    elastic=Elastic(dwell_s=0.0, gate=0.0),
)


@pytest.fixture
def allocator(nats_server, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts an allocator; all are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "GYRE_BUS__URL": nats_server.url,
            "GYRE_STATE_DIR": str(tmp_path / "allocator"),
            "GYRE_ALLOCATOR__LEASE_S": "60",
            "GYRE_ALLOCATOR__TICK_S": "0.05",
        }
        with (tmp_path / "allocator.log").open("ab") as out:
            process = subprocess.Popen([sys.executable, "-m", "opengyre.allocator"], env=env, stdout=out, stderr=out)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(60)


async def decided(bus: Bus) -> list[Decision]:
    found = await read(bus, subjects.DECISIONS, subjects.decision("r"))
    return [event for stored in found if isinstance(event := stored.event(), Decision)]


async def publish(bus: Bus, version: int) -> None:
    manifest = Manifest(run="r", version=version, parent=None, step=version, directory="d", files=())
    await bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))


async def train(bus: Bus, group: str, version: int) -> None:
    scored = GroupScored(
        run="r", task="t", group=group, outcome="ready", scores={}, sampled_version_min=0, sampled_version_max=0,
        tokens=1,
    )  # fmt: skip
    consumed = GroupConsumed(run="r", task="t", group=group, outcome="trained", version=version)
    await bus.publish(subjects.task("r", "t", "scored"), scored)
    await bus.publish(subjects.task("r", "t", "consumed"), consumed)


async def test_every_decision_of_a_real_allocator_comes_out_the_same(
    bus: Bus, tmp_path: Path, allocator: Callable[[], subprocess.Popen[bytes]]
) -> None:
    hosts = Bucket(bus, subjects.KV_HOSTS, HostStatus)
    for name in ("a", "b", "c"):
        status = HostStatus(
            host=name, cell=name, boot="x", state=HostState.ROLLOUT, epoch=0, url="http://x", engine="tiny",
            since_s=9.0, sampler=Sampler(),
        )  # fmt: skip
        await hosts.put(name, status, ttl_s=900)
    await Bucket(bus, subjects.KV_RUNS, RunSpec).create("r", SPEC)
    for number in range(20):
        task = TaskSpec(task=f"t{number}", instruction="x", purpose="evaluate" if number == 3 else "train")
        await bus.publish(subjects.task("r", task.task, "submitted"), TaskSubmitted(run="r", task=task.task, spec=task))
    first = allocator()
    await publish(bus, 0)

    async def seen(kind: str, count: int) -> bool:
        return sum(decision.kind == kind for decision in await decided(bus)) >= count

    async with gyre_on(bus, tmp_path) as gyre:
        await eventually(lambda: seen("admission", 1))
        (admission,) = [decision for decision in await decided(bus) if decision.kind == "admission"]
        assert admission.admission is not None
        assert admission.admission.evaluating == 1
        assert len(admission.admitted) == 6, "(phi + mu) * B that train, and one that evaluates"
        await gyre.shown("drain", "b")
        await eventually(lambda: seen("wish", 1))
        await gyre.shown("resume", "b")
        await eventually(lambda: seen("wish", 2))
        await gyre.shown("run", "set", "r", "dispatch.phi=1", "elastic.policy=static")
        await eventually(lambda: seen("roles", 1))  # the split of the new policy
        await eventually(lambda: seen("admission", 2))  # and the greater depth

        first.kill()
        first.wait(60)
        await Bucket(bus, subjects.KV_LEASES, LeaseOwner).delete(LEASE)
        training = [group for group in admission.admitted if group != admission.admitted[0]][:4]
        for number, group in enumerate(training):
            await train(bus, group, number // 2)
        await publish(bus, 2)
        allocator()  # all of this is in the logs that it reads, whatever comes to it first
        await eventually(lambda: seen("admission", 3))

        report = await gyre.json("decisions", "replay", "r")
        assert report["differences"] == []
        assert report["without_inputs"] == 0
        assert report["kinds"]["wish"] == 2
        assert report["kinds"]["admission"] == 3
        assert len({decision.decision.partition("-")[0] for decision in await decided(bus)}) == 2, "of two leaders"
        held = (await gyre.json("waits"))["held"]
        assert len(held) == 1
        assert "the depth (phi + mu) * batch_groups of 6 groups is full" in held[0]
