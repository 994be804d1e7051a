"""OpenAI's and Anthropic's clients on the tiny engine, in a host's own process."""

from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from opengyre.proto import subjects
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.traj import Call
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.processes import process, publish_version
from support.proxy import anthropic_tools, openai_tools
from support.rollout_fakes import Stack, dispatch

USER: Any = [{"role": "user", "content": "write one into a.txt"}]


@pytest.mark.torch
async def test_both_clients_speak_with_the_tiny_engine(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    """What an untrained policy says is noise; how it is answered and recorded is not."""
    stack = Stack(bus, tmp_path, nats_server.url)
    await stack.prepare()
    await publish_version(stack)
    stack.sandboxes.delay_s = 600
    episode = dispatch(agent="program", program="wait", max_turns=20, max_tokens=24)
    async with (
        Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
        stack.sandboxes.up(),
        stack.service() as service,
    ):
        with process(stack, "host", HOST__HOST="h0", HOST__HEARTBEAT_S="0.2"):
            await eventually(lambda: [h.state for h in hosts.values.values()] == [HostState.ROLLOUT], 60)
            await stack.submit(episode)
            await eventually(lambda: stack.sandboxes.ran)
            base = f"{service.url}/x/{episode.execution}"
            key = Endpoints(load_secret(tmp_path / "state")).key(episode.execution)
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key) as client:
                await with_openai(client)
            async with anthropic.AsyncAnthropic(base_url=base, api_key=key) as client:
                await with_anthropic(client)
            calls = [event for event in await stack.log(episode) if isinstance(event, Call)]
            async with aiohttp.ClientSession() as session, session.get(f"{base}/v1/models") as response:
                assert response.status == 401
    assert {call.api for call in calls} == {"chat", "completions", "messages"}
    for call in calls:
        assert len(call.logprobs) == len(call.sampled_ids) == call.versions[-1].end
        assert all(value <= 0 for value in call.logprobs)


async def with_openai(client: openai.AsyncOpenAI) -> None:
    tools = openai_tools("bash")
    first = await client.chat.completions.create(model="r", messages=USER, n=2, logprobs=True)
    assert len({choice.message.content for choice in first.choices}) == 2, "each choice is sampled by itself"
    called = await client.chat.completions.create(model="r", messages=USER, tools=tools)
    message = called.choices[0].message
    talk: Any = [*USER, message]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls or ()]
    stream = await client.chat.completions.create(
        model="r", messages=talk, tools=tools, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage is not None
    assert called.usage is not None
    assert last.usage.prompt_tokens > called.usage.prompt_tokens + called.usage.completion_tokens
    text = await client.completions.create(model="r", prompt="echo", max_tokens=3)
    assert text.usage is not None
    assert text.usage.completion_tokens <= 3


async def with_anthropic(client: anthropic.AsyncAnthropic) -> None:
    fields: dict[str, Any] = {"model": "r", "max_tokens": 16, "tools": anthropic_tools("add"), "messages": USER}
    counted = await client.messages.count_tokens(model="r", tools=fields["tools"], messages=USER)
    async with client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    assert streamed.usage.input_tokens == counted.input_tokens
    talk = [*USER, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": "go on"}]
    more = await client.messages.create(**{**fields, "messages": talk})
    assert more.usage.input_tokens > streamed.usage.input_tokens + streamed.usage.output_tokens
