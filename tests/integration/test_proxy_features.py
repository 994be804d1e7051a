"""What agents use of OpenAI's and Anthropic's clients, each against the endpoint: served, or refused by name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from opengyre.shared.bus import Bus
from support import eventually
from support.proxy import TOOLS, Proxy, anthropic_tools, openai_tools, proxied

USER: Any = [{"role": "user", "content": "write one into a.txt"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
async def proxy(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(bus, nats_server.url, tmp_path, ["echo one > a.txt", "cat a.txt", "done"]) as made:
        yield made


@pytest.fixture
async def adding(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(bus, nats_server.url, tmp_path, [CALL, "three", "done"]) as made:
        yield made


def client_of(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.base}/v1", api_key=proxy.key)


def claude_of(proxy: Proxy) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.base, api_key=proxy.key)


async def test_openais_streaming_helper(adding: Proxy) -> None:
    """It puts the chunks together and checks them against its own types."""
    async with (
        client_of(adding) as client,
        client.chat.completions.stream(
            model="r", messages=USER, tools=openai_tools("add"), stream_options={"include_usage": True}, logprobs=True
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    [call] = await adding.calls()
    message = final.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == call.tool_calls[0].arguments
    assert "tool_calls.function.arguments.done" in kinds
    assert final.usage is not None
    assert final.usage.completion_tokens == len(call.sampled_ids)
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == len(call.sampled_ids)


async def test_openais_raw_and_streaming_responses(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        raw = await client.chat.completions.with_raw_response.create(model="r", messages=USER)
        assert raw.status_code == 200
        assert raw.parse().choices[0].message.content == "echo one > a.txt"
        async with client.chat.completions.with_streaming_response.create(
            model="r", messages=USER, stream=True
        ) as response:
            lines = [line async for line in response.iter_lines()]
    assert lines[-2] == "data: [DONE]"


async def test_openais_fields_that_agents_send(proxy: Proxy) -> None:
    """Those that would not change what the policy is asked are taken as compatible servers take them."""
    fields: dict[str, Any] = {
        "seed": 7, "temperature": 0.2, "top_p": 0.9, "presence_penalty": 0, "user": "me", "store": False,
        "metadata": {"a": "b"}, "response_format": {"type": "text"}, "parallel_tool_calls": True, "logit_bias": {},
        "top_logprobs": 0, "reasoning_effort": "low", "service_tier": "auto",
    }  # fmt: skip
    async with client_of(proxy) as client:
        answer = await client.chat.completions.create(model="r", messages=USER, **fields)
        short = await client.chat.completions.create(model="r", messages=USER, max_completion_tokens=3)
        wins = await client.chat.completions.create(model="r", messages=USER, max_completion_tokens=3, max_tokens=50)
        parts: Any = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, *USER]
        assert (await client.chat.completions.create(model="r", messages=parts)).choices
    assert answer.choices[0].message.content == "echo one > a.txt"
    for one in (short, wins):
        assert one.usage is not None
        assert (one.usage.completion_tokens, one.choices[0].finish_reason) == (3, "length")


async def test_what_openais_clients_may_ask_and_cannot_have_is_refused_by_name(proxy: Proxy) -> None:
    image: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "?"}]}
    ]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": image}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": openai_tools("add")},
            "tool_choice",
        ),
        ({"modalities": ["audio"], "audio": {"voice": "x", "format": "wav"}}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
    ]
    async with client_of(proxy) as client:
        for fields, name in refused:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**{"model": "r", "messages": USER, **fields})
            assert error.value.param == name
            assert name in error.value.message
        with pytest.raises(openai.NotFoundError, match="responses"):
            await client.responses.create(model="r", input="x")
        with pytest.raises(openai.NotFoundError, match="embeddings"):
            await client.embeddings.create(model="r", input="x")
    assert await proxy.calls() == []


async def test_openais_tool_loop(adding: Proxy) -> None:
    """Messages go back as the client's own objects, dumped as agents dump them."""
    async with client_of(adding) as client:
        talk: Any = [{"role": "system", "content": "you add"}, *USER]
        first = await client.chat.completions.create(model="r", messages=talk, tools=openai_tools("add"))
        message = first.choices[0].message
        assert message.content is None
        assert message.tool_calls is not None
        talk += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
        second = await client.chat.completions.create(model="r", messages=talk, tools=openai_tools("add"))
    assert second.choices[0].message.content == "three"
    one, two = await adding.calls()
    assert (two.transition, two.parent) == ("extend", one.call)


async def test_the_same_key_is_the_same_answer_and_another_a_new_one(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        ids = []
        for key in ("a", "a", "b"):
            answer = await client.chat.completions.create(
                model="r", messages=USER, extra_headers={"Idempotency-Key": key}
            )
            ids.append(answer.id)
    assert ids[0] == ids[1] != ids[2]
    assert len(await proxy.calls()) == 2


async def test_a_long_prompt_is_counted_and_extended(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with (
        proxied(bus, nats_server.url, tmp_path, ["ls"] * 4, context_tokens=400_000) as proxy,
        client_of(proxy) as client,
        claude_of(proxy) as claude,
    ):
        long: Any = [{"role": "user", "content": "日本 word\n" * 20_000}]
        counted = await claude.messages.count_tokens(model="r", messages=long)
        answer = await client.chat.completions.create(model="r", messages=long)
        talk: Any = [*long, {"role": "assistant", "content": "ls"}, {"role": "user", "content": "on"}]
        await client.chat.completions.create(model="r", messages=talk)
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.prompt_tokens > 100_000
        one, two = await proxy.calls()
        assert (two.parent, two.transition, len(two.prompt_ids) < 20) == (one.call, "extend", True)


async def test_anthropics_fields_that_agents_send(proxy: Proxy) -> None:
    fields: dict[str, Any] = {
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "service_tier": "auto",
        "extra_body": {"temperature": 1.0, "top_k": 5},
        "system": [
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "be exact"},
        ],
    }  # fmt: skip
    cached: Any = [
        {"role": "user", "content": [{"type": "text", "text": "write", "cache_control": {"type": "ephemeral"}}]}
    ]
    async with claude_of(proxy) as client:
        answer: Any = await client.messages.create(model="r", max_tokens=2048, messages=cached, **fields)
        beta: Any = await client.beta.messages.create(
            model="r", max_tokens=100, messages=cached, betas=["prompt-caching-2024-07-31"]
        )
        raw = await client.messages.with_raw_response.create(model="r", max_tokens=99, messages=cached)
        models = [model.id async for model in client.models.list()]
        model = await client.models.retrieve("r")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("another")
    assert answer.content[0].text == beta.content[0].text == "echo one > a.txt"
    parsed: Any = await raw.parse()
    assert parsed.content[0].text == "echo one > a.txt"
    assert models == ["r"] == [model.id]


async def test_what_anthropics_clients_may_ask_and_cannot_have_is_refused_by_name(proxy: Proxy) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": [picture]}]}, r"messages.0.content.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "no"}, "tools": anthropic_tools("add")}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [*USER, {"role": "assistant", "content": "Sure:"}]}, "messages"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
    ]
    async with claude_of(proxy) as client:
        for fields, name in refused:
            with pytest.raises(anthropic.BadRequestError, match=name):
                await client.messages.create(**{"model": "r", "max_tokens": 9, "messages": USER, **fields})
        beta: Any = {
            "thread": {"type": "create"},
            "compaction": {"type": "summarize"},
            "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
            "container": "c",
        }
        for name, value in beta.items():
            with pytest.raises(anthropic.BadRequestError, match=name):
                await client.beta.messages.create(model="r", max_tokens=9, messages=USER, extra_body={name: value})
    assert await proxy.calls() == []


async def test_anthropics_tool_runner(adding: Proxy) -> None:
    """The client's own loop: it calls the tool and sends the result back. It would leave the history to the server,
    is told that this is not served, and goes on with whole histories by itself."""
    added: list[tuple[float, float]] = []

    @anthropic.beta_async_tool(name="add", input_schema=TOOLS["add"]["parameters"])
    async def add(a: float, b: float) -> str:
        """Add two numbers"""
        added.append((a, b))
        return str(a + b)

    async with claude_of(adding) as client:
        runner = client.beta.messages.tool_runner(model="r", max_tokens=150, messages=USER, tools=[add])
        final: Any = await runner.until_done()
    assert added == [(1, 2)]
    assert final.content[0].text == "three"
    one, two = await adding.calls()
    assert (two.transition, two.parent) == ("extend", one.call)


async def test_a_client_that_leaves_in_mid_call_finds_its_record(proxy: Proxy) -> None:
    proxy.host.delay_s = 0.05
    async with claude_of(proxy) as client:
        asking = asyncio.create_task(client.messages.create(model="r", max_tokens=99, messages=USER))
        await eventually(lambda: proxy.host.calls)
        asking.cancel()
        await asyncio.wait([asking])
        again: Any = await client.messages.create(model="r", max_tokens=99, messages=USER)
    [call] = await proxy.calls()
    assert again.id == f"msg_{call.execution}-{call.call}"
    assert len(proxy.host.requests) == 1
