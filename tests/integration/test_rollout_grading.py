"""How work is evaluated: at the end, along the way, by whichever writer; and what becomes of what is given up."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.base import tag_of
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Scoring
from opengyre.proto.sandbox import ExecRequest, ExecResult, VerifyRequest, VerifyResult
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check
from opengyre.proto.traj import (
    AnyTrajEvent,
    Call,
    Ended,
    Progressed,
    SandboxOpened,
    Started,
    TakenOver,
    ToolResult,
    Verified,
)
from opengyre.rollout import grading
from opengyre.rollout import service as rollout
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.rollout.runner import Runner
from opengyre.sandbox import machine
from opengyre.sandbox.clear import clear
from opengyre.shared.bus import Bucket, RpcFailedError, read
from opengyre.trajectory.assemble import assemble
from support import eventually
from support.processes import process
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "cp a.txt b.txt", "done"]
PROGRAM_AGENT = """
import json, os, subprocess, urllib.request
background = subprocess.Popen(["sleep", "1000"])
messages = [{"role": "user", "content": "work"}]
while True:
    body = json.dumps({"model": os.environ["GYRE_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    if messages[-1]["content"] == "done":
        break
    subprocess.run(messages[-1]["content"], shell=True)
    messages.append({"role": "tool", "content": "ok"})
print("kept going" if background.poll() is None else "was stopped")
"""
E = TypeVar("E", bound=AnyTrajEvent)
real = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]


def scored(scoring: Scoring, **harness: object) -> EpisodeDispatch:
    return msgspec.structs.replace(dispatch(**harness), scoring=scoring)  # type: ignore[arg-type]  # fields by keyword, checked at run time


def kinds(events: Sequence[object]) -> list[str]:
    return [type(event).__name__ for event in events]


def of(kind: type[E], events: list[AnyTrajEvent]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def end(events: list[AnyTrajEvent]) -> Ended:
    assert isinstance(events[-1], Ended)
    return events[-1]


async def lived(stack: Stack, episode: EpisodeDispatch, script: list[str] | None = None) -> list[AnyTrajEvent]:
    """The log of an episode, from dispatch to end."""
    async with stack.host("h0", script or SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode), 90)
        await eventually(stack.drained)
    return await stack.log(episode)


async def test_progress_is_measured_at_the_start_and_after_every_kth_turn(stack: Stack) -> None:
    episode = scored(Scoring(progress_every=2), max_turns=6)
    events = await lived(stack, episode)
    assert kinds(events) == [
        "Started", "SandboxOpened", "Progressed", "Call", "ToolResult", "Call", "ToolResult", "Progressed", "Call",
        "ToolResult", "Call", "Verified", "Ended",
    ]  # fmt: skip
    assert [event.index for event in events] == list(range(len(events)))
    first, second = of(Progressed, events)
    assert (first.turn, first.call) == (0, None)
    assert (second.turn, second.call) == (2, of(Call, events)[1].call)
    assert [part.value for part in second.parts] == [1.0]
    assert stack.sandboxes.modes == ["live", "live", "separate"]
    assert stack.sandboxes.evaluations == [f"{episode.execution}-{name}" for name in ("p0", "p2", "v0")]


async def test_progress_is_no_time_of_the_agents_and_its_failure_ends_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement takes longer than the agent may; they fail, one by its bound."""
    monkeypatch.setattr(grading, "PROGRESS_MARGIN_S", 0.0)
    episode = scored(Scoring(progress_every=1), max_turns=3, time_budget_s=2.0, command_timeout_s=4.0)
    verify, over = stack.sandboxes.verify, asyncio.Event()

    async def slow(request: VerifyRequest) -> VerifyResult:
        if request.mode == "live":
            if request.verify_id.endswith("p1"):
                await over.wait()
            await asyncio.sleep(2.1)
            raise RpcFailedError("infra_error", "no memory is left")
        return await verify(request)

    stack.sandboxes.verify = slow  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, episode)
    over.set()
    measured = of(Progressed, events)
    assert [event.turn for event in measured] == [0, 1, 2]
    assert all(event.parts == () for event in measured)
    assert ["within" in (event.infra_error or "") for event in measured] == [False, True, False]
    assert all(event.duration_s >= 2.0 for event in measured)
    assert end(events).reason == "turn_budget", "time was not spent by it"
    assert end(events).duration_s < 2.0
    assert of(Verified, events)[0].infra_error is None


async def test_a_writer_that_takes_over_does_not_measure_again(stack: Stack) -> None:
    episode = scored(Scoring(progress_every=1), max_turns=6)
    stack.sandboxes.delay_s = 0.3
    async with stack.host("h0", SCRIPT).up():
        async with stack.service("one"):
            await stack.submit(episode)
            await eventually(lambda: len(stack.sandboxes.ran) == 2)
        async with stack.service("two"):
            await eventually(lambda: stack.ended(episode), 60)
    events = await stack.log(episode)
    assert of(TakenOver, events)
    assert [event.turn for event in of(Progressed, events)] == [0, 1, 2, 3]
    evaluated = stack.sandboxes.evaluations
    assert len(evaluated) == len(set(evaluated)) == 5


async def test_the_choices_of_one_request_are_measured_before_once(stack: Stack) -> None:
    """They begin together; only the first waits for a measurement of its own."""
    gate = asyncio.Event()
    verify = stack.sandboxes.verify

    async def held(request: VerifyRequest) -> VerifyResult:
        await gate.wait()
        return await verify(request)

    stack.sandboxes.verify = held  # type: ignore[method-assign]  # a fault is put in from outside
    episode = scored(Scoring(progress_every=1), agent="program", program="work", max_turns=6)
    stack.sandboxes.delay_s = 60.0
    async with stack.host("h0", SCRIPT).up(), stack.service() as context:
        await stack.submit(episode)
        await eventually(lambda: stack.sandboxes.ran)
        started = of(Started, await stack.log(episode))[0]
        url, key = key_of(context, episode)
        body = {"model": "r", "messages": [{"role": "user", "content": "write"}], "n": 3}
        asking = asyncio.create_task(post(url, key, body))
        await eventually(lambda: any("sandbox service (verify)" in w.what for w in context.waits.report()))
        gate.set()
        assert len((await asking)["choices"]) == 3
        events = await stack.log(episode)
    assert started.dispatch.scoring == episode.scoring
    assert kinds(events[2:]) == ["Progressed", "Call", "Call", "Call"]


def key_of(context: Any, episode: EpisodeDispatch) -> tuple[str, str]:
    """Address and key of an execution's endpoint, as its program has them."""
    endpoints = Endpoints(load_secret(context.state_dir))
    return f"{context.url}/x/{episode.execution}/v1/chat/completions", endpoints.key(episode.execution)


async def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        return await answer.json()


async def test_a_failed_evaluation_counts_for_all_writers_together(stack: Stack) -> None:
    """The one that takes over asks under the ids of the one before, and gets its failures from the record."""
    episode = scored(Scoring(attempts=2))
    recorded: dict[str, int] = {}
    begun, over = asyncio.Event(), asyncio.Event()

    async def failing(request: VerifyRequest) -> VerifyResult:
        recorded[request.verify_id] = recorded.get(request.verify_id, 0) + 1
        if request.verify_id.endswith("v1") and not begun.is_set():
            begun.set()
            await over.wait()
        return VerifyResult(
            verify_id=request.verify_id, parts=(), passed=0, total=1, valid=False, infra_error="it was killed"
        )

    stack.sandboxes.verify = failing  # type: ignore[method-assign]  # a fault is put in from outside
    async with stack.host("h0", SCRIPT).up():
        async with stack.service("one"):
            await stack.submit(episode)
            await asyncio.wait_for(begun.wait(), 60)
        async with stack.service("two"):
            await eventually(lambda: stack.ended(episode), 60)
    over.set()
    events = await stack.log(episode)
    assert recorded == {f"{episode.execution}-v0": 2, f"{episode.execution}-v1": 2}
    verified = of(Verified, events)[0]
    assert (verified.infra_error, verified.evaluations, verified.parts) == ("it was killed", 2, ())
    assert end(events).reason == "done", "the agent's end is not ours"


async def test_a_check_that_is_refused_is_not_evaluated_again(stack: Stack) -> None:
    asked: list[str] = []

    async def refusing(request: VerifyRequest) -> VerifyResult:
        asked.append(request.verify_id)
        raise RpcFailedError("invalid_request", "mode is 'separate'; allowed is 'shared' on n0")

    stack.sandboxes.verify = refusing  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, scored(Scoring(attempts=9)))
    verified = of(Verified, events)[0]
    assert (verified.infra_error, verified.evaluations) == ("mode is 'separate'; allowed is 'shared' on n0", 1)
    assert len(asked) == 1


async def test_work_kept_at_an_error_of_the_agent_is_scored(stack: Stack) -> None:
    """As at every other end of it."""
    run = stack.sandboxes._run

    async def failing(request: ExecRequest) -> ExecResult:
        return msgspec.structs.replace(await run(request), exit_code=3)

    stack.sandboxes._run = failing  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, scored(Scoring(grading="shared"), agent="program", program="fail"))
    assert end(events).reason == "agent_error"
    assert [part.value for part in of(Verified, events)[0].parts] == [1.0]
    assert stack.sandboxes.modes == ["shared"]


@pytest.mark.parametrize("kind", ["sandbox_gone", "infra_error"])
async def test_a_sandbox_lost_under_its_writer_is_made_again(stack: Stack, kind: str) -> None:
    """Those commands that were recorded are repeated, and the episode goes on; one that is there but cannot run
    commands is not left to its lease."""
    episode = scored(Scoring())
    sandboxes = stack.sandboxes
    run = sandboxes._run

    async def losing(request: ExecRequest) -> ExecResult:
        if request.exec_id.endswith("t1") and request.sandbox == episode.execution:
            sandboxes._execs.clear()
            raise RpcFailedError(kind, "its machine has ended, or cannot start a process")
        return await run(request)

    sandboxes._run = losing  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, episode)
    assert kinds(events) == [
        "Started", "SandboxOpened", "Call", "ToolResult", "Call", "SandboxOpened", "ToolResult", "Call", "ToolResult",
        "Call", "Verified", "Ended",
    ]  # fmt: skip
    assert end(events).reason == "done"
    assert sandboxes.ran == [f"{episode.execution}-t{turn}" for turn in (0, 0, 1, 2)]
    assert of(SandboxOpened, events)[1].sandbox == f"{episode.execution}-a0"
    assert (episode.execution in sandboxes.destroyed) == (kind == "infra_error")
    assert of(Verified, events)[0].infra_error is None


async def test_a_sandbox_lost_when_its_agent_is_done_is_made_again_for_the_score(stack: Stack) -> None:
    episode = scored(Scoring())
    verify = stack.sandboxes.verify

    async def losing(request: VerifyRequest) -> VerifyResult:
        if request.sandbox == episode.execution:
            stack.sandboxes.live.pop(request.sandbox, None)
        return await verify(request)

    stack.sandboxes.verify = losing  # type: ignore[method-assign]  # a fault is put in from outside
    events = await lived(stack, episode)
    assert kinds(events)[-3:] == ["SandboxOpened", "Verified", "Ended"]
    assert end(events).reason == "done"
    assert [part.value for part in of(Verified, events)[0].parts] == [1.0]
    assert len(stack.sandboxes.ran) == 6, "three commands, twice"


@pytest.fixture
def hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drive fails, by no verdict of its own, and two failures are enough."""
    monkeypatch.setattr(rollout, "MAX_DELIVER", 2)

    async def broken(_self: Runner) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Runner, "_drive", broken)


async def dead_letters(stack: Stack) -> list[DeadLetter]:
    stored = await read(stack.bus, subjects.DLQ, subjects.dlq(subjects.EPISODES, ">"))
    return [event for message in stored if isinstance(event := message.event(), DeadLetter)]


@pytest.mark.usefixtures("hopeless")
async def test_a_dispatch_that_becomes_a_dead_letter_leaves_no_group_live(stack: Stack) -> None:
    episode = scored(Scoring())
    other = msgspec.structs.replace(episode, execution=episode.members[1])
    async with stack.service():
        await stack.submit(episode)
        await stack.submit(other)
        await eventually(stack.drained, 60)
    logs = [await stack.log(each) for each in (episode, other)]
    assert [kinds(log) for log in logs] == [["Started", "Ended"]] * 2
    assert {end(log).reason for log in logs} == {"infra"}
    assert "failed 2 times: KeyError('a defect')" in (end(logs[0]).detail or "")
    [closed] = assemble(itertools.chain(*logs))
    assert (closed.scored.outcome, closed.scored.reason) == ("dropped", "infra")
    letters = await dead_letters(stack)
    assert len(letters) == 2
    assert letters[0].error.endswith("the execution has ended as infra")


@pytest.mark.usefixtures("hopeless")
async def test_what_is_given_up_ends_where_its_log_stands_and_only_once(stack: Stack) -> None:
    """Also behind an event that nobody can read, and not where it has ended already."""
    episode = scored(Scoring())
    scope = subjects.traj(episode.run, episode.group, episode.execution, ">")
    common: dict[str, Any] = {"run": episode.run, "group": episode.group, "execution": episode.execution, "attempt": 0}
    begun = [
        Started(index=0, dispatch=episode, replica="x", **common),
        SandboxOpened(index=1, sandbox=episode.execution, node="n0", isolated=True, **common),
    ]
    last = 0
    for event in begun:
        last = await stack.bus.append(scope[:-1] + tag_of(event).split(".")[1], event, scope=scope, last=last)
    await stack.bus.publish_raw(scope[:-1] + "tool", b"{}", "odd", "traj.tool.v1")
    async with stack.service():
        await stack.submit(episode)
        await eventually(stack.drained, 60)
        ended = (await read(stack.bus, subjects.TRAJ, scope))[3:]
        assert kinds([message.event() for message in ended]) == ["TakenOver", "Ended"]
        assert [getattr(message.event(), "index", None) for message in ended] == [3, 4]
        assert stack.sandboxes.destroyed == {episode.execution}
        await stack.submit_again(episode)
        await eventually(stack.drained, 60)
    assert len(await read(stack.bus, subjects.TRAJ, scope)) == 5


@contextlib.asynccontextmanager
async def real_sandboxes(stack: Stack) -> AsyncIterator[Any]:
    with process(stack, "sandbox") as running:
        async with Bucket(stack.bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
            await eventually(lambda: any(s.pid == running.pid and s.ready for s in services.values.values()), 90)
        yield running


class TestReal:
    """With the sandbox service and its sandboxes."""

    pytestmark = real

    async def test_neither_a_planted_file_nor_a_background_process_alters_a_verdict(self, bare: Stack) -> None:
        checks = (
            Check(name="honest", command='[ "$(cat a.txt)" = one ]', weight=0.25),
            Check(name="outside", command="[ -e /tmp/solved ]", weight=0.25),
            Check(name="home", command="python3 -c 'raise SystemExit(1)'", weight=0.25),
            Check(name="late", command="sleep 0.2; [ -e late.txt ]", weight=0.25),
        )
        script = [
            "echo one > a.txt; touch /tmp/solved",
            """d=$(python3 -c 'import site; print(site.USER_SITE)'); mkdir -p $d
            echo 'import os; os._exit(0)' > $d/usercustomize.py""",
            "(while sleep 0.05; do touch late.txt; echo two > b.txt; done) > /dev/null 2>&1 & rm -f late.txt; true",
            "done",
        ]
        episode = scored(Scoring(progress_every=1), max_turns=6, max_tokens=400, context_tokens=4000)
        episode = msgspec.structs.replace(episode, task=msgspec.structs.replace(episode.task, checks=checks))
        async with real_sandboxes(bare):
            events = await lived(bare, episode, script)
        verdict = of(Verified, events)[0]
        assert verdict.infra_error is None
        found = {part.name: part.value for part in verdict.parts}
        assert (found["honest"], found["outside"], found["home"]) == (1.0, 0.0, 0.0)
        measured = {event.turn: {part.name: part.value for part in event.parts} for event in of(Progressed, events)}
        assert [measured[turn]["honest"] for turn in range(4)] == [0.0, 1.0, 1.0, 1.0]
        assert all(one["outside"] == one["home"] == 0.0 for one in measured.values())
        assert end(events).reason == "done"

    @pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a python3 that sandboxes see")
    async def test_progress_of_a_program_is_what_its_work_was_before_each_call(self, bare: Stack) -> None:
        """It works on beside its calls, in the background, and is not stopped for a measurement."""
        script = ["echo one > a.txt", "true", "touch ticks; echo zero > a.txt", "done"]
        checks = (Check(name="one", command='[ "$(cat a.txt)" = one ]', weight=1.0),)
        episode = scored(Scoring(progress_every=1), agent="program", program="python3 agent.py", max_turns=8)
        task = msgspec.structs.replace(episode.task, files={"agent.py": PROGRAM_AGENT}, checks=checks)
        async with real_sandboxes(bare):
            events = await lived(bare, msgspec.structs.replace(episode, task=task), script)
        assert kinds(events)[2:-2] == ["Progressed", "Call"] * 4 + ["ToolResult"]
        measured = of(Progressed, events)
        assert [(event.turn, event.infra_error) for event in measured] == [(turn, None) for turn in range(4)]
        assert [event.parts[0].value for event in measured] == [0.0, 1.0, 1.0, 0.0]
        assert [event.call for event in measured] == [None, *(call.call for call in of(Call, events)[:3])]
        [program] = of(ToolResult, events)
        assert (program.exit_code, program.output) == (0, "kept going")
        assert end(events).duration_s < program.duration_s, "what measuring took is not the agent's"

    async def test_a_sandbox_service_that_lost_everything_loses_no_episode(self, bare: Stack) -> None:
        """Its container died, sandboxes and all, and an empty one took its place."""
        script = ["echo one > a.txt", "sleep 1.5; cat a.txt", "cp a.txt b.txt", "done"]
        checks = (Check(name="kept", command='[ "$(cat b.txt)" = one ]', weight=1.0),)
        episode = scored(Scoring(), max_tokens=200, context_tokens=2000, command_timeout_s=5.0)
        episode = msgspec.structs.replace(episode, task=msgspec.structs.replace(episode.task, checks=checks))
        async with bare.host("h0", script).up(), bare.service():
            async with real_sandboxes(bare) as running:
                await bare.submit(episode)
                await eventually(lambda: first_command(bare, episode), 60)
                running.kill()
                running.wait(10)
            await asyncio.to_thread(erase, bare)
            async with real_sandboxes(bare):
                await eventually(lambda: bare.ended(episode), 120)
        events = await bare.log(episode)
        assert end(events).reason == "done"
        assert len(of(SandboxOpened, events)) == 2
        assert [event.output for event in of(ToolResult, events)] == ["", "one", ""]
        assert [part.value for part in of(Verified, events)[0].parts] == [1.0]


async def first_command(stack: Stack, episode: EpisodeDispatch) -> bool:
    return len(of(Call, await stack.log(episode))) == 2


def erase(stack: Stack) -> None:
    """End all that the killed service left, as the end of its container does."""
    assert asyncio.run(clear(stack.folder / "state"))
