"""The bus against a real server: each test is named after the rule or the finding it holds."""

import asyncio
import contextlib
import functools
import importlib

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.kv import KeyValue

from opengyre.proto import subjects
from opengyre.proto.service import Empty, Wait
from opengyre.proto.task import Check, TaskSpec, TaskSubmitted
from opengyre.shared.bus import (
    Bucket,
    Bus,
    ConflictError,
    Endpoint,
    FencedError,
    Lease,
    LeaseOwner,
    Rejected,
    RpcFailedError,
    bootstrap,
    call,
    discover,
    follow,
    read,
    replay,
    serving,
    work,
)
from support import eventually

SOON_S = 60.0
"""A bound for what comes in a moment, unless the machine is busy."""


def submitted(number: int) -> TaskSubmitted:
    spec = TaskSpec(task=f"t{number}", instruction="x", checks=(Check(name="a", command="true", weight=1.0),))
    return TaskSubmitted(run="r", task=spec.task, spec=spec)


def subject(number: int) -> str:
    return subjects.task("r", f"t{number}", "submitted")


async def test_bootstrap_twice_changes_nothing(bus: Bus) -> None:
    assert await bootstrap(bus) == []


async def test_a_repeated_publish_is_one_message(bus: Bus) -> None:
    first = await bus.publish(subject(1), submitted(1))
    assert await bus.publish(subject(1), submitted(1)) == first
    assert [stored.event() for stored in await read(bus, subjects.TASKS, "gyre.v1.task.>")] == [submitted(1)]


async def test_a_writer_that_was_replaced_is_fenced(bus: Bus) -> None:
    scope = "gyre.v1.task.r.>"
    last = await bus.append(subject(1), submitted(1), scope=scope, last=0)
    with pytest.raises(FencedError):
        await bus.append(subject(2), submitted(2), scope=scope, last=0)
    assert await bus.append(subject(1), submitted(1), scope=scope, last=0) == last, "our own in-doubt append"


async def test_a_reading_waits_for_what_a_late_fetch_left_on_its_way(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stalls longer than a fetch may take: the broker has answered, and nothing is pending any more."""
    for number in range(5):
        await bus.publish(subject(number), submitted(number))
    fetch = replay._Reader._fetch
    fetches = 0

    async def late(self, subscription):
        nonlocal fetches
        fetches += 1
        if fetches > 1:
            return await fetch(self, subscription)
        await bus.client.publish(subscription._nms, b'{"batch": 5, "no_wait": true}', subscription._deliver)
        return []

    monkeypatch.setattr(replay._Reader, "_fetch", late)
    assert len(await read(bus, subjects.TASKS, "gyre.v1.task.>")) == 5


async def test_a_reading_asks_again_for_what_was_lost_on_its_way(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await bus.publish(subject(number), submitted(number))
    fetch = replay._Reader._fetch
    fetches = 0

    async def lossy(self, subscription):
        nonlocal fetches
        fetches += 1
        got = await fetch(self, subscription)
        return got[:2] if fetches == 1 else got

    monkeypatch.setattr(replay._Reader, "_fetch", lossy)
    found = await read(bus, subjects.TASKS, "gyre.v1.task.>")
    assert [stored.sequence for stored in found] == [1, 2, 3, 4, 5]


async def test_follow_goes_on_after_a_restart_of_the_server(bus: Bus, nats_server) -> None:
    seen: list[str] = []
    got = asyncio.Event()

    async def reader() -> None:
        async for stored in follow(bus, subjects.TASKS, "gyre.v1.task.>"):
            seen.append(stored.subject)
            got.set()

    task = asyncio.create_task(reader())
    await bus.publish(subject(1), submitted(1))
    await asyncio.wait_for(got.wait(), SOON_S)
    got.clear()
    await asyncio.to_thread(nats_server.kill)
    await asyncio.to_thread(nats_server.start)
    await bus.publish(subject(2), submitted(2))
    await asyncio.wait_for(got.wait(), SOON_S)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert seen == [subject(1), subject(2)]


async def test_work_acknowledges_retries_and_buries(bus: Bus) -> None:
    stop = asyncio.Event()
    seen: list[tuple[str, int]] = []

    async def handler(event, delivery) -> None:
        assert isinstance(event, TaskSubmitted)
        seen.append((event.task, delivery.deliveries))
        if event.task == "t1" and delivery.deliveries == 1:
            raise RuntimeError("once")
        if event.task == "t2":
            raise Rejected("never")
        if len(seen) >= 4:
            stop.set()

    for number in (1, 2, 3):
        await bus.publish_raw(subjects.episode_dispatch("r"), msgspec.json.encode(submitted(number)), f"m{number}", "x")
    await asyncio.wait_for(work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop, concurrency=2), SOON_S)
    assert ("t1", 2) in seen
    letters = await read(bus, subjects.DLQ, "gyre.v1.dlq.>")
    assert [letter.event().error for letter in letters] == ["never"]  # type: ignore[attr-defined]  # the stream holds this kind only

    async def settled() -> bool:  # the broker has an acknowledgement before it has acted on it
        return (await bus.stream_info(subjects.EPISODES)).state.messages == 0

    await eventually(settled)


async def test_rpc_answers_errors_and_values(bus: Bus) -> None:
    async def echo(request: Wait) -> Wait:
        if request.what == "bad":
            raise RpcFailedError("not_allowed", "what is bad; allowed is good")
        return request

    async with serving(bus, "gateway", "any", {"echo": Endpoint(Wait, echo)}):
        wait = Wait(what="good", since_s=1.0, bound_s=None)
        assert await call(bus, "gateway", "any", "echo", wait, Wait) == wait
        with pytest.raises(RpcFailedError, match="allowed is good") as error:
            await call(bus, "gateway", "any", "echo", Wait(what="bad", since_s=0, bound_s=None), Wait)
        assert error.value.kind == "not_allowed"
        with pytest.raises(RpcFailedError):
            await call(bus, "gateway", "any", "echo", Empty(), Wait)


async def test_a_service_that_is_busy_is_discovered_all_the_same(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answered later than in 0.3 s was none: "no sandbox service answers on the bus"."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("opengyre.shared.bus.discover"), "FIRST_S", 600.0)
        async with asyncio.timeout(SOON_S):
            assert await discover(bus, "gyre-") == [], "nobody listens, and the broker says so"

    async def answers(message: Msg, name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await message.respond(msgspec.json.encode({"name": name, "id": "1", "version": "1.0.0"}))

    for name, delay_s in (("gyre-quick-any", 0.0), ("gyre-busy-n1", 0.9)):
        await bus.client.subscribe("$SRV.PING", cb=functools.partial(answers, name=name, delay_s=delay_s))
    assert await discover(bus, "gyre-busy-") == ["gyre-busy-n1"]


async def test_bucket_compares_and_sets(bus: Bus) -> None:
    bucket = Bucket(bus, subjects.KV_RUNS, LeaseOwner)
    revision = await bucket.create("k", LeaseOwner("a"))
    with pytest.raises(ConflictError):
        await bucket.create("k", LeaseOwner("b"))
    await bucket.update("k", LeaseOwner("c"), revision)
    with pytest.raises(ConflictError):
        await bucket.update("k", LeaseOwner("d"), revision)
    found = await bucket.get("k")
    assert found is not None
    assert found[0].owner == "c"
    await bucket.delete("k")
    assert await bucket.get("k") is None
    await bucket.create("k", LeaseOwner("e"))


async def test_view_sees_changes_expiry_and_a_restart(bus: Bus, nats_server) -> None:
    bucket = Bucket(bus, subjects.KV_HOSTS, LeaseOwner)
    await bucket.put("a", LeaseOwner("1"))
    await bucket.put("b", LeaseOwner("1"))

    async with bucket.view() as view, asyncio.timeout(SOON_S):
        assert view.values == {"a": LeaseOwner("1"), "b": LeaseOwner("1")}
        await bucket.put("b", LeaseOwner("1"), ttl_s=1)
        while "b" in view.values:
            await view.changed(1)
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        await bucket.put("a", LeaseOwner("2"))
        while view.values["a"].owner != "2":
            await view.changed(1)


async def test_a_view_made_anew_keeps_a_key_that_comes_after_the_mark(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is written just then is not among the first entries; a heartbeat must not look LOST for it."""

    class Marked:
        marks = 1

        def __init__(self, watcher) -> None:
            self.watcher = watcher

        async def __anext__(self):
            if Marked.marks:
                Marked.marks -= 1
                return None
            return await anext(self.watcher)

        async def stop(self) -> None:
            await self.watcher.stop()

    bucket = Bucket(bus, subjects.KV_HOSTS, LeaseOwner)
    await bucket.put("a", LeaseOwner("1"))
    await bucket.put("b", LeaseOwner("1"))
    async with bucket.view() as view, asyncio.timeout(SOON_S):
        dropped: list[str] = []
        drop = view._drop
        monkeypatch.setattr(view, "_drop", lambda key: (dropped.append(key), drop(key)))
        watchall = KeyValue.watchall

        async def marked(self, **options):
            return Marked(await watchall(self, **options))

        monkeypatch.setattr(KeyValue, "watchall", marked)
        monkeypatch.setattr(view, "_take", lambda entry: None)  # the news that b is gone is lost
        await bucket.delete("b")
        bus.generation += 1
        while "b" in view.values:
            await view.changed(1)
        assert (dropped, view.values) == (["b"], {"a": LeaseOwner("1")})


async def test_lease_is_handed_over_after_expiry(bus: Bus) -> None:
    bucket = Bucket(bus, subjects.KV_LEASES, LeaseOwner)
    # So long that it is no question whether it is over, and then as short as it may be.
    mine, theirs = Lease(bucket, "leader.x", "me", 600), Lease(bucket, "leader.x", "them", 600)
    assert await mine.acquire()
    assert not await theirs.acquire()
    mine.ttl_s = 1
    assert await mine.renew()
    await eventually(theirs.acquire)
    assert theirs.token > mine.token
    assert not await mine.renew()
