"""An agent that is a program: it runs in a real sandbox without a network, and reaches its model and nothing else."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.proto import subjects
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import Check
from opengyre.proto.traj import PROGRAM, Call, Ended, Started, TakenOver, ToolResult, Verified
from opengyre.sandbox import machine
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.rollout_fakes import Stack, dispatch

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
    pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a python3 that sandboxes see"),
]

AGENT = """
import json, os, subprocess, sys, time, urllib.request

def ask(messages):
    body = json.dumps({"model": os.environ["GYRE_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    for attempt in range(2000):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.headers.get("x-should-retry") != "true":
                print(error.read().decode(), file=sys.stderr)
                sys.exit(3)
        except OSError as error:
            print("again:", error, file=sys.stderr)
        time.sleep(0.1)

messages = [{"role": "user", "content": os.environ["GYRE_INSTRUCTION"]}]
while (message := ask(messages))["content"] != "done":
    messages.append(message)
    done = subprocess.run(message["content"], shell=True, capture_output=True, text=True)
    messages.append({"role": "tool", "content": done.stdout})
"""
PROGRAM_LINE = "python3 agent.py"
CHECKS = (Check(name="there", command='[ "$(cat a.txt)" = one ]', weight=1.0),)


@contextlib.contextmanager
def sandbox_service(stack: Stack) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "GYRE_STATE_DIR": str(stack.folder / "state"), "GYRE_BUS__URL": stack.nats_url}
    with (stack.folder / "sandbox.log").open("ab") as out:
        running = subprocess.Popen([sys.executable, "-m", "opengyre.sandbox"], env=env, stdout=out, stderr=out)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


def program(line: str = PROGRAM_LINE, *, files: dict[str, str] | None = None, **harness: object) -> EpisodeDispatch:
    episode = dispatch(**{"agent": "program", "program": line, **harness})  # type: ignore[arg-type]  # fields by keyword, checked at run time
    task = msgspec.structs.replace(episode.task, files={"agent.py": AGENT, **(files or {})}, checks=CHECKS)
    return msgspec.structs.replace(episode, task=task)


@pytest.fixture
async def stack(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    with sandbox_service(made) as running:
        async with Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
            await eventually(lambda: any(s.ready and s.pid == running.pid for s in services.values.values()), 90)
        yield made


async def ended(stack: Stack, episode: EpisodeDispatch, bound_s: float = 90) -> list[Any]:
    await eventually(lambda: stack.ended(episode), bound_s)
    return await stack.log(episode)


async def test_a_program_solves_its_task_through_the_only_way_out(stack: Stack) -> None:
    """Its calls extend each other, its end is recorded, and what it left is what is scored."""
    probe = (
        "python3 -c \"import urllib.request as u; u.urlopen('http://198.51.100.7', timeout=2)\" 2>/dev/null && exit 9\n"
    )
    episode = program(probe + PROGRAM_LINE)
    async with stack.host("h0", ["echo one > a.txt", "cat a.txt", "done"]).up(), stack.service():
        await stack.submit(episode)
        events = await ended(stack, episode)
    calls = [event for event in events if isinstance(event, Call)]
    assert [call.text for call in calls] == ["echo one > a.txt", "cat a.txt", "done"]
    assert [call.transition for call in calls] == ["root", "extend", "extend"]
    [result] = [event for event in events if isinstance(event, ToolResult)]
    assert (result.turn, result.exit_code) == (PROGRAM, 0), result.output
    verified, end = events[-2:]
    assert isinstance(verified, Verified)
    assert [part.value for part in verified.parts] == [1.0]
    assert isinstance(end, Ended)
    assert end.reason == "done"


async def test_a_program_that_fails_is_scored_with_the_reason(stack: Stack) -> None:
    episode = program("echo one > a.txt; echo cannot go on >&2; exit 5")
    async with stack.service():
        await stack.submit(episode)
        events = await ended(stack, episode)
    end = events[-1]
    assert isinstance(end, Ended)
    assert end.reason == "agent_error"
    assert end.detail == "the program ended with exit status 5: cannot go on"
    assert [part.value for part in events[-2].parts] == [1.0], "the kept work is scored all the same"


async def test_a_program_that_goes_on_after_its_last_turn_is_stopped(stack: Stack, monkeypatch: Any) -> None:
    monkeypatch.setattr("opengyre.rollout.program.GRACE_S", 0.5)
    episode = program(f"{PROGRAM_LINE}; sleep 600", max_turns=2)
    async with stack.host("h0", ["echo one > a.txt", "cat a.txt", "cat a.txt"]).up(), stack.service():
        await stack.submit(episode)
        events = await ended(stack, episode)
    end = events[-1]
    assert isinstance(end, Ended)
    assert (end.reason, end.turns) == ("turn_budget", 2)
    assert [part.value for part in events[-2].parts] == [1.0]


async def test_a_time_budget_ends_a_program(stack: Stack) -> None:
    episode = program("echo one > a.txt; sleep 600", time_budget_s=4.0)
    async with stack.service():
        await stack.submit(episode)
        events = await ended(stack, episode)
    assert isinstance(events[-1], Ended)
    assert events[-1].reason == "time_budget"
    assert [part.value for part in events[-2].parts] == [1.0]


async def test_a_program_lives_through_a_change_of_writers(stack: Stack) -> None:
    """The replica that it talks to stops under a call; the next one joins the program and answers it."""
    episode = program(files={"slow": ""})
    host = stack.host("h0", ["echo one > a.txt", "cat a.txt", "done"])
    host.delay_s = 0.05
    async with host.up():
        async with stack.service("one"):
            await stack.submit(episode)
            await eventually(lambda: len(host.requests) == 2, 60)
        async with stack.service("two"):
            events = await ended(stack, episode)
    assert [type(event) for event in events if isinstance(event, Started | TakenOver)] == [Started, TakenOver]
    assert [call.text for call in events if isinstance(call, Call)] == ["echo one > a.txt", "cat a.txt", "done"]
    assert events[-1].reason == "done"
    assert [part.value for part in events[-2].parts] == [1.0]


async def test_a_sandbox_service_that_starts_again_opens_the_way_again(
    bus: Bus, nats_server: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("opengyre.rollout.program.AGAIN_S", 0.2)
    monkeypatch.setattr("opengyre.rollout.sandboxes.LOOK_S", 0.2)
    stack = Stack(bus, tmp_path, nats_server.url)
    await stack.prepare()
    host = stack.host("h0", ["echo one > a.txt", "cat a.txt", "done"])
    host.delay_s = 0.05
    episode = program()
    async with host.up(), stack.service():
        with sandbox_service(stack) as first:
            await stack.submit(episode)
            await eventually(lambda: len(host.requests) == 2, 60)
            first.kill()
            await asyncio.to_thread(first.wait)
        with sandbox_service(stack):
            events = await ended(stack, episode, 120)
    assert events[-1].reason == "done"
    assert [part.value for part in events[-2].parts] == [1.0]
