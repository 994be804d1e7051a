"""Calls that a second host is asked for, and where an execution's calls go."""

from pathlib import Path
from typing import Any

from opengyre.shared.bus import Bus
from support import eventually
from support.proxy import proxied
from support.rollout_fakes import FakeHost, Stack

SAYS = "cp a.txt b.txt and so on"
ASK = {"model": "r", "messages": [{"role": "user", "content": "go"}]}
HEDGED = {"hedge_after_s": 0.1}


def hung(stack: Stack) -> FakeHost:
    """It takes calls, and its heart beats."""
    host = stack.host("h0", [SAYS])
    host.streams = True
    host.hold_after = 0
    return host


async def test_a_call_that_a_host_sits_on_is_answered_by_another(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with (
        proxied(bus, nats_server.url, tmp_path, hung, HEDGED) as proxy,
        proxy.stack.host("h1", [SAYS]).up() as other,
    ):
        status, answer, _ = await proxy.post("chat/completions", ASK)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, SAYS)
        [call] = await proxy.calls()
        assert (call.hosts, call.moves_s) == (("h1",), ())
        assert len(proxy.host.requests) == len(other.requests) == 1
        assert proxy.host.requests[0]["token_ids"] == other.requests[0]["token_ids"]
        assert proxy.host.requests[0]["request_id"] != other.requests[0]["request_id"]
        await eventually(lambda: proxy.host.calls == 0)


async def test_a_host_that_is_killed_after_it_won_loses_no_token(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with (
        proxied(bus, nats_server.url, tmp_path, hung, HEDGED) as proxy,
        proxy.stack.host("h1", [SAYS]).up() as other,
    ):
        other.streams = True
        other.cut_after = 5
        status, answer, _ = await proxy.post("chat/completions", ASK)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, SAYS)
        [call] = await proxy.calls()
        assert call.hosts == ("h1", "h1")
        first, *_, last = other.requests
        assert last["token_ids"] == [*first["token_ids"], *call.sampled_ids[:5]]
        assert [span.end for span in call.versions][-1] == len(call.sampled_ids) == len(call.logprobs)


async def test_nobody_is_asked_twice_where_hedging_is_off(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    async with (
        proxied(bus, nats_server.url, tmp_path, hung) as proxy,
        proxy.stack.host("h1", [SAYS]).up() as other,
    ):
        proxy.host.hold_after = None
        proxy.host.delay_s = 0.02
        await proxy.post("chat/completions", ASK)
        [call] = await proxy.calls()
        assert call.hosts == ("h0",)
        assert other.requests == []


async def test_the_first_calls_of_an_execution_share_a_host(bus: Bus, nats_server: Any, tmp_path: Path) -> None:
    """Their prompts have the same beginning; by load alone they would be spread."""

    def slow(stack: Stack) -> FakeHost:
        host = stack.host("h0", [SAYS])
        host.delay_s = 0.02
        return host

    async with (
        proxied(bus, nats_server.url, tmp_path, slow) as proxy,
        proxy.stack.host("h1", [SAYS]).up() as other,
    ):
        other.delay_s = 0.02
        status, _, _ = await proxy.post("chat/completions", {**ASK, "n": 4})
        assert status == 200
        calls = await proxy.calls()
        assert len(calls) == 4
        assert len({call.hosts for call in calls}) == 1
