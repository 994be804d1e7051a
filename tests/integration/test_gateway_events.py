"""Server-sent events over a real socket: order, resume, filters, the end of the service; the service as a process."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from opengyre.gateway import examples
from opengyre.proto import subjects
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import TaskSpec, TaskSubmitted
from opengyre.proto.update import RunFinished
from opengyre.shared import embedded
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.gateway_fakes import Running, gateway_on


@pytest.fixture
async def gateway(bus: Bus, tmp_path: Path) -> AsyncIterator[Running]:
    async with gateway_on(bus, tmp_path) as running:
        await running.given(201, "POST", "/v1/runs", examples.RUN_IN)
        await eventually(lambda: "demo" in running.gateway.deps.run_view.values)
        yield running


async def submit(bus: Bus, run: str, number: int) -> None:
    spec = TaskSpec(task=f"t{number}", instruction="x")
    await bus.publish(subjects.task(run, spec.task, "submitted"), TaskSubmitted(run=run, task=spec.task, spec=spec))


class Frame(msgspec.Struct):
    id: str
    kind: str
    data: dict[str, Any]


async def frames(lines: AsyncIterator[str]) -> AsyncIterator[Frame]:
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Frame(fields["id"], fields["event"], msgspec.json.decode(fields["data"]))
            fields = {}


@contextlib.asynccontextmanager
async def following(gateway: Running, query: str = "", last: str | None = None) -> AsyncIterator[AsyncIterator[Frame]]:
    headers = {"Last-Event-ID": last} if last is not None else {}
    async with gateway.client.stream("GET", f"/v1/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield frames(answer.aiter_lines())


async def take(source: AsyncIterator[Frame], many: int) -> list[Frame]:
    async with asyncio.timeout(60):
        return [await anext(source) for _ in range(many)]


async def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice(gateway: Running, bus: Bus) -> None:
    for number in range(4):
        await submit(bus, "demo", number)
    await bus.publish(subjects.update("demo", "finished"), RunFinished(run="demo", update=1, version=1))
    async with following(gateway, "?run=demo&since=start") as source:
        first = await take(source, 3)
    await submit(bus, "demo", 4)
    async with following(gateway, "?run=demo&since=start", last=first[-1].id) as source:
        second = await take(source, 3)
    got = [(frame.data["stream"], frame.data["sequence"]) for frame in [*first, *second]]
    assert sorted(got) == [("TASKS", 1), ("TASKS", 2), ("TASKS", 3), ("TASKS", 4), ("TASKS", 5), ("UPDATES", 1)]
    kinds = {frame.kind for frame in [*first, *second]}
    assert kinds == {"task.submitted.v1", "update.finished.v1"}
    assert first[0].data["event"]["type"] == first[0].kind


async def test_a_single_stream_resumes_from_stream_and_sequence(gateway: Running, bus: Bus) -> None:
    for number in range(5):
        await submit(bus, "demo", number)
    async with following(gateway, "?streams=tasks", last="TASKS:3") as source:
        assert [frame.data["event"]["task"] for frame in await take(source, 2)] == ["t3", "t4"]


async def test_new_events_only_and_only_of_the_run(gateway: Running, bus: Bus) -> None:
    await submit(bus, "demo", 0)
    async with following(gateway, "?run=demo") as source:
        await submit(bus, "other", 1)
        await submit(bus, "demo", 2)
        assert [frame.data["event"]["task"] for frame in await take(source, 1)] == ["t2"]


async def test_events_go_on_after_a_restart_of_the_broker(gateway: Running, bus: Bus, nats_server: Any) -> None:
    async with following(gateway, "?run=demo") as source:
        await submit(bus, "demo", 0)
        assert len(await take(source, 1)) == 1
        nats_server.kill()
        nats_server.start()
        await submit(bus, "demo", 1)
        assert [frame.data["event"]["task"] for frame in await take(source, 1)] == ["t1"]


async def test_a_message_that_is_no_event_is_sent_with_its_error(gateway: Running, bus: Bus) -> None:
    async with following(gateway, "?streams=TASKS") as source:
        await bus.publish_raw("gyre.v1.task.demo.x.submitted", b"no json", "id", "task.submitted.v1")
        (frame,) = await take(source, 1)
    assert (frame.kind, frame.data["sequence"]) == ("undecodable", 1)


async def test_what_cannot_be_followed_is_refused(gateway: Running) -> None:
    assert "allowed are TASKS" in await gateway.refused(422, "GET", "/v1/events?streams=EPISODES")
    assert "ids like TASKS:12" in await gateway.refused(422, "GET", "/v1/events", Last_Event_ID="x")
    assert "there is no run nope" in await gateway.refused(404, "GET", "/v1/events?run=nope")


async def test_a_reader_that_goes_leaves_no_consumer_behind(gateway: Running, bus: Bus) -> None:
    async def consumers() -> int:
        return (await bus.stream_info(subjects.TASKS)).state.consumer_count or 0

    before = await consumers()
    async with following(gateway, "?streams=TASKS") as source:
        await submit(bus, "demo", 0)
        await take(source, 1)
        assert await consumers() == before + 1
    await eventually(lambda: gateway.gateway.deps.event_readers == 0)

    async def gone() -> bool:
        return await consumers() == before

    await eventually(gone)


async def test_the_end_of_the_service_ends_its_readers_at_once(gateway: Running, bus: Bus) -> None:
    async with following(gateway) as source:
        await submit(bus, "demo", 0)
        await take(source, 1)
        gateway.context.stopping.set()
        async with asyncio.timeout(30):
            assert [frame async for frame in source] == []


async def test_a_killed_gateway_is_replaced_and_nothing_is_lost(bus: Bus, tmp_path: Path, python: str) -> None:
    port = embedded.free_port()
    environment = {
        **os.environ, "GYRE_BUS__URL": bus.url, "GYRE_STATE_DIR": str(tmp_path), "GYRE_HTTP__PORT": str(port),
        "GYRE_GATEWAY__API_KEYS": "secret",
    }  # fmt: skip
    services = Bucket(bus, subjects.KV_SERVICES, ServiceStatus)

    @contextlib.asynccontextmanager
    async def process(end: int) -> AsyncIterator[httpx.AsyncClient]:
        log = (tmp_path / "log").open("ab")
        running = await asyncio.create_subprocess_exec(
            python, "-m", "opengyre.gateway", env=environment, stdout=log, stderr=log
        )
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": "secret"}, timeout=60
            ) as client:

                async def ready() -> bool:
                    with contextlib.suppress(httpx.HTTPError):
                        return (await client.get("/readyz")).status_code == 200
                    return False

                await eventually(ready, 90)
                yield client
                running.send_signal(end)
                async with asyncio.timeout(60):
                    assert await running.wait() == (0 if end == signal.SIGTERM else -end)
        finally:
            log.close()
            if running.returncode is None:
                running.kill()
                await running.wait()

    async with process(signal.SIGKILL) as client:
        assert (await client.post("/v1/runs", json=examples.RUN_IN)).status_code == 201
        first = await client.post("/v1/tasks?run=demo", json=examples.TASK_IN, headers={"Idempotency-Key": "k"})
        assert first.status_code == 202
    async with process(signal.SIGTERM) as client:
        again = await client.post("/v1/tasks?run=demo", json=examples.TASK_IN, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.content) == (202, first.content)
        assert (await client.get("/v1/status")).json()["run"]["spec"]["run"] == "demo"
        assert "gyre_event_loop_lag_seconds" in (await client.get("/metrics")).text
        names = await bus.subjects(f"KV_{subjects.KV_SERVICES}", services.subject("gateway.>"))
        assert names
