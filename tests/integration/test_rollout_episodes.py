"""Episodes through the rollout service, with a real broker, against a scripted host and sandbox."""

import asyncio
from typing import Any

import pytest

from opengyre.proto import subjects
from opengyre.proto.host import HostState
from opengyre.proto.sandbox import ExecRequest, ExecResult
from opengyre.proto.traj import Call, Ended, Resumed, TakenOver, Verified
from opengyre.rollout.journal import Journal
from opengyre.rollout.restore import MOST
from opengyre.shared import metrics
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import FencedError, RpcFailedError
from opengyre.shared.settings import CacheSettings
from opengyre.shared.waits import Waits
from support import eventually
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "done"]
WHOLE = ["Started", "SandboxOpened", "Call", "ToolResult", "Call", "ToolResult", "Call", "Verified", "Ended"]


def kinds(events: list) -> list[str]:
    return [type(event).__name__ for event in events]


def calls(events: list) -> list[Call]:
    return [event for event in events if isinstance(event, Call)]


def assert_scored(events: list) -> None:
    """Kept work is scored, whatever ended the agent."""
    verified = events[-2]
    assert isinstance(verified, Verified)
    assert [part.value for part in verified.parts] == [1.0]
    assert (verified.infra_error, verified.evaluations) == (None, 1)


def end(events: list) -> Ended:
    assert isinstance(events[-1], Ended)
    return events[-1]


async def test_an_episode_from_dispatch_to_end(stack: Stack) -> None:
    episode = dispatch()
    stack.sandboxes.print["cat b.txt"] = "no such file\n"
    async with stack.host("h0", SCRIPT).up() as host, stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
        await eventually(stack.drained)
    events = await stack.log(episode)
    assert kinds(events) == WHOLE
    assert [event.index for event in events] == list(range(9))
    first, second, third = calls(events)
    assert [call.text for call in (first, second, third)] == SCRIPT
    assert second.parent == first.call
    assert third.parent == second.call
    assert third.prefix_tokens == second.prefix_tokens + len(second.prompt_ids) + len(second.sampled_ids)
    # Token in, token out: the host saw exactly what it sampled, and what was observed after it.
    assert host.requests[2]["token_ids"] == [
        *first.prompt_ids, *first.sampled_ids, *second.prompt_ids, *second.sampled_ids, *third.prompt_ids,
    ]  # fmt: skip
    whole = stack.tokenizer.render(
        [
            {"role": "user", "content": "write one into a.txt"},
            {"role": "assistant", "token_ids": first.sampled_ids},
            {"role": "tool", "content": ""},
            {"role": "assistant", "token_ids": second.sampled_ids},
            {"role": "tool", "content": "no such file"},
        ]
    )
    assert host.requests[2]["token_ids"] == whole
    assert (end(events).reason, end(events).turns) == ("done", 3)
    assert stack.sandboxes.destroyed == {episode.execution}


async def test_a_dispatch_that_comes_again_after_the_end_changes_nothing(stack: Stack) -> None:
    episode = dispatch()
    async with stack.host("h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(stack.drained)
        before = await stack.log(episode)
        await stack.submit_again(episode)
        await eventually(stack.drained)
    assert await stack.log(episode) == before
    assert stack.sandboxes.created == {episode.execution: 1}


async def test_a_drain_of_every_host_suspends_and_a_resume_continues(stack: Stack) -> None:
    """The partial tokens, the sandbox and the time budget are kept; the budget is shorter than the suspension."""
    episode = dispatch(time_budget_s=3.0)
    one, two = stack.host("h0", SCRIPT), stack.host("h1", SCRIPT)
    async with one.up(), two.up(), stack.service() as context:
        one.pause_after = two.pause_after = 2
        await stack.submit(episode)
        await eventually(lambda: one.pausing.is_set() or two.pausing.is_set())
        await one.become(HostState.DRAINING)
        await two.become(HostState.DRAINING)
        await eventually(lambda: context.gauges.get("suspended_episodes") == 1)
        assert "a host in the rollout role" in [wait.what for wait in context.waits.report()]
        assert metrics.SUSPENDED_EPISODES._value.get() == 1
        await asyncio.sleep(3.3)
        assert not await stack.ended(episode)
        one.version = 1
        one.pause_after = None
        await one.become(HostState.ROLLOUT)
        await eventually(lambda: stack.ended(episode))
        await eventually(lambda: context.gauges.get("suspended_episodes") == 0)
    events = await stack.log(episode)
    assert kinds(events) == [*WHOLE[:2], "Suspended", "Resumed", *WHOLE[2:]]
    resumed = next(event for event in events if isinstance(event, Resumed))
    assert resumed.waited_s > 3.0
    first = calls(events)[0]
    assert first.text == SCRIPT[0]
    assert first.parked_s > 3.0
    assert first.hosts[-1] == "h0"
    assert len(first.hosts) in {2, 3}, "between the two drains it may have moved"
    assert [span.version for span in first.versions] == [0, 1]
    assert first.versions[0].end == first.versions[1].start > 0
    assert first.versions[1].end == len(first.sampled_ids)
    assert end(events).reason == "done"
    assert stack.sandboxes.created == {episode.execution: 1}
    assert metrics.SUSPENDED_EPISODES._value.get() == 0


async def test_a_call_moves_when_its_host_drains(stack: Stack) -> None:
    episode = dispatch()
    one, two = stack.host("h0", SCRIPT), stack.host("h1", SCRIPT)
    async with one.up(), stack.service():
        one.pause_after = 2
        await stack.submit(episode)
        await eventually(one.pausing.is_set)
        async with two.up():
            await one.become(HostState.DRAINING)
            await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    assert kinds(events) == WHOLE
    first = calls(events)[0]
    assert first.hosts == ("h0", "h1")
    assert first.text == SCRIPT[0]
    moved = two.requests[0]
    said = moved["token_ids"][len(first.prompt_ids) :]
    assert said == list(first.sampled_ids[: len(said)])
    assert said
    assert moved["sampling_params"]["max_tokens"] == one.requests[0]["sampling_params"]["max_tokens"] - len(said)
    assert moved["sampling_params"]["seed"] == one.requests[0]["sampling_params"]["seed"]


async def test_a_host_that_dies_with_a_call_loses_nothing_but_its_part(stack: Stack) -> None:
    """Its heartbeat still says ROLLOUT: the router finds out by the lost connection."""
    episode = dispatch()
    one, two = stack.host("h0", SCRIPT), stack.host("h1", SCRIPT)
    async with stack.service():
        async with one.up():
            one.pause_after = 0
            await stack.submit(episode)
            await eventually(lambda: one.calls)
        async with two.up():
            await eventually(lambda: stack.ended(episode))
    assert [call.hosts for call in calls(await stack.log(episode))] == [("h1",)] * 3


async def test_a_replaced_writer_stops_at_once(stack: Stack) -> None:
    """A rival appends while the command runs: the old writer stores nothing more, verifies and destroys nothing."""
    episode = dispatch()
    run, appended = stack.sandboxes._run, asyncio.Event()

    async def held(request: ExecRequest) -> ExecResult:
        done = await run(request)
        await appended.wait()
        return done

    stack.sandboxes._run = held  # type: ignore[method-assign]  # a fault is put in from outside
    async with stack.host("h0", SCRIPT).up(), stack.service() as context:
        await stack.submit(episode)
        await eventually(lambda: stack.sandboxes.ran)
        events = await stack.log(episode)
        scope = subjects.traj(episode.run, episode.group, episode.execution, ">")
        last = await stack.bus.last(scope, subjects.TRAJ)
        assert last is not None
        rival = TakenOver(
            run=episode.run, group=episode.group, execution=episode.execution, index=len(events), attempt=1, replica="x"
        )
        await stack.bus.append(scope[:-1] + "taken_over", rival, scope=scope, last=last.sequence)
        appended.set()
        await eventually(lambda: context.gauges.get("live_episodes") == 0)
        await asyncio.sleep(1.0)  # given back, it would come again at once and take the log from its new owner
        assert await stack.log(episode) == [*events, rival]
        assert not stack.sandboxes.verified
        assert not stack.sandboxes.destroyed
        assert not await stack.drained(), "its acknowledgement would have counted for the new owner"


async def test_two_replicas_that_begin_at_once_are_one_writer(stack: Stack) -> None:
    """Rivals of the same attempt must not take each other's first append for their own in-doubt one."""
    blobs = Blobs(stack.folder / "blobs", CacheSettings())
    one, two = (Journal(stack.bus, Waits(), dispatch(), blobs) for _ in range(2))
    assert await one.load() == await two.load() == []
    await one.begin("one")
    with pytest.raises(FencedError):
        await two.begin("two")
    three, four = (Journal(stack.bus, Waits(), dispatch(), blobs) for _ in range(2))
    await three.load()
    await four.load()
    await four.begin("four")
    with pytest.raises(FencedError):
        await three.begin("three")
    assert three.fenced.is_set()


async def test_the_time_budget_ends_the_agent_and_the_kept_work_is_scored(stack: Stack) -> None:
    episode = dispatch(time_budget_s=3.0)
    stack.sandboxes.delay_s = 600.0
    async with stack.host("h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    assert kinds(events) == ["Started", "SandboxOpened", "Call", "Verified", "Ended"]
    assert end(events).reason == "time_budget"
    assert 3.0 <= end(events).duration_s < 60.0
    assert_scored(events)


async def test_the_turn_budget_ends_the_agent_after_its_last_command(stack: Stack) -> None:
    episode = dispatch(max_turns=2)
    async with stack.host("h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    assert kinds(events) == [*WHOLE[:6], "Verified", "Ended"]
    assert end(events).reason == "turn_budget"
    assert_scored(events)


async def test_a_full_context_is_an_overflow(stack: Stack) -> None:
    episode = dispatch(context_tokens=36, max_tokens=30)
    async with stack.host("h0", ["echo one > a.txt; cp a.txt b.txt"]).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    assert end(events).reason == "overflow"
    assert_scored(events)


async def test_a_command_that_is_the_end_of_every_sandbox_ends_the_episode_as_infra(stack: Stack) -> None:
    """The sandbox is made again so often and no more."""
    before = metrics.EPISODES_INTERRUPTED._value.get()
    episode = dispatch()
    run = stack.sandboxes._run

    async def deadly(request: ExecRequest) -> ExecResult:
        if request.command == SCRIPT[1]:
            stack.sandboxes.live.pop(request.sandbox)
            raise RpcFailedError("sandbox_gone", f"{request.sandbox} ended")
        return await run(request)

    stack.sandboxes._run = deadly  # type: ignore[method-assign]  # a fault is put in from outside
    async with stack.host("h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    assert end(events).reason == "infra"
    verified = events[-2]
    assert isinstance(verified, Verified)
    assert (verified.parts, verified.evaluations) == ((), 0)
    assert verified.infra_error
    assert metrics.EPISODES_INTERRUPTED._value.get() == before + 1
    assert len(stack.sandboxes.created) == 1 + MOST


@pytest.mark.parametrize(("failures", "fault"), [(2, None), (3, "the check could not be started")])
async def test_a_failed_evaluation_is_tried_again_and_is_never_a_zero(
    stack: Stack, failures: int, fault: str | None
) -> None:
    episode = dispatch()
    stack.sandboxes.invalid_verifications = failures
    async with stack.host("h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    events = await stack.log(episode)
    verified = events[-2]
    assert isinstance(verified, Verified)
    assert verified.infra_error == fault
    assert bool(verified.parts) is (fault is None)
    assert verified.evaluations == 3
    assert stack.sandboxes.modes == ["separate"] * 3
    assert end(events).reason == "done"


async def test_a_restart_of_the_broker_ends_no_episode(stack: Stack, nats_server: Any) -> None:
    episode = dispatch(time_budget_s=60.0)
    host = stack.host("h0", SCRIPT)
    async with host.up(), stack.service():
        host.delay_s = 0.05
        await stack.submit(episode)
        await eventually(lambda: host.calls)
        nats_server.kill()
        await asyncio.sleep(0.5)
        nats_server.start()
        await eventually(stack.drained, 60)
    events = [event for event in await stack.log(episode) if not isinstance(event, TakenOver)]
    assert kinds(events) == WHOLE
    assert len(stack.sandboxes.ran) == 2


async def test_a_stop_gives_the_episode_back_between_events(stack: Stack) -> None:
    """The other replica continues at once, in the same sandbox, and the command that was under way runs once."""
    episode = dispatch()
    stack.sandboxes.delay_s = 0.4
    async with stack.host("h0", SCRIPT).up(), stack.service("two", max_episodes=1) as other:
        blocker = dispatch(number=1)
        async with stack.service("one"):
            await stack.submit(blocker)
            await stack.submit(episode)
            await eventually(lambda: len(stack.sandboxes.ran) == 2)
        stopped = asyncio.get_running_loop().time()
        await eventually(lambda: stack.ended(episode))
        await eventually(stack.drained)
        assert asyncio.get_running_loop().time() - stopped < 12, "it did not wait for the acknowledgement to be overdue"
        assert other.gauges is not None
    for each in (episode, blocker):
        events = await stack.log(each)
        assert kinds([event for event in events if not isinstance(event, TakenOver)]) == WHOLE
    taken = [event for event in [*await stack.log(episode), *await stack.log(blocker)] if isinstance(event, TakenOver)]
    assert taken, "one of them was the first replica's, or both"
    assert {event.replica for event in taken} == {"two"}
    assert len(stack.sandboxes.ran) == len(set(stack.sandboxes.ran)) == 4
    assert max(stack.sandboxes.created.values()) == 1
