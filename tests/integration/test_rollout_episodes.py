"""Episodes through the rollout service, with a real broker, against a scripted host and sandbox."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.traj import Call, Ended
from opengyre.shared.bus import Bus
from support import eventually
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "done"]


@pytest.fixture
async def stack(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Stack]:
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    async with made.sandboxes.up():
        yield made


def kinds(events: list) -> list[str]:
    return [type(event).__name__ for event in events]


async def test_an_episode_from_dispatch_to_end(stack: Stack) -> None:
    episode = dispatch()
    stack.sandboxes.print["cat b.txt"] = "no such file\n"
    async with stack.host("h0", SCRIPT).up() as host, stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
        await eventually(stack.drained)
    events = await stack.log(episode)
    assert kinds(events) == [
        "Started", "SandboxOpened", "Call", "ToolResult", "Call", "ToolResult", "Call", "Verified", "Ended",
    ]  # fmt: skip
    assert [event.index for event in events] == list(range(9))
    first, second, third = (event for event in events if isinstance(event, Call))
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
    end = events[-1]
    assert isinstance(end, Ended)
    assert (end.reason, end.turns) == ("done", 3)
    assert stack.sandboxes.destroyed == {episode.execution}
