"""The brokers of deploy/kubernetes for real, three of them: what each service may do there, and that it is enough."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from opengyre.cli import up
from opengyre.cli.demo_client import Api
from opengyre.cli.demo_driver import Driver
from opengyre.cli.demo_plan import DemoOptions
from opengyre.cli.demo_view import Shown
from opengyre.cli.supervisor_plan import Addresses, Fleet, Program, services
from opengyre.gateway.status import StatusReport
from opengyre.proto import subjects
from opengyre.proto.task import Check, TaskSpec, TaskSubmitted
from opengyre.proto.traj import Ended
from opengyre.shared.bus import Bus, bootstrap, discover, follow, read
from opengyre.shared.bus.rights import RIGHTS, users
from opengyre.shared.settings import load
from support import eventually
from support.nats_cluster import BASE, Brokers, brokers
from support.stack import make_policy, small_run

UPDATES = 4


@contextlib.asynccontextmanager
async def ready(folder: Path) -> AsyncIterator[Brokers]:
    """Three brokers on which the bootstrap has run, with three copies of everything."""
    with brokers(folder) as three:
        async with asyncio.timeout(200), Bus(three.url("bootstrap"), "bootstrap") as bus:
            made = await bootstrap(bus, 3)
            assert subjects.TRAJ in made
            info = await bus.stream_info(subjects.TRAJ)
            assert info.config.num_replicas == 3
            assert info.cluster is not None
            assert len(info.cluster.replicas or ()) == 2
        yield three


def submitted(name: str) -> TaskSubmitted:
    spec = TaskSpec(task=name, instruction="x", checks=(Check(name="a", command="true", weight=1.0),))
    return TaskSubmitted(run="r", task=name, spec=spec)


async def test_three_brokers_keep_what_one_of_them_loses_and_refuse_what_is_not_a_services_own(tmp_path: Path) -> None:
    async with ready(tmp_path) as three:
        async with Bus(three.url("gateway"), "gateway") as gateway:
            await gateway.publish(subjects.task("r", "one", "submitted"), submitted("one"))
            three.kill(0)
            await gateway.publish(subjects.task("r", "two", "submitted"), submitted("two"), attempts=30)
            stored = await read(gateway, subjects.TASKS, subjects.task("r", "*", "submitted"))
            assert [one.event() for one in stored] == [submitted("one"), submitted("two")]
        assert three.violations() == set()

        # A host is not the one who submits tasks, makes streams or listens to what others are asked.
        url = three.url("host").split(",")[1]
        tried = (
            subjects.task("r", "three", "submitted"),
            "$JS.API.STREAM.DELETE.TRAJ",
            "$KV.gyre_ledger.g",
            subjects.rpc("sandbox", "node0", "execute"),
        )
        told: list[Exception] = []

        async def hear(error: Exception) -> None:
            told.append(error)

        client = await nats.connect(url, error_cb=hear, allow_reconnect=False)
        try:
            for subject in tried:
                await client.publish(subject, b"{}")
            await client.subscribe(subjects.rpc("sandbox", "*", "*"))
            # The client's flush may overtake what it has not yet sent, and what goes out as it closes may be lost.
            await eventually(lambda: len(told) > len(tried))
        finally:
            await client.close()

        def refused() -> bool:
            said = "\n".join(three.violations())
            return all(f'"{subject}"' in said for subject in (*tried, subjects.rpc("sandbox", "*", "*")))

        await eventually(refused)

        assert b"Authorization Violation" in await greeted(three.ports["client"][1])


async def greeted(port: int) -> bytes:
    """What a broker says to somebody without a password."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def test_the_rights_are_those_of_the_code() -> None:
    assert (BASE / "users.conf").read_text(encoding="utf-8") == users(), "python -m opengyre.shared.bus.rights"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(600)
async def test_every_service_does_its_work_with_its_own_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, each service as a user of its own: nobody is refused anything, and a broker that dies ends nothing."""
    policy = await asyncio.to_thread(make_policy, tmp_path)
    async with ready(tmp_path / "nats") as three:

        def own(addresses: Addresses, fleet: Fleet) -> list[Program]:
            found = []
            for program in services(addresses, fleet):
                user = program.command[-1].rpartition(".")[2]
                assert user in RIGHTS
                environment = {**program.environment, "GYRE_BUS__URL": three.url(user)}
                found.append(dataclasses.replace(program, environment=environment))
            return found

        monkeypatch.setattr(up, "services", own)
        given = {"GYRE_BUS__URL": three.url("operator"), "GYRE_BUS__REPLICAS": "3"}
        options = up.Options(tmp_path / "state")
        notes: list[str] = []
        async with (
            up.running(options, load(environment=given), notes.append) as run,
            Bus(three.url("operator"), "test") as bus,
        ):
            assert await run.wait_ready() == {}, notes
            async with Api(run.stack.gateway, run.stack.api_key) as api:
                plan = DemoOptions(updates=UPDATES, evaluation_tasks=2)
                driver = Driver(bus, api, plan, small_run(policy, UPDATES), Shown(updates=UPDATES))
                await driver.create()
                async with driver.watching(), asyncio.timeout(350), asyncio.TaskGroup() as tasks:
                    training = tasks.create_task(driver.train())
                    async with contextlib.aclosing(
                        follow(bus, subjects.UPDATES, subjects.update("demo", "committed"))
                    ) as commits:
                        await anext(commits)
                    leader = (await bus.stream_info(subjects.TRAJ)).cluster
                    assert leader is not None
                    assert leader.leader is not None
                    three.kill(int(leader.leader.removeprefix("nats-")))
                    await training
                published = await read(bus, subjects.WEIGHTS, subjects.weights("demo", "published"))
                assert len(published) >= 2
                ends = [one.event() for one in await read(bus, subjects.TRAJ, subjects.traj("demo", "*", "*", "ended"))]
                assert {end.reason for end in ends if isinstance(end, Ended)} <= {"done", "turn_budget"}

                async def whole() -> bool:
                    return (await api.get("/v1/status", StatusReport)).missing == ()

                async def led() -> bool:
                    return "gyre-allocator-any" in await discover(bus, "gyre-")

                # Who lost its broker is there again a little later.
                await eventually(whole)
                await eventually(led)
        assert three.violations() == set()
        logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "state" / "logs").glob("*.log"))
        assert "ermissions" not in logs
        for user in ("gateway", "host"):
            assert three.passwords[user] not in logs
