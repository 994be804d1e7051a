"""Which host takes a call, what its answer means, and how parts become one completion."""

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.traj import VersionSpan
from opengyre.rollout.balance import OVERLOAD, QUEUE, SLACK, choose, spare, surplus
from opengyre.rollout.engine import (
    NotServedError,
    Part,
    Received,
    RefusedError,
    SamplingParams,
    read_answer,
    read_failure,
)
from opengyre.rollout.router import Completion, Generation, Router, joined
from opengyre.shared.bus import FencedError, View
from opengyre.shared.waits import Waits


def host(name: str, state: HostState = HostState.ROLLOUT, *, running: int = 0, run: str | None = "r") -> HostStatus:
    return HostStatus(
        host=name, cell=name, boot="b", state=state, epoch=1, url="http://x", engine="t", run=run, capacity=4,
        running=running,
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(HostState), st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=8)
)
def test_only_a_serving_host_is_chosen_and_it_is_the_least_loaded(
    hosts: list[tuple[HostState, int, int, bool]],
) -> None:
    statuses = [host(f"h{n}", state, running=running) for n, (state, running, _, _) in enumerate(hosts)]
    ours = {f"h{n}": count for n, (_, _, count, _) in enumerate(hosts)}
    avoided = {f"h{n}" for n, (*_, avoid) in enumerate(hosts) if avoid}
    choice = choose(statuses, "r", ours, avoided)
    usable = [s for s in statuses if s.state is HostState.ROLLOUT and s.host not in avoided]
    open_to_us = [s for s in usable if ours[s.host] < QUEUE * s.capacity]
    assert choice.serving is bool(usable)
    assert (choice.host is not None) is bool(open_to_us)
    if choice.host is not None:
        assert choice.host in open_to_us
        loads = [max(ours[s.host], s.running) for s in open_to_us]
        assert max(ours[choice.host.host], choice.host.running) == min(loads)


def test_a_host_of_another_run_is_no_host() -> None:
    assert choose([host("h0", run="other")], "r", {}).serving is False
    assert choose([host("h0", run=None)], "r", {}).host is not None


def test_the_parents_host_is_preferred_while_it_is_not_busier() -> None:
    hosts = [host("h0"), host("h1")]
    assert choose(hosts, "r", {}, prefer="h1").host == hosts[1]
    assert choose(hosts, "r", {"h1": 3}, prefer="h1").host == hosts[0]


crowds = st.lists(
    st.builds(
        host,
        st.sampled_from([f"h{n}" for n in range(8)]),
        st.sampled_from([HostState.ROLLOUT] * 3 + [HostState.DRAINING, HostState.JOINING]),
        running=st.integers(0, 20),
        run=st.sampled_from(["r", None, "other"]),
    ).flatmap(
        lambda made: st.builds(
            lambda waiting, usage, capacity: msgspec.structs.replace(
                made, waiting=min(waiting, made.running), kv_usage=usage, capacity=capacity
            ),
            st.integers(0, 20),
            st.sampled_from([0.0, 0.5, 0.95]),
            st.sampled_from([1, 4, 20, 40]),
        )
    ),
    max_size=8,
    unique_by=lambda made: made.host,
)


@given(crowds, st.dictionaries(st.sampled_from([f"h{n}" for n in range(8)]), st.integers(0, 20)), st.integers(0, 8))
def test_affinity_costs_no_more_than_its_slack_and_no_queue_grows_beyond_its_bound(
    hosts: list[HostStatus], ours: dict[str, int], preferred: int
) -> None:
    """Laws: whoever is chosen serves this run; it is the least loaded, or preferred and at most `SLACK` busier; and it
    has fewer than `QUEUE` times what it serves at full speed."""
    prefer = f"h{preferred}"

    def load(one: HostStatus) -> float:
        return max(ours.get(one.host, 0), one.running) / one.serves

    open_to_us = [
        one for one in hosts
        if one.state is HostState.ROLLOUT and one.run in ("r", None) and ours.get(one.host, 0) < QUEUE * one.serves
    ]  # fmt: skip
    chosen = choose(hosts, "r", ours, prefer=prefer).host
    assert (chosen is None) == (not open_to_us)
    if chosen is not None:
        assert chosen in open_to_us
        least = min(map(load, open_to_us))
        assert load(chosen) <= least + (SLACK if chosen.host == prefer else 0.0) + 1e-9
        favourite = next((one for one in open_to_us if one.host == prefer), None)
        if favourite is not None and load(favourite) < least + SLACK - 1e-9:
            assert chosen == favourite


@given(crowds, st.dictionaries(st.sampled_from([f"h{n}" for n in range(8)]), st.integers(0, 20)))
def test_who_is_asked_besides_has_room(hosts: list[HostStatus], ours: dict[str, int]) -> None:
    """Law: a call that is asked for twice waits nowhere, and keeps nobody waiting."""
    second = spare(hosts, "r", ours, {"h0"})
    if second is not None:
        assert second.host != "h0"
        assert second.state is HostState.ROLLOUT
        assert max(ours.get(second.host, 0), second.running) < second.serves
    else:
        serving = [one for one in hosts if one.state is HostState.ROLLOUT and one.run in ("r", None)]
        assert not any(
            ours.get(one.host, 0) == one.running == 0 and one.serves == one.capacity
            for one in serving
            if one.host != "h0"
        )


@pytest.mark.parametrize(
    ("running", "waiting", "usage", "serves"),
    [(6, 0, 0.99, 4), (3, 1, 0.99, 2), (3, 1, 0.5, 4), (1, 1, 0.99, 1), (9, 2, 0.99, 4)],
)
def test_a_host_serves_what_it_has_memory_for(running: int, waiting: int, usage: float, serves: float) -> None:
    """Calls that wait where there is memory wait for their prompts to be read."""
    one = msgspec.structs.replace(host("h0", running=running), waiting=waiting, kv_usage=usage)
    assert one.serves == serves


@pytest.mark.parametrize(("ours", "chosen"), [(9, "h1"), (11, "h0")])
def test_affinity_ends_at_its_slack(ours: int, chosen: str) -> None:
    hosts = [msgspec.structs.replace(host(name), capacity=40) for name in ("h0", "h1")]
    found = choose(hosts, "r", {"h1": ours}, prefer="h1").host
    assert found is not None
    assert found.host == chosen


@given(
    st.lists(st.tuples(st.sampled_from(HostState), st.integers(0, 20), st.integers(0, 20)), max_size=8),
    st.integers(1, 6),
)
def test_calls_are_taken_from_overloaded_hosts_only_and_only_where_others_have_room(
    hosts: list[tuple[HostState, int, int]], capacity: int
) -> None:
    statuses = [
        msgspec.structs.replace(host(f"h{n}", state, running=running), capacity=capacity)
        for n, (state, running, _) in enumerate(hosts)
    ]
    ours = {f"h{n}": count for n, (_, _, count) in enumerate(hosts)}
    given_away = surplus(statuses, "r", ours)
    serving = {status.host: status for status in statuses if status.state is HostState.ROLLOUT}
    over = {name for name in serving if ours[name] > OVERLOAD * capacity}
    room = sum(max(0, capacity - max(ours[s.host], s.running)) for s in serving.values() if s.host not in over)
    wanted = sum(ours[name] - capacity for name in over)
    assert given_away.keys() <= over
    assert all(0 < count <= ours[name] - capacity for name, count in given_away.items())
    assert sum(given_away.values()) == min(room, wanted)
    # What is given away finds its place, after which nothing more is to be done.
    after = ours | {name: ours[name] - count for name, count in given_away.items()}
    assert surplus([s for s in serving.values() if s.host in given_away], "r", after) == {}


def test_the_most_overloaded_host_gives_first() -> None:
    statuses = [host("h0"), host("h1"), host("h2")]
    assert surplus(statuses, "r", {"h0": 9, "h1": 14, "h2": 0}) == {"h1": 4}
    assert surplus(statuses, "other", {"h0": 9, "h1": 14, "h2": 0}) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(5, 9), max_size=5)), min_size=1, max_size=5))
def test_parts_of_hosts_make_one_completion(parts: list[tuple[int, list[int]]]) -> None:
    """Law: tokens and log-probs are the parts' one after the other, and the spans cover them with their versions."""
    done = Completion()
    expected: list[tuple[int, int]] = []
    for number, (version, tokens) in enumerate(parts):
        spans = (VersionSpan(version=version, start=0, end=len(tokens)),)
        part = Part(tuple(tokens), tuple(float(-t) for t in tokens), spans, "abort")
        done = joined(done, part, f"h{number}", 1000, (1,))
        expected += [(token, version) for token in tokens]
    assert list(done.tokens) == [token for token, _ in expected]
    assert list(done.logprobs) == [float(-token) for token, _ in expected]
    covered = [span.version for span in done.versions for _ in range(span.start, span.end)]
    assert covered == [version for _, version in expected]
    assert all(a.version != b.version and a.end == b.start for a, b in itertools.pairwise(done.versions))
    assert done.finish == "abort"
    assert len(done.hosts) == sum(bool(tokens) for _, tokens in parts)


@pytest.mark.parametrize(
    ("tokens", "limit", "finish"), [((5, 1), 10, "stop"), ((5, 6), 2, "length"), ((5, 6), 3, "abort")]
)
def test_a_part_that_was_stopped_where_it_ended_has_ended(tokens: tuple[int, ...], limit: int, finish: str) -> None:
    part = Part(tokens, (0.0,) * len(tokens), (), "abort")
    assert joined(Completion(), part, "h", limit, (1,)).finish == finish


def body(**more: object) -> bytes:
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token": "token_id:5", "logprob": -1}, {"token": "token_id:6", "logprob": -2}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return json.dumps({"id": "x", "choices": [{**choice, **more}]}).encode()


def test_an_answer_in_vllms_shape() -> None:
    part = read_answer(body())
    assert part == Part((5, 6), (-1.0, -2.0), (VersionSpan(version=3, start=0, end=2),), "stop")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"choices": []}',
        body(token_ids=[5]),
        body(logprobs=None),
        body(weight_versions=[]),
        body(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
        body(weight_versions=[{"version": "new", "start": 0, "end": 2}]),
        body(finish_reason="tired"),
    ],
)
def test_an_answer_that_cannot_be_is_no_answer(answer: bytes) -> None:
    with pytest.raises(NotServedError):
        read_answer(answer)


@pytest.mark.parametrize(
    ("status", "answer", "kind", "draining"),
    [
        (503, b'{"error": {"type": "not_serving", "message": "drains"}}', NotServedError, True),
        (503, b"upstream", NotServedError, False),
        (429, b'{"error": "busy"}', NotServedError, False),
        (400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}', RefusedError, False),
    ],
)
def test_what_a_failure_means(status: int, answer: bytes, kind: type, draining: bool) -> None:
    error = read_failure(status, answer)
    assert type(error) is kind
    assert str(error)
    assert getattr(error, "draining", False) is draining


def event(tokens: list[int], spans: list[tuple[int, int, int]], finish: str | None = None, **more: object) -> bytes:
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -token} for token in tokens]},
        "finish_reason": finish,
        "weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in spans],
        **more,
    }
    return json.dumps({"request_id": "a", "choices": [choice]}).encode()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6), st.integers(0, 6))
def test_what_came_of_a_completion_before_its_host_was_lost_is_its_beginning(
    increments: list[tuple[int, int]], kept: int
) -> None:
    """Law: after any number of events there is exactly what they said, and the listener has heard it once."""
    heard: list[int] = []
    received = Received(lambda tokens, _: heard.extend(tokens) or False)
    expected: list[tuple[int, int]] = []
    for count, version in increments[:kept]:
        at = len(expected)
        received.take(event(list(range(at, at + count)), [(version, at, at + count)]))
        expected += [(at + n, version) for n in range(count)]
    part = received.part()
    assert part.finish == "abort"
    assert list(part.tokens) == [token for token, _ in expected] == heard
    assert list(part.logprobs) == [-token for token in heard]
    covered = [span.version for span in part.versions for _ in range(span.start, span.end)]
    assert covered == [version for _, version in expected]


def test_vllms_stream_gives_the_versions_at_its_end_and_counts_from_then_on() -> None:
    heard: list[int] = []
    received = Received(lambda tokens, _: heard.extend(tokens) or False)
    received.take(event([5, 6], []))
    assert received.part().tokens == ()
    received.take(event([7], [(3, 0, 1), (4, 1, 3)], "stop"))
    assert received.part().tokens == (5, 6, 7) == tuple(heard)
    assert received.ended


@pytest.mark.parametrize(
    "events",
    [
        [b""],
        [b'{"choices": []}'],
        [b'{"error": {"message": "the engine is closed", "type": "engine_failed"}}'],
        [event([5], [(1, 0, 2)])],
        [event([5, 6], [(1, 1, 2)])],
        [event([5], [(1, 0, 1)]), event([6], [(1, 2, 3)])],
        [event([5], [(1, 0, 1)], logprobs={"content": []})],
        [event([5, 6], [(1, 0, 1)], "stop")],
        [event([5], [(1, 0, 1)], "stop"), event([6], [(1, 1, 2)])],
        [event([5], [("x", 0, 1)])],  # type: ignore[list-item]  # what no host of ours says
    ],
)
def test_an_event_that_cannot_be_ends_the_answer(events: list[bytes]) -> None:
    received = Received()
    for one in events[:-1]:
        received.take(one)
    with pytest.raises(NotServedError):
        received.take(events[-1])


def test_an_event_that_refuses_the_request_is_a_refusal() -> None:
    """A host that refuses once it has begun to answer was asked again, and so was each other one."""
    with pytest.raises(RefusedError, match="too long"):
        Received().take(b'{"error": {"message": "too long", "type": "invalid_request", "code": 400}}')


class Parked:
    """An execution whose log refuses that it goes on, or never answers."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.parked, self.going_on = asyncio.Event(), asyncio.Event()

    async def park(self) -> None:
        self.parked.set()

    async def unpark(self, waited_s: float) -> None:
        assert waited_s > 0
        self.going_on.set()
        if self.refuses:
            raise FencedError("another writer appended first")
        await asyncio.Event().wait()

    def forsake(self) -> None:
        raise AssertionError("who unparks has done that")


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_call_that_ends_while_it_is_unparked_gives_its_place_back(refuses: bool) -> None:
    """Each kept one of the host's places from all calls of its replica, for as long as that lived."""
    hosts: View[HostStatus] = View(_no_bus, "hosts", msgspec.json.Decoder(HostStatus))
    runs: View[RunSpec] = View(_no_bus, "runs", msgspec.json.Decoder(RunSpec))
    router = Router(hosts, runs, _no_session, Waits(), 1.0)
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=1, stop_token_ids=())
    parking = Parked(refuses=refuses)
    calling = asyncio.create_task(router.complete(Generation("q", "r", (1,), params), parking))
    await parking.parked.wait()
    hosts.learn("h0", host("h0"), 1)
    await parking.going_on.wait()
    if not refuses:
        calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled() or isinstance(calling.exception(), FencedError)
    assert router.calls_in_flight == 0


_no_bus: Any = None
_no_session: Any = None
