"""Long prompts: nobody waits for another's, and those that are too long cost nothing."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.rollout.recorder import LONG
from opengyre.shared.bus import Bus
from opengyre.tiny.tokenizer import TinyTokenizer
from support import eventually
from support.proxy import Proxy, proxied
from support.rollout_fakes import dispatch

TEXT = "one two three " * (LONG // 10)


class Held:
    """The encoding of a long text, which waits for `go_on`; `threads` are those that asked for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.threads: list[threading.Thread] = []
        encode = TinyTokenizer.encode

        def held(tokenizer: TinyTokenizer, text: str) -> list[int]:
            if len(text) >= LONG:
                self.threads.append(threading.current_thread())
                assert self.go_on.wait(100), "on the event loop, which can let nobody go on"
            return encode(tokenizer, text)

        monkeypatch.setattr(TinyTokenizer, "encode", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go_on.set()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "r", "messages": [{"role": "user", "content": text}], **more}


async def others_are_answered(proxy: Proxy, folder: Path) -> None:
    """What is not a call, and a call of another execution."""
    root = proxy.base.partition("/x/")[0]
    async with proxy.session.get(f"{proxy.base}/v1/models") as response:
        assert response.status == 200
    other = dispatch(agent="program", program="wait", number=1, max_turns=40, context_tokens=2000, max_tokens=20)
    await proxy.stack.submit(other)
    await eventually(lambda: len(proxy.stack.sandboxes.ran) == 2)
    key = Endpoints(load_secret(folder / "state")).key(other.execution)
    url = f"{root}/x/{other.execution}/v1/chat/completions"
    async with proxy.session.post(url, json=chat("go"), headers={"Authorization": f"Bearer {key}"}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
async def test_a_long_prompt_freezes_no_other_execution(
    path: str, bus: Bus, nats_server: Any, tmp_path: Path, held: Held
) -> None:
    async with proxied(bus, nats_server.url, tmp_path, ["done"], context_tokens=4 * LONG) as proxy:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(proxy.post(path, chat(TEXT)))
            await eventually(lambda: held.threads)
            async with asyncio.timeout(90):
                await others_are_answered(proxy, tmp_path)
            assert not long.done()
            held.go_on.set()
        status, body, _ = long.result()
        assert status == 200
        used = body["input_tokens"] if path == "messages/count_tokens" else body["usage"]["prompt_tokens"]
        assert used == len(proxy.host.tokenizer.render([{"role": "user", "content": TEXT}]))


async def test_calls_begin_in_the_order_of_their_requests_and_encode_a_prompt_once(
    bus: Bus, nats_server: Any, tmp_path: Path, held: Held
) -> None:
    async with proxied(bus, nats_server.url, tmp_path, ["done"], context_tokens=4 * LONG) as proxy:
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(proxy.post("chat/completions", chat(TEXT, n=2)))]
            await eventually(lambda: held.threads)
            first += [group.create_task(proxy.post("chat/completions", chat(TEXT, n=2)))]
            second = group.create_task(proxy.post("chat/completions", chat("short")))
            held.go_on.set()
        long, again = (task.result()[1] for task in first)
        assert long["choices"] == again["choices"]
        assert second.result()[0] == 200
        calls = {call.call: call for call in await proxy.calls()}
        assert len(held.threads) == 1, "the request again joins the calls, and its choices share a prompt"
        assert [len(calls[name].prompt_ids) > 100 for name in ("c0000", "c0001")] == [True, True]
        assert set(calls) == {"c0000", "c0001", "c0002"}


async def test_a_prompt_that_is_sure_to_be_too_long_is_refused_unencoded(
    bus: Bus, nats_server: Any, tmp_path: Path, held: Held
) -> None:
    async with proxied(bus, nats_server.url, tmp_path, ["done"]) as proxy:
        text = "one two " * 120_000  # just under what aiohttp's client warns of
        status, body, _ = await proxy.post("chat/completions", chat(text))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 2000 tokens. However, your messages resulted in at least " in str(body)
        status, body, _ = await proxy.post("messages", chat(text, max_tokens=9))
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["message"].startswith("prompt is too long: ")
        assert held.threads == []
