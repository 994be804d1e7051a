"""The REST API over a real socket, on a real NATS server."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.gateway import examples, openapi
from opengyre.gateway import runs as runs_module
from opengyre.gateway import tasks as tasks_module
from opengyre.gateway.deps import LISTED
from opengyre.gateway.idempotency import once
from opengyre.proto import subjects
from opengyre.proto.decision import GroupEntry
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.service import ServiceStatus, Wait
from opengyre.proto.task import GroupConsumed, GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.update import Committed, UpdateStats
from opengyre.proto.weights import Manifest, ShardFile, WeightsApplied, WeightsPublished, WeightsRefused
from opengyre.shared.bus import Bucket, Bus, BusUnavailableError, reachable, read
from support import eventually
from support.gateway_fakes import FakeAllocator, Running, gateway_on, log_of, spoil

RUN = examples.RUN_IN
TASK = examples.TASK_IN
GROUP = "demo-g000000"
EXECUTION = f"{GROUP}-e00"


@pytest.fixture
async def gateway(bus: Bus, tmp_path: Path) -> AsyncIterator[Running]:
    async with gateway_on(bus, tmp_path) as running:
        yield running


async def seen(gateway: Running, run: str) -> None:
    await eventually(lambda: run in gateway.gateway.deps.run_view.values)


async def test_a_run_is_created_once_and_one_is_active_at_a_time(gateway: Running) -> None:
    report = await gateway.given(201, "POST", "/v1/runs", RUN)
    assert report["spec"]["state"] == "active"
    assert await gateway.given(201, "POST", "/v1/runs", RUN) == report, "the same again is the same answer"
    assert "another setting" in await gateway.refused(409, "POST", "/v1/runs", {**RUN, "seed": 2})
    other = {**RUN, "run": "other"}
    assert "run demo is active" in await gateway.refused(409, "POST", "/v1/runs", other)
    stopped = await gateway.given(200, "PATCH", "/v1/runs/demo", {"state": "stopped"})
    assert stopped["spec"]["state"] == "stopped"
    await gateway.given(201, "POST", "/v1/runs", other)
    assert (await gateway.given(200, "GET", "/v1/runs/demo"))["spec"]["state"] == "stopped"
    assert "there is no run nope; there are: demo, other" in await gateway.refused(404, "GET", "/v1/runs/nope")


async def test_a_run_is_there_at_once_for_who_made_it_though_the_mirror_is_late(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task right after its run was now and then answered by "there is no run yet", and a run that was just stopped
    was listed as active."""
    monkeypatch.setattr(gateway.gateway.deps.run_view, "_take", lambda entry: None)
    await gateway.given(201, "POST", "/v1/runs", RUN)
    assert (await gateway.given(202, "POST", "/v1/tasks", TASK))["run"] == "demo"
    await gateway.given(200, "PATCH", "/v1/runs/demo", {"state": "stopped"})
    listing = await gateway.given(200, "GET", "/v1/runs")
    assert [run["state"] for run in listing["runs"]] == ["stopped"]


async def test_of_many_runs_created_at_once_one_is_active(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "PATIENCE_S", 60.0)  # each waits for all before it
    wanted = [{**RUN, "run": f"r{number}"} for number in range(6)]
    answers = await asyncio.gather(*(gateway.ask("POST", "/v1/runs", body) for body in wanted))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409, 409]


async def test_runs_are_paged_and_filtered(gateway: Running, bus: Bus) -> None:
    bucket = Bucket(bus, subjects.KV_RUNS, RunSpec)
    for number in range(3):
        await bucket.put(f"r{number}", RunSpec(run=f"r{number}", model="m", state="stopped" if number else "finished"))
    await seen(gateway, "r2")
    first = await gateway.given(200, "GET", "/v1/runs?limit=2")
    assert ([run["run"] for run in first["runs"]], first["next"]) == (["r0", "r1"], "r1")
    second = await gateway.given(200, "GET", "/v1/runs?limit=2&after=r1")
    assert ([run["run"] for run in second["runs"]], second["next"]) == (["r2"], None)
    assert len((await gateway.given(200, "GET", "/v1/runs?state=stopped"))["runs"]) == 2


async def test_a_batch_is_stored_in_order_and_again_is_the_same_answer(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    body = {"run": "demo", "tasks": [{**TASK, "task": f"t{number}"} for number in range(300)]}
    first = await gateway.given(202, "POST", "/v1/tasks", body)
    assert [task["task"] for task in first["tasks"]] == [f"t{number}" for number in range(300)]
    stored = await read(bus, subjects.TASKS, subjects.task("demo", "*", "submitted"))
    assert [message.sequence for message in stored] == [task["sequence"] for task in first["tasks"]]
    assert first["pending"] == 300
    assert await gateway.given(202, "POST", "/v1/tasks", body) == first
    assert len(await read(bus, subjects.TASKS, subjects.task("demo", "*", "submitted"))) == 300


async def test_a_batch_with_one_bad_task_leaves_nothing_behind(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    bad = {"tasks": [TASK, {**TASK, "task": "b", "checks": [{"name": "a", "command": "true", "weight": 0.5}]}]}
    assert "tasks.1.checks have weights that sum to 0.5" in await gateway.refused(422, "POST", "/v1/tasks", bad)
    await gateway.given(202, "POST", "/v1/tasks", TASK)
    clash = {"tasks": [{**TASK, "task": "c"}, {**TASK, "instruction": "another"}]}
    assert "write-000001 of run demo exists" in await gateway.refused(409, "POST", "/v1/tasks", clash)
    assert [m.event().task for m in await read(bus, subjects.TASKS, "gyre.v1.task.>")] == ["write-000001"]  # type: ignore[attr-defined]  # the stream holds this kind only


async def test_the_run_of_a_task_is_in_the_query_or_the_body_or_the_active_one(gateway: Running) -> None:
    assert "there is no run yet" in await gateway.refused(404, "POST", "/v1/tasks", TASK)
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await seen(gateway, "demo")
    for path, extra in (("/v1/tasks?run=demo", {}), ("/v1/tasks", {"run": "demo"}), ("/v1/tasks", {})):
        assert (await gateway.given(202, "POST", path, {**TASK, **extra}))["run"] == "demo"
    assert "name one" in await gateway.refused(422, "POST", "/v1/tasks?run=other", {**TASK, "run": "demo"})
    assert "there is no run other" in await gateway.refused(404, "POST", "/v1/tasks?run=other", TASK)
    await gateway.given(200, "PATCH", "/v1/runs/demo", {"state": "stopped"})
    assert "run demo is stopped" in await gateway.refused(409, "POST", "/v1/tasks?run=demo", TASK)


async def test_a_request_with_a_key_ends_within_its_bound_although_the_broker_is_frozen(bus: Bus, nats_server) -> None:
    """Taking its key back took a minute more."""

    async def handle() -> tuple[int, bytes]:
        nats_server.signal(signal.SIGSTOP)
        await asyncio.Event().wait()
        raise AssertionError

    try:
        async with asyncio.timeout(20):
            with pytest.raises(BusUnavailableError):
                async with reachable(bus, 0.5):
                    await once(bus, "key", "request", handle)
    finally:
        nats_server.signal(signal.SIGCONT)


async def test_an_idempotency_key_gives_the_first_answer_again(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    first = await gateway.ask("POST", "/v1/tasks", TASK, Idempotency_Key="k1")
    await gateway.given(202, "POST", "/v1/tasks", {**TASK, "task": "another"})
    again = await gateway.ask("POST", "/v1/tasks", TASK, Idempotency_Key="k1")
    assert (again.status_code, again.content) == (202, first.content), "pending is the first answer's, not today's"
    assert again.headers["idempotent-replayed"] == "true"
    other = {**TASK, "task": "x"}
    assert "another request" in await gateway.refused(422, "POST", "/v1/tasks", other, Idempotency_Key="k1")
    assert "another request" in await gateway.refused(422, "POST", "/v1/runs", RUN, Idempotency_Key="k1")
    assert "1 to 200" in await gateway.refused(422, "POST", "/v1/tasks", other, Idempotency_Key="k" * 201)
    assert len(await read(bus, subjects.TASKS, "gyre.v1.task.demo.x.*")) == 0


async def test_a_refused_request_does_not_use_up_its_key(gateway: Running) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await gateway.refused(409, "POST", "/v1/runs", {**RUN, "seed": 9}, Idempotency_Key="k")
    await gateway.given(202, "POST", "/v1/tasks", TASK, Idempotency_Key="k")


async def test_the_same_key_many_times_at_once_is_handled_once(gateway: Running) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    answers = await asyncio.gather(*(gateway.ask("POST", "/v1/tasks", TASK, Idempotency_Key="k") for _ in range(8)))
    assert {answer.status_code for answer in answers} <= {202, 409}
    assert len({answer.content for answer in answers if answer.status_code == 202}) == 1


async def test_too_many_pending_tasks_are_429(bus: Bus, tmp_path: Path) -> None:
    async with gateway_on(bus, tmp_path, max_pending_tasks=2) as gateway:
        await gateway.given(201, "POST", "/v1/runs", RUN)
        three = {"tasks": [{**TASK, "task": name} for name in "abc"]}
        await gateway.refused(429, "POST", "/v1/tasks", three)
        two = {"tasks": [{**TASK, "task": name} for name in "ab"]}
        await gateway.given(202, "POST", "/v1/tasks", two)
        answer = await gateway.ask("POST", "/v1/tasks", {**TASK, "task": "c"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        await gateway.given(202, "POST", "/v1/tasks", two)  # nothing new: the same answer, whatever waits
        admitted = TaskAdmitted(run="demo", task="a", group=GROUP, executions=(EXECUTION,), version=0)
        await bus.publish(subjects.task("demo", "a", "admitted"), admitted)
        await gateway.given(202, "POST", "/v1/tasks", {**TASK, "task": "c"})


async def test_a_body_too_large_and_what_is_no_json(bus: Bus, tmp_path: Path) -> None:
    async with gateway_on(bus, tmp_path, max_body_bytes=2048) as gateway:
        await gateway.given(201, "POST", "/v1/runs", {**RUN, "harness": {}})
        large = {**TASK, "instruction": "x" * 4096}
        assert "at most 2048 bytes" in await gateway.refused(413, "POST", "/v1/tasks", large)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield b" " * 128

        json = {"Content-Type": "application/json"}
        answer = await gateway.client.post("/v1/tasks", content=chunks(), headers=json)
        assert answer.status_code == 413
        for body, status in (
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b"[" * 2000, 400),
            (b'{"a": "\\ud800"}', 422),
            (b"", 422),
        ):
            answer = await gateway.client.post("/v1/tasks", content=body, headers=json)
            assert answer.status_code == status, (body, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
        answer = await gateway.client.post("/v1/tasks", content=b"{}", headers={"Content-Type": "text/plain"})
        assert answer.status_code == 415


async def test_keys_and_open_paths(bus: Bus, tmp_path: Path) -> None:
    async with gateway_on(bus, tmp_path, api_keys=("secret", "second")) as gateway:
        assert "API key" in await gateway.refused(401, "GET", "/v1/runs")
        assert "API key" in await gateway.refused(401, "GET", "/v1/runs", X_API_Key="wrong")
        await gateway.given(200, "GET", "/v1/runs", X_API_Key="second")
        await gateway.given(200, "GET", "/v1/runs", Authorization="Bearer secret")
        for path in ("/healthz", "/readyz", "/openapi.json"):
            await gateway.given(200, "GET", path)


async def test_unknown_paths_and_methods_say_what_there_is(gateway: Running) -> None:
    assert "/openapi.json" in await gateway.refused(404, "GET", "/v1/nope")
    assert "allowed: GET, POST" in await gateway.refused(405, "DELETE", "/v1/tasks")
    assert "pattern" in await gateway.refused(422, "GET", "/v1/groups/nope")
    assert "limit" in await gateway.refused(422, "GET", "/v1/tasks?limit=0")


def scored(group: str, score: float) -> GroupScored:
    return GroupScored(
        run="demo", task="write-000001", group=group, outcome="ready", scores={f"{group}-e00": score},
        unscored={f"{group}-e01": "infra"}, sampled_version_min=0, sampled_version_max=0, tokens=9,
    )  # fmt: skip


async def publish_execution(bus: Bus) -> None:
    """The log of one execution, its group in the ledger, and what became of it."""
    members = (EXECUTION, f"{GROUP}-e01")
    for subject, event in log_of(EXECUTION, members, msgspec.convert(TASK, TaskSpec)):
        await bus.publish(subject, event)
    entry = GroupEntry(
        run="demo", group=GROUP, task="write-000001", sequence=0, purpose="train", state="trained",
        executions=members, admitted_version=1, dispatched=True, consumed_version=3,
    )  # fmt: skip
    await Bucket(bus, subjects.KV_LEDGER, GroupEntry).put(GROUP, entry)
    admitted = TaskAdmitted(run="demo", task="write-000001", group=GROUP, executions=members, version=1)
    consumed = GroupConsumed(run="demo", task="write-000001", group=GROUP, outcome="trained", version=3)
    events = [("admitted", admitted), ("scored", scored(GROUP, 0.75)), ("consumed", consumed)]
    for kind, event in events:
        await bus.publish(subjects.task("demo", "write-000001", kind), event)


async def test_a_task_its_group_and_its_execution_can_be_read(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await gateway.given(202, "POST", "/v1/tasks", {**TASK, "repeat": 1})
    await gateway.given(202, "POST", "/v1/tasks", {**TASK, "task": "other"})
    await publish_execution(bus)

    task = await gateway.given(200, "GET", "/v1/tasks/demo/write-000001")
    assert (task["summary"]["state"], task["summary"]["groups"]) == ("done", {"trained": 1})
    assert task["groups"][0]["scores"] == {EXECUTION: 0.75}
    assert task["spec"]["files"] == TASK["files"]
    listing = await gateway.given(200, "GET", "/v1/tasks?state=done")
    assert [found["task"] for found in listing["tasks"]] == ["write-000001"]
    listing = await gateway.given(200, "GET", "/v1/tasks?limit=1")
    assert listing["next"] == listing["tasks"][0]["sequence"]
    listing = await gateway.given(200, "GET", f"/v1/tasks?limit=1&after={listing['next']}")
    assert ([found["task"] for found in listing["tasks"]], listing["next"]) == (["other"], None)

    group = await gateway.given(200, "GET", f"/v1/groups/{GROUP}")
    assert (group["staleness"], group["entry"]["state"]) == (2, "trained")
    first, second = group["members"]
    assert (first["state"], first["end_reason"], first["score"]) == ("ended", "done", 0.75)
    assert (second["state"], second["unscored"]) == ("waiting", "infra")

    report = await gateway.given(200, "GET", f"/v1/executions/{EXECUTION}")
    assert (report["state"], report["score"], report["verified_score"]) == ("ended", 0.75, 1.0)
    kinds = [entry["event"]["type"] for entry in report["log"]]
    assert kinds == ["traj.started.v1", "traj.call.v1", "traj.tool.v1", "traj.verified.v1", "traj.ended.v1"]
    assert report["log"][1]["event"]["sampled_ids"] == 2
    page = await gateway.given(200, "GET", f"/v1/executions/{EXECUTION}?limit=2&tokens=true")
    assert page["log"][1]["event"]["sampled_ids"] == [4, 5]
    rest = await gateway.given(200, "GET", f"/v1/executions/{EXECUTION}?after={page['next']}")
    assert [entry["event"]["type"] for entry in rest["log"]] == kinds[2:]

    assert "no task nope in run demo" in await gateway.refused(404, "GET", "/v1/tasks/demo/nope")
    assert "no group demo-g000009" in await gateway.refused(404, "GET", "/v1/groups/demo-g000009")
    assert "no execution" in await gateway.refused(404, "GET", "/v1/executions/demo-g000009-e00")


async def test_an_undecodable_event_of_a_log_is_shown_as_such_and_is_no_fault(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await gateway.given(202, "POST", "/v1/tasks", {**TASK, "repeat": 1})
    await publish_execution(bus)
    await spoil(bus, EXECUTION, "write-000001")
    report = await gateway.given(200, "GET", f"/v1/executions/{EXECUTION}")
    assert len(report["log"]) == 5 + 8
    assert all("type" in entry["event"] for entry in report["log"][:5])
    reasons = {entry["event"]["undecodable"] for entry in report["log"][5:]}
    assert reasons == {"Object missing required field `run`", "JSON is nested too deeply"}
    assert report["score"] == 0.75
    group = await gateway.given(200, "GET", f"/v1/groups/{GROUP}")
    assert group["members"][0]["score"] == 0.75
    task = await gateway.given(200, "GET", "/v1/tasks/demo/write-000001")
    assert task["groups"][0]["scores"] == {EXECUTION: 0.75}
    listing = await gateway.given(200, "GET", "/v1/tasks?limit=1")
    # A page that held nothing readable is no page to stay at.
    listing = await gateway.given(200, "GET", f"/v1/tasks?limit=1&after={listing['tasks'][0]['sequence']}")
    assert (listing["tasks"], listing["next"]) == ([], None)
    for path in ("runs/demo", "runs", "updates", "weights", "decisions", "decisions?last=true", "status"):
        await gateway.given(200, "GET", f"/v1/{path}")


async def test_a_listing_with_a_filter_that_little_matches_is_bounded_and_goes_on(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "SCAN", 200)
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await gateway.given(202, "POST", "/v1/tasks", {"tasks": [{**TASK, "task": f"t{number}"} for number in range(250)]})
    page = await gateway.given(200, "GET", "/v1/tasks?state=done")
    assert page["tasks"] == []
    assert page["next"] == 200
    assert (await gateway.given(200, "GET", f"/v1/tasks?state=done&after={page['next']}"))["next"] is None


def committed(update: int) -> Committed:
    return Committed(
        run="demo", update=update, attempt="a", version=update, published=update % 2 == 0, groups=("demo-g000000",),
        executions=("demo-g000000-e00",), staleness=(0, 2), score=0.5, gradient_norm=1.0,
        stats=UpdateStats(tokens=10, clipped_tokens=1, kl_sum=0.5, token_versions={0: 4, 2: 6}), opened_s=1.5,
    )  # fmt: skip


async def test_updates_and_progress_come_from_the_stream(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    for update in (1, 2, 3):
        await bus.publish(subjects.update("demo", "committed"), committed(update))
    page = await gateway.given(200, "GET", "/v1/updates?run=demo&limit=2")
    assert [update["update"] for update in page["updates"]] == [1, 2]
    assert page["updates"][1]["staleness_mean"] == 1.0
    assert page["updates"][1]["clip_fraction"] == pytest.approx(0.1)
    assert page["updates"][1]["token_versions"] == {"0": 4, "2": 6}
    assert (page["updates"][1]["alarm"], page["updates"][1]["logprob_gap"]) == (None, None)
    rest = await gateway.given(200, "GET", f"/v1/updates?run=demo&after={page['next']}")
    assert ([update["update"] for update in rest["updates"]], rest["next"]) == ([3], None)
    progress = (await gateway.given(200, "GET", "/v1/runs/demo"))["progress"]
    assert (progress["update"], progress["version"], progress["score"]) == (3, 3, 0.5)


async def test_versions_are_listed_with_who_applied_and_who_refused(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    files = (ShardFile(name="model.safetensors", sha256="0" * 64, bytes=12),)
    for version in (0, 2):
        manifest = Manifest(run="demo", version=version, parent=None, step=version, directory="d", files=files)
        await bus.publish(subjects.weights("demo", "published"), WeightsPublished(run="demo", manifest=manifest))
    applied = WeightsApplied(run="demo", version=2, host="host0", boot="b", duration_s=0.1)
    refused = WeightsRefused(run="demo", version=2, host="host1", boot="b", error="checksum")
    await bus.publish(subjects.weights("demo", "applied"), applied)
    await bus.publish(subjects.weights("demo", "refused"), refused)
    report = await gateway.given(200, "GET", "/v1/weights?run=demo")
    assert report["published_version"] == 2
    assert [version["version"] for version in report["versions"]] == [0, 2]
    assert report["versions"][0]["applied"] == []
    assert report["versions"][1]["applied"][0]["host"] == "host0"
    assert report["versions"][1]["refused"][0]["error"] == "checksum"


async def test_the_allocator_answers_through_the_gateway(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    status = HostStatus(
        host="gpu7", cell="host0", boot="b", state=HostState.ROLLOUT, epoch=1, url="http://x", engine="tiny"
    )
    await Bucket(bus, subjects.KV_HOSTS, HostStatus).put("gpu7", status, ttl_s=60)
    await eventually(lambda: "gpu7" in gateway.gateway.deps.host_view.values)
    async with FakeAllocator("demo").answering(bus) as allocator:
        assert (await gateway.given(200, "GET", "/v1/staleness?run=demo"))["distribution"] == {"0": 1, "2": 3}
        hosts = await gateway.given(200, "GET", "/v1/hosts")
        assert (hosts["hosts"][0]["host"], hosts["cells"][0]["cell"]) == ("gpu7", "host0")
        for path, wish in (("/v1/cells/host0/drain", "drain"), ("/v1/hosts/gpu7/cordon", "cordon")):
            assert (await gateway.given(200, "POST", path))["wish"] == wish
        assert [(one.cell, one.wish) for one in allocator.wishes] == [("host0", "drain"), ("host0", "cordon")]
        assert "there is no cell c9; there are: host0" in await gateway.refused(404, "POST", "/v1/cells/c9/drain")
        assert "there is no host h9; there are: gpu7" in await gateway.refused(404, "POST", "/v1/hosts/h9/drain")
        assert "'drain', 'resume' or 'cordon'" in await gateway.refused(422, "POST", "/v1/cells/host0/explode")
    assert "allocator does not answer" in await gateway.refused(503, "GET", "/v1/staleness?run=demo")
    hosts = await gateway.given(200, "GET", "/v1/hosts")
    assert "allocator does not answer" in hosts["cells_missing"]


async def test_status_names_what_is_waited_for_and_what_is_missing(gateway: Running, bus: Bus) -> None:
    services = Bucket(bus, subjects.KV_SERVICES, ServiceStatus)
    for name in ("gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer"):
        waits = (
            (Wait(what="a host in the rollout role", since_s=4.0, bound_s=None, count=3),) if name == "rollout" else ()
        )
        status = ServiceStatus(
            service=name, replica="r", pid=1, url="", ready=name != "trainer", waits=waits, gauges={"live_episodes": 2},
            missing="a usable model" if name == "trainer" else None,
        )  # fmt: skip
        await services.put(f"{name}.r", status, ttl_s=60)
    for number in range(7):
        letter = DeadLetter(
            origin_stream="TRAJ", consumer="trajectory", origin_subject="s", origin_sequence=number, deliveries=5,
            error=f"failed {number}", payload="{}",
        )  # fmt: skip
        await bus.publish(subjects.dlq("TRAJ", "trajectory"), letter)
    await gateway.given(201, "POST", "/v1/runs", RUN)
    await gateway.given(202, "POST", "/v1/tasks", TASK)
    await eventually(lambda: "trainer.r" in gateway.gateway.deps.service_view.values)
    async with FakeAllocator("demo").answering(bus):
        status = await gateway.given(200, "GET", "/v1/status")
    assert (status["ready"], status["missing"], status["not_ready"]) == (False, ["host"], ["trainer.r"])
    assert [service["missing"] for service in status["services"] if not service["ready"]] == ["a usable model"]
    assert status["waits"][0]["what"] == "a host in the rollout role"
    assert (status["run"]["spec"]["run"], status["pending_tasks"]) == ("demo", 1)
    assert status["staleness"]["groups"]["balances"] is True
    assert status["dead_letters"]["count"] == 7
    assert [letter["error"] for letter in status["dead_letters"]["last"]] == [f"failed {n}" for n in range(2, 7)]
    assert status["gauges"]["rollout.live_episodes"] == 2


async def test_without_the_broker_every_call_is_503_and_comes_back(gateway: Running, nats_server: Any) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    nats_server.kill()
    await eventually(lambda: not gateway.context.bus.connected)
    for method, path, body in (("GET", "/v1/status", None), ("POST", "/v1/tasks", TASK), ("GET", "/v1/tasks", None)):
        assert "does not answer" in await gateway.refused(503, method, path, body)
    assert (await gateway.ask("GET", "/healthz")).status_code == 200
    await eventually(lambda: gateway.context.missing is not None)
    assert (await gateway.ask("GET", "/readyz")).status_code == 503
    nats_server.start()
    await eventually(lambda: gateway.context.bus.connected)
    await gateway.given(202, "POST", "/v1/tasks", TASK)


async def test_the_openapi_page_has_an_example_for_every_call(gateway: Running) -> None:
    document = await gateway.given(200, "GET", "/openapi.json")
    calls = [(path, method, call) for path, item in document["paths"].items() for method, call in item.items()]
    assert len(calls) >= 16
    for path, method, call in calls:
        good = [reply for status, reply in call["responses"].items() if status.startswith("2")]
        assert len(good) == 1, (path, method)
        (media,) = good[0]["content"].values()
        assert media["example"], (path, method)
        if "requestBody" in call:
            assert call["requestBody"]["content"]["application/json"]["examples"], (path, method)
        for status in ("401", "404", "409", "413", "415", "422", "429", "503"):
            assert "application/problem+json" in call["responses"][status]["content"], (path, method, status)
    names = document["components"]["schemas"]
    references = {
        part.split('"')[0] for part in msgspec.json.encode(document).decode().split("#/components/schemas/")[1:]
    }
    assert references <= set(names)


def test_every_example_is_of_its_type() -> None:
    pairs = {
        "RunReport": [examples.RUN_REPORT, examples.RUN_STOPPED], "RunList": [examples.RUN_LIST],
        "UpdateList": [examples.UPDATE_LIST], "Accepted": [examples.ACCEPTED], "TaskList": [examples.TASK_LIST],
        "TaskReport": [examples.TASK_REPORT], "GroupReport": [examples.GROUP_REPORT],
        "ExecutionReport": [examples.EXECUTION_REPORT], "StalenessReport": [examples.STALENESS],
        "HostsReport": [examples.HOSTS], "WishReply": [examples.WISH], "WeightsReport": [examples.WEIGHTS],
        "StatusReport": [examples.STATUS], "CellsReport": [examples.CELLS], "DecisionList": [examples.DECISION_LIST],
        "TreeReport": [examples.TREE_REPORT],
    }  # fmt: skip
    kinds = openapi.answers()
    assert set(pairs) == set(kinds) - {"ProblemDocument"}
    for name, values in pairs.items():
        for value in values:
            decoded = msgspec.json.decode(msgspec.json.encode(value), type=kinds[name])
            assert set(value) == set(kinds[name].__struct_fields__), name
            assert decoded is not None


async def test_an_error_lists_so_many_names_and_no_more(gateway: Running, bus: Bus) -> None:
    bucket = Bucket(bus, subjects.KV_RUNS, RunSpec)
    for number in range(LISTED + 5):
        await bucket.put(f"r{number:02d}", RunSpec(run=f"r{number:02d}", model="m", state="stopped"))
    await seen(gateway, f"r{LISTED + 4:02d}")
    assert (await gateway.refused(404, "GET", "/v1/runs/nope")).endswith("and 5 more")


async def test_tasks_of_another_writer_are_read_as_they_are(gateway: Running, bus: Bus) -> None:
    await gateway.given(201, "POST", "/v1/runs", RUN)
    spec = msgspec.convert({**TASK, "task": "direct"}, TaskSpec)
    await bus.publish(subjects.task("demo", "direct", "submitted"), TaskSubmitted(run="demo", task="direct", spec=spec))
    assert (await gateway.given(200, "GET", "/v1/tasks/demo/direct"))["spec"]["instruction"] == TASK["instruction"]
