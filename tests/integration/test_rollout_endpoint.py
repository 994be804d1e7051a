"""An execution's endpoint as an OpenAI client meets it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import Call, Ended
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared.bus import Bus
from support import eventually
from support.rollout_fakes import FakeHost, Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "done"]


@dataclass
class Live:
    """An execution whose own agent waits for its first command, and a client beside it."""

    stack: Stack
    host: FakeHost
    episode: EpisodeDispatch
    url: str
    session: aiohttp.ClientSession

    async def post(self, body: Any, path: str = "chat/completions") -> tuple[int, Any, dict[str, str]]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(f"{self.url}/{path}", data=data) as response:
            text = await response.text()
            return response.status, json.loads(text) if "json" in response.content_type else text, {**response.headers}

    async def calls(self) -> list[Call]:
        return [event for event in await self.stack.log(self.episode) if isinstance(event, Call)]


@pytest.fixture
async def live(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Live]:
    stack = Stack(bus, tmp_path, nats_server.url)
    await stack.prepare()
    stack.sandboxes.delay_s = 600
    episode = dispatch()
    async with (
        stack.sandboxes.up(),
        stack.host("h0", SCRIPT).up() as host,
        stack.service() as context,
    ):
        await stack.submit(episode)
        await eventually(lambda: stack.sandboxes.ran)
        key = Endpoints(load_secret(tmp_path / "state")).key(episode.execution)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            yield Live(stack, host, episode, f"{context.url}/x/{episode.execution}/v1", session)


def chat(text: str = "write two into b.txt", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def test_a_completion_has_openais_shape_and_is_recorded_first(live: Live) -> None:
    status, body, _ = await live.post(chat(logprobs=True))
    assert status == 200
    call = (await live.calls())[-1]
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": SCRIPT[0], "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == list(call.logprobs)
    assert body["usage"]["completion_tokens"] == len(call.sampled_ids)
    assert body["usage"]["prompt_tokens"] == call.prefix_tokens + len(call.prompt_ids)
    assert body["id"].endswith(f"{call.execution}-{call.call}")


async def test_a_stream_is_the_same_answer_in_events(live: Live) -> None:
    status, text, headers = await live.post(chat(stream=True, stream_options={"include_usage": True}))
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == SCRIPT[0]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0


async def test_the_same_request_again_gets_the_recorded_answer(live: Live) -> None:
    """Also while it is under way, and in no case a second sample."""
    live.host.delay_s = 0.05
    first, second = await asyncio.gather(live.post(chat()), live.post(chat()))
    third = await live.post(chat())
    assert first[1]["id"] == second[1]["id"] == third[1]["id"]
    assert len(await live.calls()) == 2, "the agent's own and this one"


async def test_a_client_that_went_away_finds_its_answer(live: Live) -> None:
    live.host.delay_s = 0.05
    asking = asyncio.create_task(live.post(chat()))
    await eventually(lambda: live.host.calls)
    asking.cancel()
    await asyncio.wait([asking])
    status, body, _ = await live.post(chat())
    assert status == 200
    assert body["choices"][0]["message"]["content"] == SCRIPT[0]
    assert len(live.host.requests) == 2


async def test_a_longer_history_continues_the_recorded_call_by_its_ids(live: Live) -> None:
    _, body, _ = await live.post(chat())
    messages = [
        *chat()["messages"],
        {**body["choices"][0]["message"], "audio": None},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "ok"}]},
    ]
    status, body, _ = await live.post({"messages": messages})
    assert status == 200
    before, after = (await live.calls())[-2:]
    assert after.parent == before.call
    assert after.prefix_tokens == before.prefix_tokens + len(before.prompt_ids) + len(before.sampled_ids)
    rewritten = [{"role": "user", "content": "another"}, *messages[1:]]
    await live.post({"messages": rewritten})
    forked = (await live.calls())[-1]
    assert forked.transition == "fork"
    assert forked.prefix_tokens < before.prefix_tokens + len(before.prompt_ids)


REFUSED: list[tuple[Any, str]] = [
    (b"{", "not valid JSON"),
    ({}, "messages"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "owl", "content": "x"}]}, "owl"),
    ({"messages": "x"}, "messages"),
    (chat(n=0), "n must be 1 to"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}]), "JSON Schema"),
    (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    (chat(stop=[""]), "stop"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(max_tokens=0), "max_tokens must be at least 1"),
]


async def test_what_is_not_served_is_refused_by_name(live: Live) -> None:
    for body, says in REFUSED:
        status, answer, headers = await live.post(body)
        assert status == 400
        assert says in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert headers["x-should-retry"] == "false"
    assert len(live.host.requests) == 1


async def test_a_prompt_that_is_too_long_is_refused_as_clients_know_it(live: Live) -> None:
    status, answer, _ = await live.post(chat("word " * 3000))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_spent_turn_budget_is_a_quota(live: Live) -> None:
    for number in range(3):
        assert (await live.post(chat(f"write {number}")))[0] == 200
    status, answer, headers = await live.post(chat("one more"))
    assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
    assert headers["x-should-retry"] == "false"


async def test_keys_executions_models_and_large_bodies(live: Live) -> None:
    other = live.url.replace("-e00", "-e01")
    async with live.session.get(f"{live.url}/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["r"]
    async with live.session.get(f"{other}/models") as response:
        assert response.status == 401
    async with live.session.post(f"{live.url}/chat/completions", headers={"Authorization": "Bearer x"}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    status, answer, _ = await live.post(chat("x" * (9 << 20)))
    assert status == 413
    assert "too large" in answer["error"]["message"]


async def test_an_execution_that_ended_takes_no_more_calls(live: Live) -> None:
    async def lost() -> bool:
        live.stack.sandboxes.lose()  # the ones that are made again as well
        return await live.stack.ended(live.episode)

    await eventually(lost)
    status, answer, _ = await live.post(chat())
    assert (status, answer["error"]["code"]) == (404, "execution_not_found")
    events = await live.stack.log(live.episode)
    assert isinstance(events[-1], Ended)


def test_the_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    assert load_secret(tmp_path) == secret
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_body_without_a_length_is_not_read_beyond_the_limit(live: Live) -> None:
    """The agent is not trusted, and a body in chunks tells no length before it ends; this one never ends."""
    parts = urlsplit(live.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    key = live.session.headers["Authorization"]
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    chunk = b"x" * (1 << 20)
    for _ in range(9):
        writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        await writer.drain()
    async with asyncio.timeout(60):
        assert b" 413 " in await reader.readline()
    writer.close()
