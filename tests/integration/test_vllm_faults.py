"""The vLLM engine of a host, where its server fails: a server of ours that speaks as vLLM does, and does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from opengyre.host import vllm, vllm_metrics
from opengyre.host.vllm import VllmEngine
from opengyre.host.vllm_calls import Sampling
from opengyre.host.vllm_plan import facts_of, plan
from opengyre.host.vllm_process import Server
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.settings import HostSettings, HttpSettings
from opengyre.tiny.types import EngineError, GenerateRequest, WrongStateError
from support import eventually
from support.vllm_directory import model


class Fake:
    """Answers every command, until it is told to fail at one."""

    def __init__(self) -> None:
        self.fails: str | None = None
        self.times = 0
        """How often it fails yet."""
        self.asked: list[str] = []
        self.page: str | None = ""
        """Of metrics; None: it is not served."""

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        if path == self.fails and self.times > 0:
            self.times -= 1
            return JSONResponse({"error": {"message": "out of memory"}}, status_code=500)
        if path == "/metrics":
            return PlainTextResponse(self.page or "", status_code=404 if self.page is None else 200)
        return JSONResponse({"results": []})


@asynccontextmanager
async def paused(folder: Path, fake: Fake) -> AsyncIterator[VllmEngine]:
    """An engine with the fake in the place of its server."""
    sock = listen(HttpSettings())
    app = app_of([Route("/{path:path}", fake.answer, methods=["GET", "POST"])])
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64))
    async with serving_http(sock, app, shutdown_s=1):
        server = Server.__new__(Server)
        server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        engine._server, engine._facts = server, facts_of(folder)
        engine._plan = plan(engine._facts, engine._settings, gpus=0, free_bytes=16 << 30)
        engine._state, engine._version, engine._directory = "paused", 3, folder
        try:
            yield engine
        finally:
            engine._server = None  # it is not a process
            await engine.close()


@pytest.mark.parametrize("command", ["/collective_rpc", "/update_weight_version"])
async def test_a_load_that_failed_half_way_is_taken_back(tmp_path: Path, command: str) -> None:
    """Some weights may be the new ones, under the old version's number."""
    fake = Fake()
    async with paused(model(tmp_path), fake) as engine:
        fake.fails, fake.times = command, 1
        with pytest.raises(EngineError, match=f"500 to {command}"):
            await engine.load(tmp_path, 4)
        assert (engine.stats().state, engine.stats().version) == ("paused", 3)
        assert fake.asked[-2:] == ["/collective_rpc", "/update_weight_version"]


@pytest.mark.parametrize("command", ["/collective_rpc", "/update_weight_version"])
async def test_an_engine_whose_load_failed_half_way_serves_nothing_more(tmp_path: Path, command: str) -> None:
    """Neither the new weights nor the old ones are whole; its host leaves, to be started again."""
    fake = Fake()
    async with paused(model(tmp_path), fake) as engine:
        fake.fails, fake.times = command, 2
        engine._end = _nothing  # it is not a process
        with pytest.raises(EngineError, match=f"500 to {command}"):
            await engine.load(tmp_path, 4)
        assert engine.stats().state == "closed"
        with pytest.raises(WrongStateError):
            await engine.resume()


async def test_a_load_of_another_shape_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    fake = Fake()
    async with paused(model(tmp_path / "old"), fake) as engine:
        with pytest.raises(EngineError, match="another shape"):
            await engine.load(model(tmp_path / "new", vocab_size=101), 4)
        assert (engine.stats().state, engine.stats().version, fake.asked) == ("paused", 3, [])
        await engine.load(tmp_path / "old", 4)
        assert engine.stats().version == 4


async def _nothing() -> None:
    pass


def figures(running: int, waiting: int, generated: int, hits: int) -> str:
    return "\n".join(
        (
            f'vllm:num_requests_running{{engine="0"}} {running}.0',
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.97',
            f'vllm:generation_tokens_total{{engine="0"}} {generated}.0',
            f'vllm:prefix_cache_queries_total{{engine="0"}} {4 * hits}.0',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0',
        )
    )


async def test_what_the_engine_says_of_itself_is_what_its_host_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "MEASURE_S", 0.05)
    monkeypatch.setattr(vllm_metrics, "RATE_S", 0.5)
    fake = Fake()
    async with paused(model(tmp_path), fake) as engine:
        server = engine._server
        assert server is not None
        monkeypatch.setattr(server, "memory", lambda: 1 << 20, raising=False)
        for name in ("a", "b", "c"):
            engine._calls[name] = Sampling(GenerateRequest(name, (1, 2), 5), 3)
        fake.page = figures(2, 1, 1000, 10)
        measuring = asyncio.create_task(engine._measure(server))
        try:
            await eventually(lambda: engine.stats().waiting == 1)
            stats = engine.stats()
            assert (stats.running, stats.kv_usage) == (2, 0.97)
            fake.page = figures(2, 1, 3_000_000, 30)  # however long that takes to be seen
            await eventually(lambda: engine.stats().prefix_hits == 0.25)
            assert engine.stats().tokens_per_s > 1000
            # A page that is not there says nothing of now; the calls themselves are known.
            fake.page = None
            await eventually(lambda: engine.stats().kv_usage == 0.0)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.prefix_hits, stats.tokens_per_s) == (3, 0, None, 0.0)
        finally:
            measuring.cancel()
            await asyncio.wait([measuring])
            engine._calls.clear()
