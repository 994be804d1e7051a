"""Episodes whose agent goes on with a transcript, through the rollout service; one by two replicas."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from opengyre.proto.run import Shot, ShotTurn
from opengyre.proto.traj import AnyTrajEvent, Call, Ended, ToolResult
from opengyre.shared.bus import Bus
from support import eventually
from support.rollout_fakes import FakeHost, Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "done"]
SHOTS = (Shot(task="write x into a", turns=(ShotTurn(command="echo x > a"), ShotTurn(command="done"))),)
HARNESS: dict[str, Any] = {"prompt": "transcript", "shots": SHOTS}


class Writer(FakeHost):
    """Goes on beyond the end of its line, as a base model does."""

    hold_request: int | None = None
    """The how manyth request waits for `go_on`."""

    async def generate(self, request: Request) -> Response:
        if len(self.requests) + 1 == self.hold_request:
            self.requests.append(await request.json())
            await self.go_on.wait()
            return JSONResponse({"error": {"type": "not_serving", "message": "held"}}, status_code=503)
        return await super().generate(request)

    def _said(self, turn: int, request: str) -> str:
        number = request.split("-c")[-1].split("-")[0]
        return f"{self.script[int(number)]}\n$ more"


@pytest.fixture
async def stack(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    async with made.sandboxes.up():
        made.sandboxes.print["cat b.txt"] = "no such file\n"
        yield made


def calls(events: list[AnyTrajEvent]) -> list[Call]:
    return [event for event in events if isinstance(event, Call)]


def assert_whole(stack: Stack, events: list[AnyTrajEvent]) -> None:
    first, second, third = calls(events)
    assert [call.text for call in (first, second, third)] == [f" {line}" for line in SCRIPT]
    assert [(call.stop, call.api, call.transition) for call in (second, third)] == [("\n", "completions", "extend")] * 2
    assert [event.command for event in events if isinstance(event, ToolResult)] == SCRIPT[:2]
    assert third.prefix_tokens == second.prefix_tokens + len(second.prompt_ids) + len(second.sampled_ids)
    assert stack.tokenizer.decode([*first.prompt_ids, *first.sampled_ids, *second.prompt_ids]) == (
        "Task: write x into a\n$ echo x > a\n$ done\n\nTask: write one into a.txt\n$ echo one > a.txt\n$"
    )
    assert stack.tokenizer.decode(third.prompt_ids) == "no such file\n$"
    assert isinstance(events[-1], Ended)
    assert (events[-1].reason, events[-1].turns) == ("done", 3)


async def test_an_episode_as_a_transcript(stack: Stack) -> None:
    episode = dispatch(**HARNESS)
    async with Writer(stack.bus, stack.tokenizer, "h0", SCRIPT).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
    assert_whole(stack, await stack.log(episode))


async def test_another_replica_goes_on_with_the_transcript(stack: Stack) -> None:
    episode = dispatch(**HARNESS)
    host = Writer(stack.bus, stack.tokenizer, "h0", SCRIPT)
    async with host.up():
        async with stack.service("one"):
            host.hold_request = 3
            await stack.submit(episode)
            await eventually(lambda: len(host.requests) == 3)
            assert len(calls(await stack.log(episode))) == 2
        host.go_on.set()
        async with stack.service("two"):
            await eventually(lambda: stack.ended(episode))
    assert_whole(stack, await stack.log(episode))
