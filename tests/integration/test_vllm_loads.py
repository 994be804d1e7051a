"""New weights for the vLLM engine, with a server of ours in vLLM's place that scores as it is told; and processes that
vLLM's own start as the launcher has them start."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from opengyre.host.vllm import VllmEngine
from opengyre.host.vllm_process import SIDE, members
from opengyre.shared.settings import HostSettings
from opengyre.tiny.types import EngineBusyError, EngineError, GenerateRequest, WrongStateError
from opengyre.weights.canary import CANARY_FILE, encode, prompts_for
from support import eventually
from support.vllm_directory import model
from support.vllm_stand_ins import Alive, instead_of_vllm

RIGHT, WRONG = -2.0, -3.0
BOUND_S = 10


class Stand:
    """vLLM as the engine sees it: what it was asked in order, and what each directory's weights make of a token."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.scores: dict[str, float] = {}
        self.now = RIGHT
        self.loading: asyncio.Event | None = None
        """Set once a load is under way, which then does not end."""
        self.paused = asyncio.Event()
        self.paused.set()

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if path == "/metrics":
            return PlainTextResponse("")
        if path == "/health" or request.method == "GET":
            return JSONResponse({})
        body = json.loads(await request.body() or b"{}")
        method = body.get("method") if isinstance(body, dict) else None
        if method not in (None, "gyre_sampler", "gyre_memory"):
            self.asked.append("load")
            self.now = self.scores.get(Path(body["args"][0]).name, RIGHT)
            if self.loading is not None:
                self.loading.set()
                await asyncio.Event().wait()
        elif path in ("/pause", "/resume"):
            self.asked.append(path[1:])
        elif path == "/inference/v1/generate":
            if "score" not in self.asked[-1:]:
                self.asked.append("score")
            scored = [{str(token): {"logprob": self.now}} for token in body["token_ids"][1:]]
            return JSONResponse({"prompt_logprobs": [None, *scored]})
        return JSONResponse({"results": [{}]})


def version(folder: Path, name: str) -> Path:
    """A directory with the canary of a trainer that gives each token `RIGHT`."""
    (folder / name).mkdir()
    directory = model(folder / name, dtype="float32")
    prompts = prompts_for(100)
    content = encode(prompts, [[RIGHT] * (len(prompt) - 1) for prompt in prompts])
    assert content is not None
    (directory / CANARY_FILE).write_bytes(content)
    return directory


@asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[VllmEngine, Stand, Alive]]:
    """An engine that serves version 0, from `folder / "v0"`."""
    engine, stand = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=sys.executable)), Stand()
    async with instead_of_vllm(monkeypatch, stand.answer) as server:
        try:
            await engine.wake(version(folder, "v0"), 0)
            await engine.resume()
            await engine.pause()
            stand.asked.clear()
            yield engine, stand, server
        finally:
            await engine.close()


async def test_a_canary_is_asked_before_vllm_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that waited for seats took them all, and a good version was refused since its canary had none."""
    async with serving(tmp_path, monkeypatch) as (engine, stand, _):
        await engine.load(version(tmp_path, "v1"), 1)
        assert stand.asked == ["load", "score", "resume", "pause"]
        await engine.resume()
        assert engine.stats().version == 1


@pytest.mark.parametrize("kept", [True, False])
async def test_weights_that_are_put_back_are_proven_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """They came by the way that had just failed, and from files that may have changed."""
    async with serving(tmp_path, monkeypatch) as (engine, stand, server):
        stand.scores = {"v1": WRONG} if kept else {"v1": WRONG, "v0": WRONG}
        with pytest.raises(EngineError, match=r"v1's canary are off by 1 nats"):
            await engine.load(version(tmp_path, "v1"), 1)
        assert stand.asked[:4] == ["load", "score", "resume", "pause"]
        assert stand.asked[4:7] == ["load", "score", "resume"]
        assert server.stopped is not kept
        assert engine.stats().state == ("paused" if kept else "closed")
        if kept:
            await engine.resume()
            assert engine.stats().version == 0


async def test_a_load_that_is_cancelled_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM served weights that nobody had proven, under the version before."""
    async with serving(tmp_path, monkeypatch) as (engine, stand, _):
        stand.loading = asyncio.Event()
        load = asyncio.create_task(engine.load(version(tmp_path, "v1"), 1))
        await asyncio.wait_for(stand.loading.wait(), BOUND_S)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        with pytest.raises(WrongStateError, match="the weights that vLLM holds were not proven"):
            await engine.resume()
        assert "resume" not in stand.asked


async def test_no_call_comes_in_while_weights_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM goes on by the refused ones until it is paused."""
    async with serving(tmp_path, monkeypatch) as (engine, stand, _):
        stand.scores = {"v1": WRONG}
        pause, found = engine._pause, []

        async def pausing() -> None:
            with pytest.raises(EngineBusyError, match="weights are taken back"):
                engine.submit(GenerateRequest("c", (1, 2), 4))
            found.append("refused")
            await pause()

        monkeypatch.setattr(engine, "_pause", pausing)
        with pytest.raises(EngineError, match="canary are off"):
            await engine.load(version(tmp_path, "v1"), 1)
        assert found == ["refused"]


ENTRY = """
import multiprocessing, time

def work():
    print("spawned", flush=True)
    time.sleep(600)

def main():
    multiprocessing.get_context("spawn").Process(target=work).start()
    time.sleep(600)
"""


async def test_what_vllm_spawns_ends_with_its_server(tmp_path: Path) -> None:
    """On a GPU vLLM spawns its engine, which outlived a server that was killed, and kept the card."""
    entry = tmp_path / "vllm/entrypoints/launchers/api_server"
    platforms = tmp_path / "vllm/platforms"
    for folder in (entry, platforms):
        folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0'\n")
    (platforms / "__init__.py").write_text("class current_platform:\n    is_cpu = staticmethod(lambda: False)\n")
    (entry / "entry.py").write_text(ENTRY)
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gyre_vllm_launch", start_new_session=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{SIDE}:{tmp_path}", "GYRE_VLLM_PARENT": str(os.getpid())},
    )  # fmt: skip
    assert server.stdout is not None
    try:
        assert await asyncio.wait_for(server.stdout.readline(), 30) == b"spawned\n"
        server.kill()
        await eventually(lambda: members(server.pid) == [], BOUND_S)
    finally:
        for pid in members(server.pid):
            os.kill(pid, signal.SIGKILL)
        await server.wait()
