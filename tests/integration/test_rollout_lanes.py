"""Executions that go on as several lanes, each in a copy of the trunk's sandbox."""

import asyncio
import contextlib
import functools
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Branching
from opengyre.proto.sandbox import ExecRequest, ExecResult, VerifyRequest, VerifyResult
from opengyre.proto.sandbox_trees import ForkRequest, ForkResult, SnapshotInfo, SnapshotRequest
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check
from opengyre.proto.traj import AnyTrajEvent, Call, Ended, Forked, SandboxOpened, TakenOver, ToolResult, Verified
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared.bus import Bucket, RpcFailedError
from opengyre.trajectory.assemble import assemble
from support import eventually
from support.processes import process
from support.rollout_fakes import FakeHost, Stack, dispatch
from support.sandboxes import needs_sandboxes

SCRIPT = ["echo one > a.txt", "cat a.txt", "cp a.txt b.txt", "done"]
E = TypeVar("E", bound=AnyTrajEvent)


def branching(turn: int = 1, copies: int = 2, **harness: Any) -> EpisodeDispatch:
    return dispatch(branching=Branching(turn=turn, copies=copies), **harness)


def of(kind: type[E], events: Sequence[AnyTrajEvent]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def host(stack: Stack, *, said: dict[int, list[str]] | None = None, delay_s: float = 0.0) -> FakeHost:
    made = stack.host("h0", SCRIPT)
    made.alternatives, made.delay_s = said or {}, delay_s
    return made


async def lived(stack: Stack, episode: EpisodeDispatch, **more: Any) -> list[AnyTrajEvent]:
    async with host(stack, **more).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode), 90)
        await eventually(stack.drained)
    return await stack.log(episode)


def lanes_of(events: Sequence[AnyTrajEvent], kind: type[ToolResult] = ToolResult) -> dict[int | None, list[str]]:
    """Lane -> the commands of its own, in order."""
    found: dict[int | None, list[str]] = {}
    for event in of(kind, events):
        found.setdefault(event.lane, []).append(event.command)
    return found


async def test_lanes_go_on_from_the_trunk_and_are_verified_each(stack: Stack) -> None:
    episode = branching(copies=3)
    events = await lived(stack, episode, said={1: ["cat a.txt", "done", "ls"]})
    [forked] = of(Forked, events)
    assert (forked.turn, forked.copies, forked.snapshot) == (1, 3, f"{episode.execution}-fork")
    assert [event.index for event in events] == list(range(len(events)))
    found = lanes_of(events)
    assert found.pop(None) == SCRIPT[:1]
    assert sorted(found.values()) == [["cat a.txt", "cp a.txt b.txt"], ["ls", "cp a.txt b.txt"]]
    assert {event.lane for event in of(Verified, events)} == {0, 1, 2}
    first = [event for event in of(Call, events) if event.lane is not None and event.prefix_tokens < 40][:3]
    assert len({event.request_digest for event in first}) == 3, "the same request of another lane is another one"
    opened = {event.lane: event.sandbox for event in of(SandboxOpened, events)}
    assert opened[None] == opened[0] == episode.execution
    assert len(set(opened.values())) == 3
    assert stack.sandboxes.destroyed == set(opened.values())
    assert stack.sandboxes.snapshots == {}
    end = events[-1]
    assert isinstance(end, Ended)
    assert (end.reason, end.detail) == ("done", "lane 0 done, lane 1 done, lane 2 done")


async def test_an_execution_that_ends_before_its_fork_has_no_lanes(stack: Stack) -> None:
    events = await lived(stack, branching(turn=2), said={1: ["done"]})
    assert not of(Forked, events)
    assert [event.lane for event in of(Verified, events)] == [None]
    assert stack.sandboxes.snapshots == {}


async def test_turns_are_counted_along_each_lane(stack: Stack) -> None:
    events = await lived(stack, branching(max_turns=3))
    assert {lane: len(commands) for lane, commands in lanes_of(events).items()} == {None: 1, 0: 2, 1: 2}
    assert [event.reason for event in of(Verified, events)] == ["turn_budget"] * 2
    assert len(of(Call, events)) == 5


async def test_the_time_budget_ends_all_lanes_and_what_they_did_is_verified(stack: Stack) -> None:
    run = stack.sandboxes._run

    async def slow(request: ExecRequest) -> ExecResult:
        await asyncio.sleep(600 if request.exec_id.endswith("l1-t1") else 0)
        return await run(request)

    stack.sandboxes._run = slow  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, branching(time_budget_s=4.0))
    assert {event.lane: event.reason for event in of(Verified, events)} == {0: "done", 1: "time_budget"}
    assert all(event.parts for event in of(Verified, events))


async def test_a_lane_waits_for_what_another_one_holds_of_the_token_budget(stack: Stack) -> None:
    """It ended as an agent's error, for having asked while the other one's call was under way."""
    trunk = len(stack.tokenizer.encode(" " + SCRIPT[0])) + 1
    events = await lived(stack, branching(token_budget=trunk + 40, max_tokens=40), delay_s=0.05)
    assert {event.reason for event in of(Verified, events)} <= {"done", "token_budget"}


async def test_lanes_without_a_snapshot_are_made_from_the_log(stack: Stack) -> None:
    stack.sandboxes.keeps = False
    episode = branching()
    events = await lived(stack, episode)
    assert of(Forked, events)[0].snapshot is None
    assert events[-1].reason == "done"  # type: ignore[union-attr]  # the last is the end
    assert stack.sandboxes.ran.count(f"{episode.execution}-t0") == 2, (
        "the trunk's command, once more for the other lane"
    )


async def test_a_lane_that_lost_its_sandbox_does_again_what_led_to_it(stack: Stack) -> None:
    episode = branching()
    sandboxes, run = stack.sandboxes, stack.sandboxes._run
    lost = asyncio.Event()

    async def losing(request: ExecRequest) -> ExecResult:
        if request.exec_id.endswith("l1-t2") and not lost.is_set():
            lost.set()
            sandboxes.live.pop(request.sandbox)
            raise RpcFailedError("sandbox_gone", "its machine has ended")
        return await run(request)

    sandboxes._run = losing  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, episode)
    assert lanes_of(events)[1] == SCRIPT[1:3]
    again = sandboxes.ran[sandboxes.ran.index(f"{episode.execution}-l1-t1") + 1 :]
    assert [name for name in again if "-l0-" not in name] == [
        f"{episode.execution}-t0", f"{episode.execution}-l1-t1", f"{episode.execution}-l1-t2",
    ]  # fmt: skip
    assert [event.infra_error for event in of(Verified, events)] == [None, None]


@pytest.mark.parametrize("lost", [False, True])
async def test_another_writer_continues_every_lane(stack: Stack, *, lost: bool) -> None:
    """Nothing that is in the log is asked or run again, unless its sandbox is gone."""
    episode = branching()
    sandboxes, run = stack.sandboxes, stack.sandboxes._run
    held, go_on = asyncio.Event(), asyncio.Event()

    async def holding(request: ExecRequest) -> ExecResult:
        if request.exec_id.endswith("l0-t2"):
            held.set()
            await go_on.wait()
        return await run(request)

    sandboxes._run = holding  # type: ignore[method-assign]  # a fault is put in from outside
    async with host(stack).up():
        async with stack.service("one"):
            await stack.submit(episode)
            await asyncio.wait_for(held.wait(), 60)
        before = await stack.log(episode)
        if lost:
            sandboxes.lose()
            sandboxes.snapshots.clear()
        go_on.set()
        async with stack.service("two"):
            await eventually(lambda: stack.ended(episode), 60)
    events = await stack.log(episode)
    assert events[: len(before)] == before
    assert len(of(TakenOver, events)) == 1
    assert lanes_of(events) == {None: SCRIPT[:1], 0: SCRIPT[1:3], 1: SCRIPT[1:3]}
    assert len({event.request_digest for event in of(Call, events)}) == len(of(Call, events)) == 7
    assert sorted(event.lane for event in of(Verified, events) if event.lane is not None) == [0, 1]
    assert (sandboxes.ran.count(f"{episode.execution}-t0") > 1) == lost


POINTS = ("snapshot", "fork", "command", "verdict")
"""Where executions stand when their writer is killed: before `Forked` is stored, before a lane has its sandbox, half
way through a lane, with one lane verified."""


class Holding:
    """Stops each execution once, at its point, in what it asks of the sandbox node, until `go_on`."""

    def __init__(self, stack: Stack, points: dict[str, str]) -> None:
        """`points`: execution -> where it is stopped."""
        self.held = {point: asyncio.Event() for point in points.values()}
        self.go_on = asyncio.Event()
        self._points = points
        self._node = stack.sandboxes
        self._answers = (self._node.snapshot, self._node.fork, self._node._run, self._node.verify)
        self._node.snapshot, self._node.fork, self._node._run, self._node.verify = (  # type: ignore[method-assign]  # faults are put in from outside
            self._snapshot, self._fork, self._run, self._verify,
        )  # fmt: skip

    async def _at(self, execution: str, point: str) -> None:
        if self._points[execution] == point and not self.held[point].is_set():
            self.held[point].set()
            await self.go_on.wait()

    async def _snapshot(self, request: SnapshotRequest) -> SnapshotInfo:
        await self._at(request.sandbox, "snapshot")
        return await self._answers[0](request)

    async def _fork(self, request: ForkRequest) -> ForkResult:
        await self._at(request.snapshot.removesuffix("-fork"), "fork")
        return await self._answers[1](request)

    async def _run(self, request: ExecRequest) -> ExecResult:
        execution, _, place = request.exec_id.partition("-l")
        if place == "1-t1":
            await self._at(execution, "command")
        return await self._answers[2](request)

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        execution, _, place = request.verify_id.partition("-l")
        if place.startswith("1"):
            await self._at(execution, "verdict")
        return await self._answers[3](request)


async def serves(stack: Stack, running: subprocess.Popen[bytes]) -> None:
    async with Bucket(stack.bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
        await eventually(lambda: any(s.pid == running.pid and s.ready for s in services.values.values()), 90)


async def test_kill_9_of_the_rollout_service_at_any_point_of_its_lanes(bare: Stack) -> None:
    """The next writer goes on where the log ends, and asks and runs nothing of it again."""
    episodes = {point: dispatch(number=n, branching=Branching(turn=1)) for n, point in enumerate(POINTS)}
    holding = Holding(bare, {episode.execution: point for point, episode in episodes.items()})
    sandboxes = bare.sandboxes
    async with sandboxes.up(), host(bare).up():
        with process(bare, "rollout") as first:
            await serves(bare, first)
            for episode in episodes.values():
                await bare.submit(episode)
            async with asyncio.timeout(90):
                for held in holding.held.values():
                    await held.wait()
            judged = episodes["verdict"]
            scope = subjects.traj(judged.run, judged.group, judged.execution, "verified")
            await eventually(lambda: bare.bus.last(scope, subjects.TRAJ))
            first.kill()
            first.wait(10)
        before = {point: await bare.log(episode) for point, episode in episodes.items()}
        holding.go_on.set()
        with process(bare, "rollout") as second:
            await serves(bare, second)
            for episode in episodes.values():
                await eventually(functools.partial(bare.ended, episode), 120)
            await eventually(bare.drained)
    assert {point: len(of(Forked, log)) for point, log in before.items()} == dict.fromkeys(POINTS, 1) | {"snapshot": 0}
    assert {point: len(of(Verified, log)) for point, log in before.items()} == dict.fromkeys(POINTS, 0) | {"verdict": 1}
    for point, episode in episodes.items():
        events = await bare.log(episode)
        assert events[: len(before[point])] == before[point]
        assert [event.index for event in events] == list(range(len(events)))
        assert (len(of(TakenOver, events)), len(of(Forked, events)), len(of(Ended, events))) == (1, 1, 1)
        assert len({event.request_digest for event in of(Call, events)}) == len(of(Call, events)) == 7
        assert lanes_of(events) == {None: SCRIPT[:1], 0: SCRIPT[1:3], 1: SCRIPT[1:3]}
        assert sorted((event.lane, event.infra_error) for event in of(Verified, events)) == [(0, None), (1, None)]
    assert max(Counter(sandboxes.ran).values()) == 1, "no command twice"
    # What was being made when its writer died is in no log: its lease ends it.
    assert set(sandboxes.live) <= {f"{episodes['fork'].execution}-l1-f0"}
    assert sandboxes.snapshots == {}


async def test_a_lane_that_does_not_exist_is_refused_by_name(stack: Stack) -> None:
    episode = dispatch(agent="program", program="wait")
    stack.sandboxes.delay_s = 600
    async with host(stack).up(), stack.service() as context:
        await stack.submit(episode)
        await eventually(lambda: bool(stack.sandboxes.ran))
        key = Endpoints(load_secret(context.state_dir)).key(episode.execution)
        url = f"{context.url}/x/{episode.execution}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}", "x-gyre-lane": "1"}
        body = {"messages": [{"role": "user", "content": "work"}]}
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
            refusal = await answer.json()
        stack.sandboxes.lose()
    assert (answer.status, refusal["error"]["param"]) == (400, "x-gyre-lane")


@pytest.mark.sandbox
@needs_sandboxes
async def test_what_a_lane_does_no_other_lane_sees(bare: Stack) -> None:
    """With the sandbox service: files, and from them the advantages."""
    episode = branching(max_tokens=200, context_tokens=2000)
    checks = (Check(name="two", command='[ "$(cat a.txt)" = two ] && [ ! -e b.txt ]', weight=1.0),)
    task = msgspec.structs.replace(episode.task, checks=checks)
    episode = msgspec.structs.replace(episode, task=task, advantage="loo")
    with process(bare, "sandbox") as running:
        async with contextlib.AsyncExitStack() as up:
            services = await up.enter_async_context(Bucket(bare.bus, subjects.KV_SERVICES, ServiceStatus).view())
            await eventually(lambda: any(s.pid == running.pid and s.ready for s in services.values.values()), 90)
            said = {1: ["cat a.txt; echo two > a.txt", "cat a.txt; touch b.txt"], 2: ["done"]}
            events = await lived(bare, episode, said=said)
    assert {event.output for event in of(ToolResult, events) if event.lane is not None} == {"one"}
    scores = {event.lane: event.parts[0].value for event in of(Verified, events)}
    assert sorted(scores.values()) == [0.0, 1.0]
    # Beside another member whose lanes got nothing, a lane's tokens have the advantage of what it got itself.
    bare_handed = [other_member(event, episode.members[1]) for event in events]
    (part,) = assemble([*events, *bare_handed])
    assert part.scored.scores == {episode.members[0]: 0.5, episode.members[1]: 0.0}
    assert part.ready is not None
    member = part.ready.members[0]
    spans = [span for sequence in member.sequences for span in sequence.spans]
    own = {(span.weight, member.advantage if span.advantage is None else span.advantage) for span in spans}
    assert own == {(1.0, 0.5), (0.5, 1.0), (0.5, 0.0)}


def other_member(event: AnyTrajEvent, execution: str) -> AnyTrajEvent:
    """The same event of another execution, whose work is worth nothing."""
    if isinstance(event, Verified):
        nothing = tuple(msgspec.structs.replace(part, value=0.0) for part in event.parts)
        return msgspec.structs.replace(event, execution=execution, parts=nothing)
    return msgspec.structs.replace(event, execution=execution)
