"""An execution whose agent is a program that waits, and clients of its endpoint beside it."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import Call
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared.bus import Bus
from support import eventually
from support.rollout_fakes import FakeHost, Stack, dispatch

TOOLS: dict[str, dict[str, Any]] = {
    "bash": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
    "add": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def openai_tools(*names: str) -> list[Any]:
    return [{"type": "function", "function": TOOLS[name]} for name in names]


def anthropic_tools(*names: str) -> list[Any]:
    return [
        {"name": name, "description": TOOLS[name]["description"], "input_schema": TOOLS[name]["parameters"]}
        for name in names
    ]


@dataclass
class Proxy:
    stack: Stack
    host: FakeHost
    episode: EpisodeDispatch
    base: str
    """For Anthropic's clients; OpenAI's take `base` and `/v1`."""
    key: str
    session: aiohttp.ClientSession

    async def calls(self) -> list[Call]:
        return [event for event in await self.stack.log(self.episode) if isinstance(event, Call)]

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any, Any]:
        async with self.session.post(f"{self.base}/v1/{path}", json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers


@contextlib.asynccontextmanager
async def proxied(
    bus: Bus,
    url: str,
    folder: Path,
    script: Sequence[str] | Callable[[Stack], FakeHost],
    rollout: Mapping[str, Any] | None = None,
    **harness: object,
) -> AsyncIterator[Proxy]:
    """`script`: what the model says in its first turn, its second turn, and so on. `rollout`: settings of the
    service."""
    stack = Stack(bus, folder, url)
    await stack.prepare()
    stack.sandboxes.delay_s = 600
    fields = {"agent": "program", "program": "wait", "max_turns": 40, "context_tokens": 2000, "max_tokens": 200}
    episode = dispatch(**{**fields, **harness})  # type: ignore[arg-type]  # fields by keyword, checked at run time
    made = script(stack) if callable(script) else stack.host("h0", list(script))
    async with stack.sandboxes.up(), made.up() as host, stack.service(**(rollout or {})) as context:
        await stack.submit(episode)
        await eventually(lambda: stack.sandboxes.ran)
        key = Endpoints(load_secret(folder / "state")).key(episode.execution)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            yield Proxy(stack, host, episode, f"{context.url}/x/{episode.execution}", key, session)
