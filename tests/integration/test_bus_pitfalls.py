"""Behaviours of NATS and nats-py that break a long-running service; each has its answer in the bus."""

import asyncio
import contextlib
import signal

import msgspec
import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.examples import DISPATCH
from opengyre.proto.service import Empty
from opengyre.proto.task import TaskSubmitted
from opengyre.shared.bus import (
    Bucket,
    Bus,
    BusError,
    BusUnavailableError,
    Delivery,
    DriftError,
    Lease,
    LeaseOwner,
    NotBootstrappedError,
    Rejected,
    RetryLater,
    RpcUnavailableError,
    TooLargeError,
    bootstrap,
    call,
    pulling,
    read,
    topology,
    work,
)
from opengyre.shared.bus.promptly import promptly
from support import eventually

QUEUE = subjects.episode_dispatch("demo")
SOON_S = 60.0
"""A bound for what comes in a moment, unless the machine is busy."""


def dispatch(number: int) -> EpisodeDispatch:
    return msgspec.structs.replace(DISPATCH, execution=f"demo-g000000-e{number:02d}")


async def ack_wait(bus: Bus, seconds: int) -> None:
    """Of dispatches, from now on."""
    config = next(config for stream, config in topology.consumers() if stream == subjects.EPISODES)
    await bus.js.add_consumer(subjects.EPISODES, config.evolve(ack_wait=seconds))


async def test_pitfall_01_a_publish_during_an_outage_is_stored_once(bus: Bus, nats_server) -> None:
    await asyncio.to_thread(nats_server.kill)
    publishing = asyncio.create_task(bus.publish(QUEUE, dispatch(1), attempts=20))
    await eventually(lambda: not bus.connected)
    await asyncio.to_thread(nats_server.start)
    await asyncio.wait_for(publishing, SOON_S)
    assert (await bus.stream_info(subjects.EPISODES)).state.messages == 1


async def test_pitfall_03_cancellation_reaches_a_publisher_of_a_frozen_server(bus: Bus, nats_server) -> None:
    nats_server.signal(signal.SIGSTOP)
    try:
        task = asyncio.create_task(bus.publish(QUEUE, dispatch(1)))
        await asyncio.sleep(0.1)  # it is waiting for an acknowledgement that cannot come
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=SOON_S)
        assert done
        assert task.cancelled()
    finally:
        nats_server.signal(signal.SIGCONT)


async def test_an_answer_to_a_flush_that_was_given_up_ends_no_reader(bus: Bus, nats_server) -> None:
    """nats-py gave that answer to the one who had left, and its reader ended of it: the process heard nothing more
    until its connection was given up for dead, half a minute later."""
    async with pulling(bus, *subjects.ROLLOUT_EPISODES):
        nats_server.signal(signal.SIGSTOP)
    try:  # that was closed without an answer to its flush
        assert not await bus.round_trip(0.05)
    finally:
        nats_server.signal(signal.SIGCONT)
    generation = bus.generation
    # By the same connection: the answers came before this one.
    assert await bus.stream_info(subjects.EPISODES)
    assert await bus.round_trip(SOON_S)
    assert bus.generation == generation


async def test_promptly_leaves_although_the_inner_call_swallows_its_cancellation() -> None:
    stuck = asyncio.Event()

    async def swallows() -> None:
        try:
            await stuck.wait()
        except asyncio.CancelledError:
            await stuck.wait()

    task = asyncio.create_task(promptly(swallows()))
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=SOON_S)
    assert done
    stuck.set()


async def test_pitfall_04_a_message_after_a_restart_arrives_within_seconds(bus: Bus, nats_server) -> None:
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as puller:
        taking = asyncio.create_task(puller.take())
        await asyncio.sleep(0.2)  # the pull request is on the server
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        await bus.publish(QUEUE, dispatch(1))
        # A pull request dies with its server, and waits for 5 s at most.
        async with asyncio.timeout(25):
            got = await taking
            while got is None:
                got = await puller.take()


async def test_pitfall_05_what_a_cancelled_worker_had_is_given_back(bus: Bus) -> None:
    """Else it came again only after its ack wait."""
    await ack_wait(bus, 300)
    stop, begun = asyncio.Event(), 0

    async def handle(event: Event, delivery: Delivery) -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    for number in range(20):
        await bus.publish(QUEUE, dispatch(number))
    working = asyncio.create_task(work(bus, *subjects.ROLLOUT_EPISODES, handle, stop=stop, concurrency=20))
    await eventually(lambda: begun == 20)
    working.cancel()
    await asyncio.wait([working])
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as other, asyncio.timeout(SOON_S):
        taken = 0
        while taken < 20:
            if (delivery := await other.take()) is not None:
                await delivery.ack()
                taken += 1


async def test_pitfall_05_a_stopped_worker_leaves_no_pull_request_behind(bus: Bus) -> None:
    """Else the message went to that, and came again only after its ack wait."""
    await ack_wait(bus, 300)
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as first:
        taking = asyncio.create_task(first.take())
        await asyncio.sleep(0.2)  # the pull request is on the server
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await taking
    await bus.publish(QUEUE, dispatch(1))
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as second, asyncio.timeout(SOON_S):
        while await second.take() is None:
            pass


async def test_pitfall_05_what_a_cancelled_take_still_waits_for_is_the_next_takes(bus: Bus) -> None:
    """Else the message went to a request that nobody looks at, and came again only after its ack wait."""
    await ack_wait(bus, 300)
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as puller:
        taking = asyncio.create_task(puller.take())
        await asyncio.sleep(0.2)  # the pull request is on the server
        taking.cancel()
        await asyncio.wait([taking])
        await bus.publish(QUEUE, dispatch(1))
        async with asyncio.timeout(SOON_S):
            while await puller.take() is None:
                pass


async def test_pitfall_05_a_fetch_that_has_failed_is_not_what_the_next_take_waits_for(bus: Bus) -> None:
    """Each further one would fail of it."""
    async with pulling(bus, *subjects.ROLLOUT_EPISODES) as puller:
        puller._fetching = asyncio.create_task(asyncio.sleep(600, []))
        puller._fetching.cancel()
        await asyncio.wait([puller._fetching])
        await bus.publish(QUEUE, dispatch(1))
        async with asyncio.timeout(SOON_S):
            while await puller.take() is None:
                pass


async def test_pitfall_09_a_message_that_fits_only_without_its_headers_is_refused_here(bus: Bus) -> None:
    payload = b"x" * (bus.client.max_payload - 10)
    with pytest.raises(TooLargeError, match="blob"):
        await bus.publish_raw(QUEUE, payload, "id", "x")
    await bus.publish(QUEUE, dispatch(1))
    assert not bus.lost.is_set()


async def test_a_question_during_an_outage_is_answered_when_the_server_is_back(bus: Bus, nats_server) -> None:
    await bus.publish(QUEUE, dispatch(1))
    await asyncio.to_thread(nats_server.kill)
    await eventually(lambda: not bus.connected)
    asking = asyncio.create_task(bus.last(QUEUE))
    await asyncio.to_thread(nats_server.start)
    found = await asyncio.wait_for(asking, SOON_S)
    assert found is not None
    assert found.event() == dispatch(1)


async def test_pitfall_22_a_long_handler_keeps_its_message(bus: Bus) -> None:
    """With an ack wait of 4 s and a beat every 0.3 s, a handler of 6 s is not disturbed by a second delivery."""
    await ack_wait(bus, 4)
    stop, calls = asyncio.Event(), 0

    async def handler(_event: object, _delivery: object) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(6)
        stop.set()

    await bus.publish(QUEUE, dispatch(1))
    await asyncio.wait_for(
        work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop, concurrency=4, keep_every_s=0.3), SOON_S
    )
    assert calls == 1


async def test_pitfall_23_a_message_that_always_fails_becomes_a_dead_letter(bus: Bus) -> None:
    stop = asyncio.Event()

    async def handler(_event: object, delivery) -> None:
        if delivery.deliveries == 2:
            stop.set()
        raise ValueError("always")

    await bus.publish(QUEUE, dispatch(1))
    working = work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop, max_deliver=2)
    await asyncio.wait_for(working, SOON_S)
    (letter,) = await read(bus, subjects.DLQ, "gyre.v1.dlq.EPISODES.rollout")
    assert "always" in letter.payload.decode()

    async def settled() -> bool:  # the broker has a verdict before it has acted on it
        return (await bus.stream_info(subjects.EPISODES)).state.messages == 0

    await eventually(settled)


async def test_a_verdict_that_cannot_be_told_ends_no_other_message(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the broker's absence at one rejection would cancel every episode of a replica."""
    stop, untold, ended = asyncio.Event(), asyncio.Event(), []

    async def handler(event: object, _delivery: object) -> None:
        if event == dispatch(1):
            raise Rejected("no use")
        await untold.wait()
        ended.append(event)
        stop.set()

    async def reject(_self: object, _reason: str) -> None:
        untold.set()
        raise BusUnavailableError("NATS does not answer")

    monkeypatch.setattr(Delivery, "reject", reject)
    await bus.publish(QUEUE, dispatch(2))
    await bus.publish(QUEUE, dispatch(1))
    await asyncio.wait_for(work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop, concurrency=2), SOON_S)
    assert ended == [dispatch(2)]

    async def one_is_left() -> bool:
        return (await bus.stream_info(subjects.EPISODES)).state.messages == 1

    await eventually(one_is_left)


async def test_giving_a_message_back_is_no_failure(bus: Bus) -> None:
    stop, deliveries = asyncio.Event(), []

    async def handler(_event: object, delivery) -> None:
        deliveries.append(delivery.deliveries)
        if len(deliveries) < 6:
            raise RetryLater("not yet", 0.01)
        if len(deliveries) == 6:
            raise ValueError("the first failure")
        stop.set()

    await bus.publish(QUEUE, dispatch(1))
    await asyncio.wait_for(work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop, max_deliver=2), SOON_S)
    assert deliveries == [1, 2, 3, 4, 5, 6, 7]
    assert await read(bus, subjects.DLQ, "gyre.v1.dlq.>") == []


async def test_garbage_becomes_a_dead_letter_and_stops_nothing(bus: Bus) -> None:
    stop, seen = asyncio.Event(), []

    async def handler(event: object, _delivery: object) -> None:
        seen.append(event)
        stop.set()

    await bus.publish_raw(QUEUE, b"\xff\x00" * 100, "garbage", "episode.dispatch.v1")
    await bus.publish(QUEUE, dispatch(1))
    await asyncio.wait_for(work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop), SOON_S)
    assert seen == [dispatch(1)]
    (letter,) = await read(bus, subjects.DLQ, "gyre.v1.dlq.>")
    assert "undecodable" in letter.payload.decode()


async def test_pitfall_27_a_changed_definition_fails_the_bootstrap(bus: Bus) -> None:
    config = next(c for stream, c in topology.consumers() if stream == subjects.GROUPS)
    config.ack_wait = 99
    await bus.js.add_consumer(subjects.GROUPS, config)
    with pytest.raises(DriftError, match="ack_wait"):
        await bootstrap(bus)


async def never(_event: Event, _delivery: Delivery) -> None:
    raise AssertionError("there is no message")


async def test_binding_before_the_bootstrap_says_so(nats_server) -> None:
    async with Bus(nats_server.url, "early") as early:
        with pytest.raises(NotBootstrappedError, match="bootstrap"):
            async with pulling(early, *subjects.ROLLOUT_EPISODES):
                pass
        for concurrency in (1, 64):
            with pytest.raises(NotBootstrappedError, match="bootstrap"):
                await work(early, *subjects.ROLLOUT_EPISODES, never, stop=asyncio.Event(), concurrency=concurrency)
        with pytest.raises(NotBootstrappedError, match="bootstrap"):
            await Bucket(early, subjects.KV_RUNS, LeaseOwner).put("k", LeaseOwner("a"))


@pytest.mark.parametrize("stall_s", [0.05, 1.3])
async def test_a_mirror_is_whole_although_the_clients_mark_comes_first(bus: Bus, monkeypatch, stall_s: float) -> None:
    """Seen under load: the client marks a watch as complete before it has given the first entry. And where nothing came
    for half a second, by a stall of the broker or of the process itself, the mirror was given out empty."""
    bucket = Bucket(bus, subjects.KV_RUNS, LeaseOwner)
    for number in range(50):
        await bucket.put(f"k{number}", LeaseOwner(str(number)))
    watch = KeyValue.watchall

    async def marked_first(self: KeyValue, **options: object) -> KeyValue.KeyWatcher:
        early = KeyValue.KeyWatcher(self)
        early._updates.put_nowait(None)
        real = await watch(self, **options)

        async def forward() -> None:
            await asyncio.sleep(stall_s)
            async for entry in real:
                await early._updates.put(entry)

        early._sub = real._sub
        early._forward = asyncio.create_task(forward())  # type: ignore[attr-defined]  # a fault is put in from outside
        return early

    monkeypatch.setattr(KeyValue, "watchall", marked_first)
    async with bucket.view() as view:
        assert len(view.values) == 50


async def test_a_mirror_is_made_although_the_client_stalls_in_the_midst_of_it(bus: Bus, monkeypatch) -> None:
    """The first entry waits in the client for the description of its consumer, for 5 s, and withdraws what both share.
    A process that was stopped just then ended of it, as none of the bus's faults."""
    bucket = Bucket(bus, subjects.KV_HOSTS, LeaseOwner)
    await bucket.put("a", LeaseOwner("1"))
    ask, stalls = JetStreamContext.PushSubscription.consumer_info, 1

    async def late(subscription: JetStreamContext.PushSubscription) -> object:
        nonlocal stalls
        if stalls:
            stalls = 0
            await eventually(lambda: subscription.delivered)
            await asyncio.sleep(2 * bus.js._timeout)
        return await ask(subscription)

    monkeypatch.setattr(JetStreamContext.PushSubscription, "consumer_info", late)
    monkeypatch.setattr(bus.js, "_timeout", 1.0)
    async with bucket.view() as view:
        assert view.values == {"a": LeaseOwner("1")}
    assert not stalls


async def test_who_gives_up_a_lease_does_not_wait_long_for_a_frozen_server(bus: Bus, nats_server) -> None:
    """What is given up is over anyway: it held those up who had waited for as long as they may, for a minute more."""
    lease = Lease(Bucket(bus, subjects.KV_LEASES, LeaseOwner), "leader.x", "me", 600)
    assert await lease.acquire()
    nats_server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            await lease.release()
    finally:
        nats_server.signal(signal.SIGCONT)


async def test_a_call_that_nobody_answers_ends_within_its_patience(bus: Bus) -> None:
    with pytest.raises(RpcUnavailableError, match="trainer"):
        # Before the patience that a call has by itself is over.
        async with asyncio.timeout(25):
            await call(bus, "trainer", "any", "pull", Empty(), Empty, timeout_s=0.2, patience_s=0.5)


async def test_following_a_work_queue_is_refused_and_does_not_hang(bus: Bus) -> None:
    await bus.publish(QUEUE, dispatch(1))
    with pytest.raises(BusError, match="EPISODES cannot be read this way"):
        await asyncio.wait_for(read(bus, subjects.EPISODES, QUEUE), SOON_S)


async def test_acknowledged_events_survive_kill_9_of_the_server(bus: Bus, nats_server) -> None:
    events = [TaskSubmitted(run="demo", task=f"t{n}", spec=DISPATCH.task) for n in range(50)]
    stored = [await bus.publish(subjects.task("demo", event.task, "submitted"), event) for event in events]
    await asyncio.to_thread(nats_server.kill)
    await asyncio.to_thread(nats_server.start)
    assert await bus.round_trip(SOON_S)
    found = [message.sequence for message in await read(bus, subjects.TASKS, "gyre.v1.task.demo.>")]
    assert found == stored
