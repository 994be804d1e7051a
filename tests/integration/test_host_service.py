"""A host over a real broker, with tiny engines: roles, drains with live calls, versions, what it says of itself."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from opengyre.host import service as service_module
from opengyre.host import versions as versions_module
from opengyre.host.drain import held
from opengyre.host.service import EngineFailedError
from opengyre.host.tiny import TinyHostEngine
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostState
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import WeightsApplied, WeightsRefused
from opengyre.shared.bus import Bucket, Bus, read
from support import eventually
from support.running_host import Running, Versions, running

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8]
LONG = 450
SWITCH_S = 60.0
"""Far below what a switch takes that has missed an event, and goes on when it looks by itself."""


@pytest.fixture
async def run(bus: Bus) -> RunSpec:
    spec = RunSpec(run="r", model="unused")
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("r", spec)
    return spec


@pytest.fixture
def versions(bus: Bus, tmp_path: Path) -> Versions:
    return Versions(bus, tmp_path / "weights")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(name: str, tokens: list[int], max_tokens: int, seed: int = 11, **params: object) -> dict[str, object]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "stop_token_ids": [], "logprobs": 0}
    return {"request_id": name, "token_ids": tokens, "model": "r", "sampling_params": sampling | params}


async def generate(http: aiohttp.ClientSession, host: Running, request: dict[str, object]) -> tuple[int, dict]:
    async with http.post(f"{host.context.url}/inference/v1/generate", json=request) as response:
        return response.status, await response.json()


def choice(answer: tuple[int, dict]) -> dict:
    status, content = answer
    assert status == 200, content
    return content["choices"][0]


async def test_a_host_without_a_run_is_ready_and_says_that_it_waits_for_one(bus: Bus, tmp_path: Path) -> None:
    """A stack without a run is not broken: `gyre status` right after `gyre up` has nothing to complain of."""
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.STARTING)
        await eventually(lambda: host.context.missing is None)
        await eventually(lambda: [wait.what for wait in host.context.waits.report()] == ["an active run"])


async def test_a_host_waits_for_no_weights_of_a_stopped_run(
    bus: Bus, run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `gyre run stop` before the first version it was not ready for good: "has published none yet"."""
    monkeypatch.setattr(service_module, "LOOK_AGAIN_S", 600.0)
    runs = Bucket(bus, subjects.KV_RUNS, RunSpec)
    async with running(bus, tmp_path / "s") as host:

        def waits() -> list[str]:
            return [wait.what for wait in host.context.waits.report()]

        await eventually(lambda: waits() == ["the first weights of run r"])
        assert host.context.missing is not None
        await runs.put("r", msgspec.structs.replace(run, state="stopped"))
        # It would not look by itself in this time.
        await eventually(lambda: waits() == ["an active run: run r is stopped"])
        assert host.context.missing is None
        await runs.put("r", run)
        await eventually(lambda: waits() == ["the first weights of run r"])
        assert host.context.missing == "host0 has no weights: run r has published none yet"


async def test_the_load_of_a_version_shows_how_long_it_may_take(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    """While vLLM started, `gyre status` showed a wait without a bound."""
    await versions.publish(0)
    go_on = asyncio.Event()

    class Slow(TinyHostEngine):
        load_bound_s = 300.0

        async def wake(self, directory: Path, version: int) -> None:
            await go_on.wait()
            await super().wake(directory, version)

    async with running(bus, tmp_path / "s", engine=Slow(8, 1)) as host:
        loading = [("version 0 to be loaded", 300.0)]
        await eventually(lambda: [(wait.what, wait.bound_s) for wait in host.context.waits.report()] == loading)
        go_on.set()
        await host.reach(HostState.ROLLOUT)


async def test_no_traffic_before_weights_then_joins_acknowledges_and_serves(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.STARTING)
        await eventually(lambda: host.context.missing == "host0 has no weights: run r has published none yet")
        status, content = await generate(http, host, body("a", PROMPT, 4))
        assert (status, content["error"]["type"]) == (503, "not_serving")
        await versions.publish(0)
        status = await host.reach(HostState.ROLLOUT)
        assert (status.version, status.run, host.context.missing) == (0, "r", None)
        assert status.last_switch_s is not None, "a dry switch comes before the first traffic"
        assert status.memory_bytes > 0
        applied = [s.event() for s in await read(bus, subjects.WEIGHTS, subjects.weights("r", "applied"))]
        assert [(e.version, e.host) for e in applied if isinstance(e, WeightsApplied)] == [(0, "host0")]
        answer = choice(await generate(http, host, body("a", PROMPT, 4)))
        assert len(answer["token_ids"]) == 4
        assert [pair["token_id"] for pair in answer["logprobs"]["content"]] == answer["token_ids"]
        assert answer["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
        assert answer["finish_reason"] == "length"
    assert await host.statuses.get("host0") is None


async def test_a_drain_stops_live_calls_and_a_moved_call_gives_the_tokens_of_an_unmoved_one(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s", "host0") as one, running(bus, tmp_path / "s", "host1") as two:
        await one.reach(HostState.ROLLOUT)
        await two.reach(HostState.ROLLOUT)
        with one.held_at(10):
            calls = [asyncio.create_task(generate(http, one, body(f"c{n}", PROMPT, LONG, seed=n))) for n in range(8)]
            await one.under_way(8, 10)
            await one.tell("train", 1, grace_s=0.02)
            parts = [choice(await call) for call in calls]
            await one.reach(HostState.TRAIN)
        assert {part["finish_reason"] for part in parts} == {"abort"}
        assert all(0 < len(part["token_ids"]) < LONG for part in parts)
        assert held(one.engine) == 0
        drained = (await one.changes())[-1]
        assert (drained.before, drained.after, drained.moved_calls) == (HostState.DRAINING, HostState.TRAIN, 8)
        assert drained.freed_bytes > 0
        # Continued elsewhere, in another batch, they are what unbroken calls would have been.
        moved, whole = [], []
        for n, part in enumerate(parts):
            sampled = part["token_ids"]
            rest = body(f"m{n}", PROMPT + sampled, LONG - len(sampled), seed=n)
            moved.append(asyncio.create_task(generate(http, two, rest)))
            whole.append(asyncio.create_task(generate(http, two, body(f"w{n}", PROMPT, LONG, seed=n))))
        for part, rest, unbroken in zip(parts, moved, whole, strict=True):
            assert part["token_ids"] + choice(await rest)["token_ids"] == choice(await unbroken)["token_ids"]


async def test_calls_that_end_within_the_grace_are_not_stopped(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        with host.held_at(50):
            call = asyncio.create_task(generate(http, host, body("a", PROMPT, 100)))
            await host.under_way(1, 50)
            await host.tell("train", 1, grace_s=200.0)
            await host.reach(HostState.DRAINING)
            status, content = await generate(http, host, body("b", PROMPT, 4))
            assert (status, content["error"]["type"]) == (503, "not_serving")
            assert not call.done()
        assert choice(await call)["finish_reason"] == "length"
        await host.reach(HostState.TRAIN)
        assert (await host.changes())[-1].moved_calls == 0


async def test_a_switch_and_back_is_quick_and_ends_with_the_newest_weights(
    bus: Bus,
    run: RunSpec,
    versions: Versions,
    tmp_path: Path,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "LOOK_AGAIN_S", 10 * SWITCH_S)
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        await host.tell("train", 1)
        status = await host.reach(HostState.TRAIN)
        assert status.memory_bytes == 0
        assert status.last_switch_s is not None
        assert status.last_switch_s < SWITCH_S
        await versions.publish(1)
        await versions.publish(2)
        await host.tell("rollout", 2)
        status = await host.reach(HostState.ROLLOUT)
        assert (status.version, status.epoch) == (2, 2)
        assert status.last_switch_s is not None
        assert status.last_switch_s < SWITCH_S
        assert [c.after for c in await host.changes()] == [
            HostState.JOINING, HostState.ROLLOUT, HostState.DRAINING, HostState.TRAIN, HostState.LEAVING_TRAIN,
            HostState.JOINING, HostState.ROLLOUT,
        ]  # fmt: skip
        # A repeat and an older command change nothing.
        await host.tell("train", 2)
        await host.tell("cordoned", 1)
        assert choice(await generate(http, host, body("a", PROMPT, 4)))["finish_reason"] == "length"
        assert len(await host.changes()) == 7


async def test_a_new_version_is_applied_under_live_calls_with_exact_spans(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        later = versions.write(1)
        with host.held_at(7):
            call = asyncio.create_task(generate(http, host, body("a", PROMPT, LONG)))
            await host.under_way(1, 7)
            await versions.announce(later)
            await eventually(lambda: host.engine.stats().version == 1)
        answer = choice(await call)
        assert len(answer["token_ids"]) == LONG
        spans = answer["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert [(span["start"], span["end"]) for span in spans] == [(0, 7), (7, LONG)]

        async def told() -> bool:
            return (await host.status()).version == 1

        await eventually(told)


async def test_a_corrupted_shard_is_refused_and_applied_after_its_repair(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        manifest = versions.write(1)
        shard = Path(manifest.directory) / "model.safetensors"
        good = tmp_path / "good"
        shutil.copy(shard, good)
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(bytes(content))
        await versions.announce(manifest)

        async def refused() -> bool:
            return bool(await read(bus, subjects.WEIGHTS, subjects.weights("r", "refused")))

        await eventually(refused)
        event = (await read(bus, subjects.WEIGHTS, subjects.weights("r", "refused")))[0].event()
        assert isinstance(event, WeightsRefused)
        assert "model.safetensors" in event.error
        assert choice(await generate(http, host, body("a", PROMPT, 4)))["weight_versions"][0]["version"] == "0"
        shutil.copy(good, shard)

        async def applied() -> bool:
            return (await host.status()).version == 1

        await eventually(applied)
        assert choice(await generate(http, host, body("b", PROMPT, 4)))["weight_versions"][0]["version"] == "1"


async def test_memory_that_is_not_freed_keeps_training_from_starting(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    class Leaky(TinyHostEngine):
        leaks = True

        async def sleep(self) -> None:
            if not self.leaks:
                await super().sleep()

    await versions.publish(0)
    async with running(bus, tmp_path / "s", engine=(leaky := Leaky(4, 1))) as host:
        await host.reach(HostState.ROLLOUT)
        await host.tell("train", 1)
        await eventually(lambda: any("memory" in wait.what for wait in host.context.waits.report()))
        await host.reach(HostState.DRAINING)
        leaky.leaks = False
        await host.reach(HostState.TRAIN)


async def test_a_host_that_is_told_to_end_ends_although_its_memory_is_not_freed(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    class Leaky(TinyHostEngine):
        async def sleep(self) -> None:
            """Holds on to all it has."""

    await versions.publish(0)
    async with running(bus, tmp_path / "s", engine=Leaky(4, 1)) as host:
        await host.reach(HostState.ROLLOUT)
        await host.tell("train", 1)
        await host.reach(HostState.DRAINING)
        host.context.stopping.set()
        await asyncio.wait_for(host.task, 30)


async def test_a_client_that_goes_away_frees_its_place(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        await host.engine.pause()
        call = asyncio.create_task(generate(http, host, body("a", PROMPT, LONG)))
        await eventually(lambda: host.engine.stats().waiting == 1)
        call.cancel()
        await eventually(lambda: host.engine.stats().waiting == 0)
        await host.engine.resume()
        # The same identifier is free again at once.
        assert choice(await generate(http, host, body("a", PROMPT, 3)))["finish_reason"] == "length"


async def test_abort_delivers_partial_tokens_of_the_named_call(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        with host.held_at(9):
            calls = {n: asyncio.create_task(generate(http, host, body(n, PROMPT, LONG))) for n in ("a", "b")}
            await host.under_way(2, 9)
            url = f"{host.context.url}/inference/v1/abort_requests"
            async with http.post(url, json={"request_ids": ["generate-tokens-a", "unknown"]}) as response:
                assert await response.json() == {"status": "aborted", "aborted": 1}
            part = choice(await calls["a"])
            assert part["finish_reason"] == "abort"
            assert 9 <= len(part["token_ids"]) < LONG
        assert choice(await calls["b"])["finish_reason"] == "length"


async def test_too_many_calls_are_refused_with_429(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s", capacity=1) as host:
        await host.reach(HostState.ROLLOUT)
        await host.engine.pause()
        calls = [asyncio.create_task(generate(http, host, body(f"c{n}", PROMPT, 2))) for n in range(9)]
        await eventually(lambda: host.host._door.live == 9)
        status, content = await generate(http, host, body("more", PROMPT, 2))
        assert (status, content["error"]["type"]) == (429, "too_many_requests")
        await host.engine.resume()
        assert {choice(await call)["finish_reason"] for call in calls} == {"length"}


async def test_a_level_that_was_set_while_the_host_was_away_is_obeyed(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    await versions.publish(0)
    await Bucket(bus, subjects.KV_DESIRED, DesiredRole).put(
        "host0", DesiredRole(host="host0", role="cordoned", epoch=7)
    )
    async with running(bus, tmp_path / "s") as host:
        status = await host.reach(HostState.CORDONED)
        assert status.epoch == 7


async def test_another_run_is_served_only_with_weights_of_its_own(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(3)
    async with running(bus, tmp_path / "s") as host:
        assert (await host.reach(HostState.ROLLOUT)).version == 3
        runs = Bucket(bus, subjects.KV_RUNS, RunSpec)
        await runs.put("r", msgspec.structs.replace(run, state="finished"))
        await runs.put("q", RunSpec(run="q", model="unused"))
        await host.reach(HostState.STARTING)
        assert (await generate(http, host, body("a", PROMPT, 4)))[0] == 503
        await Versions(bus, versions.root, "q").publish(0)
        status = await host.reach(HostState.ROLLOUT)
        assert (status.run, status.version) == ("q", 0)


async def test_hosts_that_serve_load_a_new_version_one_after_another(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_module, "TURN_S", 60.0)
    monkeypatch.setattr(versions_module, "TURN_TTL_S", 120)
    loading: list[str] = []
    most: list[int] = []

    class Slow(TinyHostEngine):
        async def load(self, directory: Path, version: int) -> None:
            loading.append("x")
            most.append(len(loading))
            await asyncio.sleep(0.1)
            await super().load(directory, version)
            loading.pop()

    await versions.publish(0)
    async with (
        running(bus, tmp_path / "s", "host0", Slow(4, 1)) as one,
        running(bus, tmp_path / "s", "host1", Slow(4, 1)) as two,
    ):
        await one.reach(HostState.ROLLOUT)
        await two.reach(HostState.ROLLOUT)
        await versions.publish(1)

        async def both() -> bool:
            return [(await host.status()).version for host in (one, two)] == [1, 1]

        await eventually(both)
    assert most == [1, 1]


async def test_a_follower_that_is_behind_after_a_restart_of_the_broker_lets_no_host_join_with_an_old_version(
    bus: Bus, nats_server, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        await host.tell("train", 1)
        await host.reach(HostState.TRAIN)
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        await versions.publish(1)
        await host.tell("rollout", 2)
        assert (await host.reach(HostState.ROLLOUT)).version == 1


async def test_calls_go_on_while_the_broker_is_away_and_roles_are_obeyed_when_it_is_back(
    bus: Bus, nats_server, run: RunSpec, versions: Versions, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    await versions.publish(0)
    async with running(bus, tmp_path / "s") as host:
        await host.reach(HostState.ROLLOUT)
        await asyncio.to_thread(nats_server.kill)
        for n in range(4):
            assert choice(await generate(http, host, body(f"c{n}", PROMPT, 20)))["finish_reason"] == "length"
        await asyncio.to_thread(nats_server.start)
        await host.tell("train", 1)
        await host.reach(HostState.TRAIN)


async def test_an_engine_that_ended_by_itself_ends_the_host(
    bus: Bus, run: RunSpec, versions: Versions, tmp_path: Path
) -> None:
    await versions.publish(0)

    async def lose_the_engine() -> None:
        async with running(bus, tmp_path / "s") as host:
            await host.reach(HostState.ROLLOUT)
            await host.engine.close()
            close = host.engine.close

            async def closing() -> None:
                removed.append("what is left of the engine")
                await close()

            host.engine.close = closing
            await eventually(host.task.done)

    removed: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        await lose_the_engine()
    assert caught.group_contains(EngineFailedError)
    assert removed, "processes of an engine whose server was killed went on"
