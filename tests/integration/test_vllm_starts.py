"""Starts of the vLLM engine that end in a refusal: a server of ours in vLLM's place, and a python that is none."""

import asyncio
import sys
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from opengyre.host import vllm
from opengyre.host.vllm import VllmEngine
from opengyre.host.vllm_process import Server
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.settings import HostSettings, HttpSettings
from opengyre.tiny.types import EngineError
from opengyre.weights.canary import CANARY_FILE, encode, prompts_for
from support.vllm_directory import model

SCORE = -2.0


class Program(Server):
    """A server that scores every token alike, as an engine knows its processes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stopped = False

    async def gone(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True

    def memory(self) -> int:
        return 0 if self.stopped else 1 << 30


async def answer(request: Request) -> Response:
    if request.url.path == "/inference/v1/generate":
        tokens = (await request.json())["token_ids"]
        scored = [{str(token): {"logprob": SCORE}} for token in tokens[1:]]
        return JSONResponse({"prompt_logprobs": [None, *scored]})
    return PlainTextResponse("") if request.url.path == "/metrics" else JSONResponse({"results": [{}]})


async def say_nothing(request: Request) -> Response:
    return PlainTextResponse("") if request.url.path == "/metrics" else JSONResponse({"results": []})


@pytest.mark.parametrize("off", [0.0, 0.01])
async def test_weights_that_are_not_proven_are_not_woken_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    """Nothing is left of the server that was started for them."""
    directory = model(tmp_path, dtype="float32")
    prompts = prompts_for(100)
    content = encode(prompts, [[SCORE + off] * (len(prompt) - 1) for prompt in prompts])
    assert content is not None
    (directory / CANARY_FILE).write_bytes(content)
    monkeypatch.setattr(vllm, "check_directory", lambda _: None)  # it holds no weights
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=sys.executable))
    sock = listen(HttpSettings())
    async with serving_http(sock, app_of([Route("/{path:path}", answer, methods=["GET", "POST"])]), shutdown_s=1):
        started = Program(f"http://127.0.0.1:{sock.getsockname()[1]}")

        async def start(*_: object) -> Server:
            return started

        monkeypatch.setattr(Server, "start", start)
        try:
            if not off:
                await engine.wake(directory, 0)
                assert (engine.stats().state, engine.stats().version) == ("paused", 0)
                return
            with pytest.raises(EngineError, match=r"canary are off by 0.01 nats on average; allowed are 0\.001"):
                await engine.wake(directory, 0)
            stats = engine.stats()
            assert (stats.state, stats.weight_bytes, stats.kv_bytes) == ("asleep", 0, 0)
            assert started.stopped
        finally:
            await engine.close()


async def test_a_server_whose_workers_do_not_say_how_they_sample_is_not_served_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "check_directory", lambda _: None)  # it holds no weights
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=sys.executable))
    sock = listen(HttpSettings())
    app = app_of([Route("/{path:path}", say_nothing, methods=["GET", "POST"])])
    async with serving_http(sock, app, shutdown_s=1):
        started = Program(f"http://127.0.0.1:{sock.getsockname()[1]}")

        async def start(*_: object) -> Server:
            return started

        monkeypatch.setattr(Server, "start", start)
        try:
            with pytest.raises(EngineError, match="says of its sampling what cannot be read"):
                await engine.wake(model(tmp_path, dtype="float32"), 0)
            assert engine.stats().state == "asleep"
            assert started.stopped
        finally:
            await engine.close()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "check_directory", lambda _: None)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'error: unrecognized arguments: --no-such-argument' >&2; exit 2\n")
    python.chmod(0o755)
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=str(python)))
    with pytest.raises(EngineError, match=r"vLLM ended while it started: .*--no-such-argument"):
        await engine.wake(model(tmp_path), 0)
    assert engine.stats().state == "asleep"
    await engine.close()
