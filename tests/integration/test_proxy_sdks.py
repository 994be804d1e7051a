"""The official OpenAI and Anthropic clients, unmodified, against an execution's endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from opengyre.shared.bus import Bus
from support.proxy import Proxy, anthropic_tools, openai_tools, proxied

TWO_CALLS = (
    'adding <tool_call>{"name": "add", "arguments": {"a": 1,  "b":2.0}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"b": 3, "a": 4}}</tool_call>'
)


async def asked(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="r", messages=messages, **more)


@pytest.fixture
async def proxy(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(bus, nats_server.url, tmp_path, ["echo one > a.txt", "cat a.txt", "done"]) as made:
        yield made


@pytest.fixture
async def adding(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(bus, nats_server.url, tmp_path, [TWO_CALLS, "done", "done"]) as made:
        yield made


def client_of(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.base}/v1", api_key=proxy.key)


def claude_of(proxy: Proxy) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.base, api_key=proxy.key)


USER: Any = [{"role": "user", "content": "write one into a.txt"}]


async def test_openai_chat_streamed_and_not_is_one_recorded_answer_each(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        whole = await asked(client, USER, logprobs=True)
        stream = await asked(client, USER, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert [model.id async for model in client.models.list()] == ["r"]
        assert (await client.models.retrieve("r")).id == "r"
    assert whole.choices[0].message.content == "echo one > a.txt"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "echo one > a.txt"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    calls = await proxy.calls()
    assert [call.sampled_ids for call in calls] == [calls[0].sampled_ids] * 2
    assert len(whole.choices[0].logprobs.content) == len(calls[0].sampled_ids)


async def test_openai_parallel_tool_calls_go_on_from_their_own_bytes(adding: Proxy) -> None:
    """The harness writes the arguments' JSON anew, in another spelling, and the prompt still extends the call."""
    async with client_of(adding) as client:
        first = await asked(client, USER, tools=openai_tools("add"))
        message = first.choices[0].message
        again = [
            {"id": c.id, "type": "function",
             "function": {"name": c.function.name, "arguments": json.dumps(json.loads(c.function.arguments))}}
            for c in message.tool_calls
        ]  # fmt: skip
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in again]
        talk: Any = [*USER, {"role": "assistant", "content": message.content, "tool_calls": again}, *results]
        second = await asked(client, talk, tools=openai_tools("add"), stream=True)
        said = "".join([c.choices[0].delta.content or "" async for c in second if c.choices])
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "adding"
    assert [c.function.arguments for c in message.tool_calls] == ['{"a": 1,  "b":2.0}', '{"b": 3, "a": 4}']
    assert said == "done"
    one, two = await adding.calls()
    assert (two.parent, two.transition) == (one.call, "extend")
    assert two.prefix_tokens == len(one.prompt_ids) + len(one.sampled_ids)


async def test_openai_streams_tool_calls(adding: Proxy) -> None:
    async with client_of(adding) as client:
        made: dict[int, list[str]] = {}
        async for chunk in await asked(client, USER, tools=openai_tools("add"), stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                made.setdefault(delta.index, []).append(delta.function.arguments or "")
    assert ["".join(parts) for parts in made.values()] == ['{"a": 1,  "b":2.0}', '{"b": 3, "a": 4}']


async def test_openai_choices_are_calls_of_one_prompt(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        answer = await asked(client, USER, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    calls = await proxy.calls()
    assert sorted((call.choice, call.choices) for call in calls) == [(0, 3), (1, 3), (2, 3)]
    assert len({call.request_digest for call in calls}) == 1
    prompts = [proxy.stack.tokenizer.decode(request["token_ids"]) for request in proxy.host.requests]
    assert len(set(prompts)) == 1


async def test_openai_text_completions_extend_by_the_sampled_ids(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        first = await client.completions.create(model="r", prompt="do: <", logprobs=1)
        text = first.choices[0].text
        second: Any = await client.completions.create(model="r", prompt=f"do: <{text} and then", stream=True)
        parts = [chunk.choices[0].text async for chunk in second if chunk.choices]
        third = await client.completions.create(model="r", prompt=[20, 21, 22], stop=["one"])
    one, two, three = await proxy.calls()
    assert (two.parent, two.transition, two.prefix_tokens) == (
        one.call,
        "extend",
        len(one.prompt_ids + one.sampled_ids),
    )
    assert "".join(parts) == two.text
    assert first.choices[0].logprobs is not None
    assert third.choices[0].text == " echo "
    assert (three.stop, three.finish_reason) == ("one", "stop")
    assert proxy.stack.tokenizer.decode(three.sampled_ids).endswith("one")


async def test_openai_errors_are_the_clients_own(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with proxied(bus, nats_server.url, tmp_path, ["ls"], max_turns=2, context_tokens=210) as proxy:
        async with client_of(proxy) as client:
            with pytest.raises(openai.BadRequestError) as long:
                await asked(client, [{"role": "user", "content": "word " * 500}])
            assert long.value.code == "context_length_exceeded"
            for number in range(2):
                await asked(client, [{"role": "user", "content": f"{number}"}])
            with pytest.raises(openai.RateLimitError) as spent:
                await asked(client, USER)
            assert spent.value.code == "insufficient_quota"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("another")
        async with openai.AsyncOpenAI(base_url=f"{proxy.base}/v1", api_key="no") as client:
            with pytest.raises(openai.AuthenticationError):
                await asked(client, USER)


async def test_anthropic_messages_streamed_and_not(proxy: Proxy) -> None:
    async with claude_of(proxy) as client:
        fields: dict[str, Any] = {"model": "r", "max_tokens": 100, "messages": USER}
        system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
        whole: Any = await client.messages.create(**fields, system=system)
        async with client.messages.stream(**fields) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="r", messages=USER, system=system)
    assert whole.content[0].text == text == "echo one > a.txt"
    assert (whole.stop_reason, final.stop_reason) == ("end_turn", "end_turn")
    assert counted.input_tokens == whole.usage.input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    calls = await proxy.calls()
    assert [call.api for call in calls] == ["messages", "messages"]


async def test_anthropic_tools_go_on_from_their_own_bytes(adding: Proxy) -> None:
    async with claude_of(adding) as client:
        fields: dict[str, Any] = {"model": "r", "max_tokens": 200, "tools": anthropic_tools("add")}
        async with client.messages.stream(**fields, messages=USER) as stream:
            first: Any = await stream.get_final_message()
        used = [block for block in first.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in used]
        content = [block.model_dump(exclude={"caller"}) for block in first.content]
        talk: Any = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        second: Any = await client.messages.create(**fields, messages=talk)
    assert first.stop_reason == "tool_use"
    assert [block.input for block in used] == [{"a": 1, "b": 2.0}, {"b": 3, "a": 4}]
    assert second.content[0].text == "done"
    one, two = await adding.calls()
    assert (two.parent, two.transition) == (one.call, "extend")


async def test_anthropic_stop_sequences_and_the_shell_tool(proxy: Proxy) -> None:
    async with claude_of(proxy) as client:
        cut: Any = await client.messages.create(model="r", max_tokens=90, messages=USER, stop_sequences=[" > "])
        called: Any = await client.messages.create(
            model="r", max_tokens=90, messages=USER, tools=anthropic_tools("bash")
        )
        length = await client.messages.create(model="r", max_tokens=2, messages=USER)
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", " > ", "echo one")
    assert [block.type for block in called.content] == ["tool_use"]
    assert called.content[0].input == {"command": "echo one > a.txt"}
    assert length.stop_reason == "max_tokens"


async def test_anthropic_errors_are_the_clients_own(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with proxied(bus, nats_server.url, tmp_path, ["ls"], max_turns=1, context_tokens=210) as proxy:
        async with claude_of(proxy) as client:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 210 maximum"):
                await client.messages.create(
                    model="r", max_tokens=9, messages=[{"role": "user", "content": "word " * 500}]
                )
            await client.messages.create(model="r", max_tokens=9, messages=USER)
            with pytest.raises(anthropic.APIStatusError) as spent:
                await client.messages.create(model="r", max_tokens=8, messages=USER)
            assert (spent.value.status_code, spent.value.type) == (402, "billing_error")
        async with anthropic.AsyncAnthropic(base_url=proxy.base, api_key="no") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="r", max_tokens=9, messages=USER)


async def test_a_clients_own_retry_gets_the_recorded_answer(proxy: Proxy) -> None:
    """It gave up before the answer was there, and asks again by itself."""
    proxy.host.delay_s = 0.05
    async with client_of(proxy) as client:
        hasty = client.with_options(timeout=0.3, max_retries=8)
        answer = await asked(hasty, USER)
    assert answer.choices[0].message.content == "echo one > a.txt"
    await asyncio.sleep(0)
    assert len(await proxy.calls()) == 1
