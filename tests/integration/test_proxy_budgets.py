"""What an execution may spend, and what the real clients do when it is spent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from opengyre.proto.traj import Call, Ended
from opengyre.rollout import program
from opengyre.shared.bus import Bus
from support import eventually
from support.proxy import Proxy, proxied
from support.rollout_fakes import FakeHost, Stack, dispatch

SAYS = "echo one > a.txt; cp a.txt c.txt; ls -la /tmp; wc -l d.txt"


class Clients:
    """Both clients as they are, with their own retries, and what they sent."""

    def __init__(self, proxy: Proxy) -> None:
        self.sent: list[str] = []

        async def note(request: httpx.Request) -> None:
            self.sent.append(request.url.path.rpartition("/")[2])

        hooks: Any = {"request": [note]}
        self.openai = openai.AsyncOpenAI(
            base_url=f"{proxy.base}/v1", api_key=proxy.key,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
        )  # fmt: skip
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=proxy.base, api_key=proxy.key, http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=hooks)
        )

    async def chat(self, text: str, **more: Any) -> Any:
        return await self.openai.chat.completions.create(
            model="r", messages=[{"role": "user", "content": text}], **more
        )

    async def message(self, text: str, **more: Any) -> Any:
        fields: dict[str, Any] = {"model": "r", "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
        return await self.anthropic.messages.create(**{**fields, **more})


Start = Callable[..., Any]


@pytest.fixture
def start(bus: Bus, nats_server: Any, tmp_path: Path) -> Start:
    def started(script: Any = (SAYS,), **harness: Any) -> Any:
        return proxied(bus, nats_server.url, tmp_path, script, **harness)

    return started


@pytest.fixture
async def clients(start: Start) -> AsyncIterator[Clients]:
    async with start(token_budget=10) as proxy:
        made = Clients(proxy)
        async with made.openai, made.anthropic:
            yield made


async def test_a_spent_token_budget_is_refused_once_and_ends_the_episode(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_S", 4.0)  # in which the calls below are made
    async with start(token_budget=10) as proxy:
        clients = Clients(proxy)
        async with clients.openai, clients.anthropic:
            first = await clients.chat("one")
            assert first.choices[0].finish_reason == "length"
            assert first.usage.completion_tokens == 10
            with pytest.raises(openai.RateLimitError) as spent:
                await clients.chat("two")
            with pytest.raises(anthropic.APIStatusError) as billed:
                await clients.message("three")
            assert (await clients.chat("one")).id == first.id, "what is recorded stays answered"
        assert (spent.value.code, spent.value.param) == ("insufficient_quota", "token_budget")
        assert (billed.value.status_code, billed.value.type) == (402, "billing_error")
        assert clients.sent == ["completions", "completions", "messages", "completions"], "no retry"
        await eventually(lambda: proxy.stack.ended(proxy.episode))
        end = (await proxy.stack.log(proxy.episode))[-1]
    assert isinstance(end, Ended)
    assert (end.reason, end.sampled_tokens) == ("token_budget", 10)


async def test_the_shell_agent_ends_by_its_token_budget(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    stack = Stack(bus, tmp_path, nats_server.url)
    await stack.prepare()
    episode = dispatch(token_budget=20, max_turns=40)
    async with stack.sandboxes.up(), stack.host("h0", [SAYS] * 40).up(), stack.service():
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode))
        events = await stack.log(episode)
    assert isinstance(events[-1], Ended)
    assert events[-1].reason == "token_budget"
    assert events[-1].sampled_tokens == sum(len(event.sampled_ids) for event in events if isinstance(event, Call)) == 20


async def test_choices_share_the_token_budget(clients: Clients) -> None:
    answer = await clients.chat("one", n=2)
    assert answer.usage.completion_tokens == 10
    with pytest.raises(openai.RateLimitError):
        await clients.chat("two")


async def test_more_choices_than_tokens_are_refused(clients: Clients) -> None:
    with pytest.raises(openai.RateLimitError) as spent:
        await clients.chat("one", n=11)
    assert spent.value.code == "insufficient_quota"
    assert len(clients.sent) == 1


async def test_a_call_beside_one_that_holds_the_budget_waits(start: Start) -> None:
    """Both together would be too much; the client is told to try again, and does by itself."""

    def holding(stack: Stack) -> FakeHost:
        host = stack.host("h0", ["ls -la"])
        host.streams, host.hold_after = True, 2
        return host

    async with start(holding, token_budget=30, max_tokens=30) as proxy:
        clients = Clients(proxy)
        async with clients.openai, clients.anthropic:
            first = asyncio.create_task(clients.chat("one"))
            await eventually(lambda: proxy.host.calls)
            clients.openai = clients.openai.with_options(max_retries=20)
            second = asyncio.create_task(clients.chat("two"))
            await eventually(lambda: len(clients.sent) > 2)  # it was told to, once
            proxy.host.go_on.set()
            proxy.host.hold_after = None
            one, two = await first, await second
        assert one.usage.completion_tokens + two.usage.completion_tokens <= 30


async def test_no_client_repeats_what_can_never_be_served(start: Start) -> None:
    """400 for a context that is too long, with the words by which clients know it; also as a stream."""
    long = "word " * 500
    async with start(context_tokens=210) as proxy:
        clients = Clients(proxy)
        async with clients.openai, clients.anthropic:
            for more in ({}, {"stream": True}):
                with pytest.raises(openai.BadRequestError) as refused:
                    await clients.chat(long, **more)
                assert refused.value.code == "context_length_exceeded"
                assert "maximum context length is 210 tokens" in str(refused.value)
                with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 210 maximum"):
                    await clients.message(long, **more)
        assert len(clients.sent) == 4


async def test_a_call_never_goes_beyond_the_context(start: Start) -> None:
    async with start(["word " * 300], context_tokens=210) as proxy:
        clients = Clients(proxy)
        async with clients.openai, clients.anthropic:
            answer = await clients.chat("go on", max_tokens=10_000)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens <= 210


async def test_a_key_that_is_not_the_executions_is_refused_once(start: Start) -> None:
    async with start() as proxy:
        clients = Clients(proxy)
        async with clients.openai, clients.anthropic:
            with pytest.raises(openai.AuthenticationError):
                await clients.openai.with_options(api_key="no").models.list()
            with pytest.raises(anthropic.AuthenticationError):
                await clients.anthropic.with_options(api_key="no").models.list()
        assert len(clients.sent) == 2
