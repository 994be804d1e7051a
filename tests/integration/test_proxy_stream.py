"""Streams as clients see them: text as it is sampled, and the record before the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from opengyre.proto import subjects
from opengyre.proto.host import HostState
from opengyre.proto.traj import Suspended
from opengyre.rollout import streams
from opengyre.shared.bus import Bus
from support import eventually
from support.proxy import Proxy, anthropic_tools, openai_tools, proxied
from support.rollout_fakes import FakeHost, Stack

USER: Any = [{"role": "user", "content": "write one into a.txt"}]
SAYS = "écho 日本 🙂 one > a.txt"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b":2.0}}</tool_call>'


def slow(*script: str) -> Callable[[Stack], FakeHost]:
    """A host that sends each token as it is said."""

    def made(stack: Stack) -> FakeHost:
        host = stack.host("h0", list(script))
        host.streams = True
        return host

    return made


@pytest.fixture
async def proxy(bus: Bus, nats_server: Any, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with proxied(bus, nats_server.url, tmp_path, slow(SAYS, "done", "done"), streams="live") as made:
        yield made


def client_of(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.base}/v1", api_key=proxy.key, max_retries=0)


def claude_of(proxy: Proxy) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.base, api_key=proxy.key, max_retries=0)


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.create(model="r", messages=USER, stream=True, **more)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_text_comes_as_it_is_sampled_and_the_end_after_the_record(proxy: Proxy) -> None:
    proxy.host.hold_after = 12
    proxy.host.delay_s = 0.01  # what comes together is told together
    async with client_of(proxy) as client:
        stream = await streamed(client, logprobs=True, stream_options={"include_usage": True})
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if not proxy.host.go_on.is_set() and len(text_of(chunks)) > 5:
                assert await proxy.calls() == []
                proxy.host.go_on.set()
            if chunk.choices and chunk.choices[0].finish_reason:
                assert len(await proxy.calls()) == 1
    [call] = await proxy.calls()
    assert text_of(chunks) == call.text == SAYS
    assert len([chunk for chunk in chunks if text_of([chunk])]) > 3
    heard = [token for c in chunks for choice in c.choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.logprob for token in heard] == list(call.logprobs)
    assert chunks[-1].usage.completion_tokens == len(call.sampled_ids)
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{call.execution}-{call.call}"}


async def test_anthropic_text_comes_as_it_is_sampled(proxy: Proxy) -> None:
    proxy.host.hold_after = 12
    proxy.host.delay_s = 0.01  # what comes together is told together
    parts: list[str] = []
    async with (
        claude_of(proxy) as client,
        client.messages.stream(model="r", max_tokens=100, messages=USER) as stream,
    ):
        async for part in stream.text_stream:
            parts.append(part)
            if not proxy.host.go_on.is_set() and len("".join(parts)) > 5:
                assert await proxy.calls() == []
                proxy.host.go_on.set()
        final: Any = await stream.get_final_message()
    [call] = await proxy.calls()
    assert "".join(parts) == final.content[0].text == call.text == SAYS
    assert len(parts) > 3
    assert final.usage.output_tokens == len(call.sampled_ids)
    assert final.usage.input_tokens == len(call.prompt_ids)


async def test_text_completions_come_as_they_are_sampled(proxy: Proxy) -> None:
    proxy.host.hold_after = 8
    text, heard = "", []
    async with client_of(proxy) as client:
        stream: Any = await client.completions.create(model="r", prompt="do: <", stream=True, logprobs=1)
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                heard += choice.logprobs.token_logprobs if choice.logprobs else []
            if not proxy.host.go_on.is_set() and len(text) > 2:
                assert await proxy.calls() == []
                proxy.host.go_on.set()
    [call] = await proxy.calls()
    assert text == call.text
    assert heard == list(call.logprobs)


async def test_what_a_host_said_before_it_was_lost_is_kept_and_continued(proxy: Proxy) -> None:
    proxy.host.cut_after = 10
    async with client_of(proxy) as client:
        chunks = [chunk async for chunk in await streamed(client)]
    [call] = await proxy.calls()
    assert text_of(chunks) == call.text == SAYS
    first, second = proxy.host.requests
    assert second["token_ids"] == [*first["token_ids"], *call.sampled_ids[:10]]
    assert second["sampling_params"]["max_tokens"] == first["sampling_params"]["max_tokens"] - 10
    assert call.hosts == ("h0", "h0")
    assert len(call.moves_s) == 1


async def test_a_stop_string_is_never_seen_and_ends_the_sampling(proxy: Proxy) -> None:
    """It is held back while it may become one; the host is not asked for what nobody wants."""
    proxy.host.hold_after = 20
    async with client_of(proxy) as client:
        chunks = [chunk async for chunk in await streamed(client, stop=["本 🙂", "never"])]
    [call] = await proxy.calls()
    assert text_of(chunks) == call.text == "écho 日"
    assert call.stop == "本 🙂"
    assert chunks[-1].choices[0].finish_reason == "stop"
    await eventually(lambda: proxy.host.calls == 0)
    assert not proxy.host.go_on.is_set()


async def test_tool_calls_are_not_seen_as_text(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    script = slow(f"adding now {CALL}", "done")
    async with proxied(bus, nats_server.url, tmp_path, script, streams="live") as proxy, client_of(proxy) as client:
        proxy.host.hold_after = len(proxy.stack.tokenizer.encode(" adding now")) + 3
        chunks = []
        async for chunk in await streamed(client, tools=openai_tools("add")):
            chunks.append(chunk)
            if text_of(chunks) == "adding now":
                proxy.host.go_on.set()
        [call] = await proxy.calls()
        made = [delta for c in chunks for choice in c.choices for delta in choice.delta.tool_calls or ()]
        assert text_of(chunks) == call.content == "adding now"
        assert "".join(delta.function.arguments or "" for delta in made) == call.tool_calls[0].arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_choices_are_streamed_side_by_side(proxy: Proxy) -> None:
    async with client_of(proxy) as client:
        chunks = [chunk async for chunk in await streamed(client, n=3, stream_options={"include_usage": True})]
    calls = await proxy.calls()
    assert [text_of(chunks, index) for index in range(3)] == [SAYS] * 3
    assert chunks[-1].usage.completion_tokens == sum(len(call.sampled_ids) for call in calls)
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def test_a_parked_stream_says_that_it_waits(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments for OpenAI's clients, `ping` for Anthropic's, for every choice together."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.1)
    await proxy.host.become(HostState.DRAINING)

    async def suspended() -> bool:
        return any(isinstance(event, Suspended) for event in await proxy.stack.log(proxy.episode))

    body = {"model": "r", "messages": USER, "stream": True}
    for path, more, waits in (
        ("chat/completions", {"n": 2}, b": waiting\n\n"),
        ("messages", {"max_tokens": 50}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    ):
        await proxy.host.become(HostState.DRAINING)
        content, resumed = b"", False
        async with proxy.session.post(f"{proxy.base}/v1/{path}", json={**body, **more}) as response:
            assert response.status == 200
            async for chunk in response.content.iter_any():
                content += chunk
                if content.count(waits) >= 3 and not resumed:
                    resumed = True
                    await eventually(suspended)
                    await proxy.host.become(HostState.ROLLOUT)
        assert content.count(waits) >= 3
        assert content.endswith((b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n'))
    assert len(await proxy.calls()) == 3


async def fence(proxy: Proxy) -> None:
    """Another writer appends first."""
    episode = proxy.episode
    subject = subjects.traj(episode.run, episode.group, episode.execution, "started")
    await proxy.stack.bus.publish_raw(subject, b"{}", "rival", "traj.started.v1")


async def test_a_stream_whose_record_fails_ends_with_openais_error(proxy: Proxy) -> None:
    proxy.host.hold_after = 12
    seen: list[str] = []

    async def follow(client: openai.AsyncOpenAI) -> None:
        async for chunk in await streamed(client):
            seen.append(text_of([chunk]))
            if "".join(seen) and not proxy.host.go_on.is_set():
                await fence(proxy)
                proxy.host.go_on.set()

    async with client_of(proxy) as client:
        with pytest.raises(openai.APIError, match="moved"):
            await follow(client)
    assert SAYS.startswith("".join(seen))


async def test_a_stream_whose_record_fails_ends_with_anthropics_error(proxy: Proxy) -> None:
    proxy.host.hold_after = 12
    seen: list[str] = []

    async def follow(client: anthropic.AsyncAnthropic) -> None:
        async for event in await client.messages.create(model="r", max_tokens=90, messages=USER, stream=True):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                seen.append(event.delta.text)
                await fence(proxy)
                proxy.host.go_on.set()

    async with claude_of(proxy) as client:
        with pytest.raises(anthropic.APIStatusError, match="moved"):
            await follow(client)
    assert SAYS.startswith("".join(seen))


async def test_a_client_that_leaves_a_stream_finds_the_record(proxy: Proxy) -> None:
    proxy.host.hold_after = 12
    async with client_of(proxy) as client:
        stream = await streamed(client)
        async for chunk in stream:
            if text_of([chunk]):
                break
        await stream.close()
        assert await proxy.calls() == []
        joined = asyncio.create_task(streamed(client))
        proxy.host.go_on.set()
        chunks = [chunk async for chunk in await joined]
        again = [chunk async for chunk in await streamed(client)]
    assert text_of(chunks) == text_of(again) == SAYS
    assert len(await proxy.calls()) == 1
    assert len(proxy.host.requests) == 1


async def test_recorded_streams_begin_with_the_record(
    bus: Bus, nats_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with a comment: a client repeats a request only if its answer had not begun."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)
    async with (
        proxied(bus, nats_server.url, tmp_path, slow(SAYS)) as proxy,
        client_of(proxy) as client,
    ):
        proxy.host.hold_after = 12
        asking = asyncio.create_task(streamed(client))
        await eventually(lambda: proxy.host.calls)
        assert not (await asyncio.wait([asking], timeout=0.2))[0]
        proxy.host.go_on.set()
        stream = await asking
        assert len(await proxy.calls()) == 1
        assert text_of([chunk async for chunk in stream]) == SAYS


async def test_an_error_before_the_first_token_is_no_stream(proxy: Proxy) -> None:
    async with client_of(proxy) as client, claude_of(proxy) as claude:
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(
                model="r", messages=[{"role": "user", "content": "word " * 3000}], stream=True
            )
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await claude.messages.create(
                model="r", messages=[{"role": "user", "content": "word " * 3000}], stream=True, max_tokens=9
            )
    assert long.value.code == "context_length_exceeded"


async def test_forced_and_single_tool_calls(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    """What opens a forced call is context: it is in the prompt, no log-prob is made up for it, and the next prompt
    goes on from it."""
    async with proxied(bus, nats_server.url, tmp_path, slow(f"{CALL}{CALL}", "done", "done")) as proxy:
        named: Any = {"type": "function", "function": {"name": "add"}}
        async with client_of(proxy) as client:
            first = await client.chat.completions.create(
                model="r", messages=USER, tools=openai_tools("add"), tool_choice=named
            )
            message = first.choices[0].message
            [made] = message.tool_calls or []
            assert made.type == "function"
            assert json.loads(made.function.arguments) == {"a": 1, "b": 2.0}
            talk: Any = [*USER, message, {"role": "tool", "tool_call_id": made.id, "content": "3"}]
            await client.chat.completions.create(model="r", messages=talk, tools=openai_tools("add"))
            single = await client.chat.completions.create(
                model="r", messages=USER, tools=openai_tools("add"), parallel_tool_calls=False
            )
            assert len(single.choices[0].message.tool_calls or ()) == 1
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await client.chat.completions.create(model="r", messages=USER, tool_choice="required")
        one, two, three = await proxy.calls()
        decode = proxy.stack.tokenizer.decode
        assert decode(one.prompt_ids[-one.forced :]) == ' <tool_call>{"name": "add", "arguments": '
        assert decode(one.sampled_ids) == '{"a": 1,  "b":2.0}}</tool_call>'
        assert len(one.logprobs) == len(one.sampled_ids)
        assert (two.transition, two.parent, two.forced) == ("extend", one.call, 0)
        assert decode(three.sampled_ids) == f" {CALL}"
        async with claude_of(proxy) as claude:
            fields: dict[str, Any] = {
                "model": "r",
                "max_tokens": 190,
                "messages": USER,
                "tools": anthropic_tools("add"),
            }
            anyone: Any = await claude.messages.create(**fields, tool_choice={"type": "any"})
            async with claude.messages.stream(
                **fields, tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True}
            ) as stream:
                tool: Any = await stream.get_final_message()
            for answer, count in ((anyone, 2), (tool, 1)):
                assert [block.type for block in answer.content] == ["tool_use"] * count
                assert answer.content[0].input == {"a": 1, "b": 2.0}
                assert answer.stop_reason == "tool_use"
