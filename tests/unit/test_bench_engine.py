"""`gyre bench engine`: what it says of what was measured, what it measures, and which options it refuses."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from opengyre.cli import bench_engine
from opengyre.cli.bench_engine_facts import Life, Reload, Sampled, facts, span
from opengyre.cli.bench_engine_life import FURTHER, Prompts, live
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.host.engine import CallProgress
from opengyre.proto.host import Sampler
from opengyre.tiny.types import (
    EngineError,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Increment,
    VersionSpan,
)


class Scripted:
    """An engine whose calls have a token where they are looked for, but for none while it is paused."""

    name = "scripted"
    capacity = 8.0
    takes_turns = True
    load_bound_s = None

    def __init__(self, *, named: bool = True, lasting: bool = True, stall: float = 0.0) -> None:
        self.done: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self._named, self._lasting, self._stall = named, lasting, stall
        self._state, self._version = "asleep", -1
        self._calls: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._sampled: dict[str, int] = {}
        self._changed: dict[str, int] = {}

    def submit(self, request: GenerateRequest) -> "asyncio.Future[GenerateResult]":
        future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self.prompts.append(request.token_ids)
        if request.max_tokens == 1:
            future.set_result(GenerateResult((7,), (-1.0,), "length", (VersionSpan(self._version, 0, 1),)))
        else:
            self._calls[request.request_id], self._sampled[request.request_id] = (request, future), 0
        return future

    async def pause(self) -> None:
        self.done.append("pause")
        self._state = "paused"
        if not self._lasting:
            self._sampled.popitem()

    async def resume(self) -> None:
        self.done.append("resume")
        self._state = "running"

    async def load(self, directory: Path, version: int) -> None:
        assert self._state == "paused"
        self.done.append(f"load {version} under {len(self._calls)}")
        self._version, self._changed = version, dict(self._sampled)

    async def sleep(self) -> None:
        assert not self._calls
        self.done.append("sleep")
        self._state = "asleep"

    async def wake(self, directory: Path, version: int) -> None:
        self.done.append("wake")
        self._state, self._version = "paused", version

    async def abort(self, request_ids: object) -> int:
        for name, (_, future) in self._calls.items():
            sampled, changed = self._sampled.get(name, 1), self._changed.get(name, 1)
            spans = (VersionSpan(0, 0, changed), VersionSpan(1, changed, sampled))
            future.set_result(GenerateResult((7,) * sampled, (), "abort", spans if self._named else spans[:1]))
        count = len(self._calls)
        for one in (self._calls, self._sampled, self._changed):
            one.clear()
        return count

    def stats(self) -> EngineStats:
        held = (3 << 20) if self._state != "asleep" else 0
        return EngineStats(
            state=self._state, version=self._version, running=0, waiting=0, tokens=0, tokens_per_s=0.0,
            kv_bytes=held, weight_bytes=held,
        )  # fmt: skip

    def sampler(self) -> Sampler | None:
        return Sampler()

    def progress(self) -> list[CallProgress]:
        if self._state == "running":
            if self._stall and max(self._sampled.values(), default=0) > 100:
                time.sleep(self._stall)
                self._stall = 0.0
            self._sampled = {name: count + 8 for name, count in self._sampled.items()}
        return [CallProgress(name, 300, count, FURTHER) for name, count in self._sampled.items()]

    def sampled(self, request_id: str, after: int) -> Increment:
        return Increment()

    async def close(self) -> None:
        self.done.append("close")


def life(cold: tuple[float, ...], warm: tuple[float, ...], start: float = 10.0) -> Life:
    reload = Reload(pause=0.1, load=0.5, resume=0.01, first=2.0, every=3.0, gap=2.6, came=8)
    return Life(start, cold, warm, Sampled(600.0, late=0.01), reload, end=0.4, serving=4 << 30, after=0)


def test_a_ratio_is_of_calls_that_were_made_one_after_the_other() -> None:
    found = facts(
        [life((2.0, 4.0), (0.2, 1.0)), life((3.0, 1.0), (0.3, 0.05), start=20.0)],
        model="m", dtype="float32", processors=2, threads=2, context=2048, stream_interval=8, prompt=1500,
        calls=4,
    )  # fmt: skip
    assert (found.rounds, found.pairs, found.tokens_at_once) == (2, 4, 8)
    assert (found.cold.low, found.cold.median, found.cold.high) == (1.0, 2.5, 4.0)
    assert (found.warm_of_cold.low, found.warm_of_cold.median, found.warm_of_cold.high) == (0.05, 0.1, 0.25)
    assert (found.start.median, found.gap.median, found.serving_mib.high, found.after_mib.high) == (15, 2.6, 4096, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_median_lies_between_lowest_and_highest(values: list[float]) -> None:
    found = span(values)
    assert found.low <= found.median <= found.high


async def test_a_life_is_measured_from_start_to_end() -> None:
    engine, said = Scripted(stall=0.05), list[str]()
    found = await live(engine, Path(), Prompts(50, 300), 2, 3, said.append)
    assert engine.done == ["wake", "resume", "pause", "load 1 under 3", "resume", "sleep", "close"]
    assert (found.serving, found.after, found.reload.came) == (6 << 20, 0, 8)
    assert found.reload.gap >= found.reload.first
    first, cold, warm, again, *_ = engine.prompts
    assert len({first, cold, again}) == 3, "of a new prompt nothing is cached"
    assert warm == (*cold, 7), "the same call, gone on with what was sampled"
    assert {len(prompt) for prompt in engine.prompts} == {300, 301}
    assert len(said) == 5
    assert found.sampled.late >= 0.045, "once nobody else got a processor"
    assert 0 < found.sampled.tokens_per_s < 3 * 300 / 0.045


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (Scripted(named=False), "a call in flight does not say that weights changed"),
        (Scripted(lasting=False), "1 of 3 calls ended before weights changed"),
    ],
)
async def test_what_shows_no_change_of_weights_is_no_measurement(engine: Scripted, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        await live(engine, Path(), Prompts(50, 300), 1, 3, lambda _: None)
    assert engine.done[-1] == "close"


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bench", "engine", *arguments])
    assert isinstance(done.exception, StackError)
    return str(done.exception)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, but no start of it."""
    monkeypatch.setattr(bench_engine, "checked_interpreter", lambda _: "python")


@pytest.mark.usefixtures("there")
def test_options_that_cannot_be_measured_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--prompt is 1600; with host.vllm_context = 2048 allowed are 256 to 1536"
    assert said in refused("--prompt", "1600")
    assert "--calls is 40; with host.capacity = 32 allowed are up to that" in refused("--calls", "40")
    assert f"--model: {tmp_path / 'none'} is no directory" in refused("--model", str(tmp_path / "none"))
    monkeypatch.setenv("GYRE_HOST__VLLM_CONTEXT", "512")
    assert "host.vllm_context is 512; allowed here are 768 and more" in refused()


def test_without_vllm_it_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", str(tmp_path / "python"))
    assert "host.vllm_python is" in refused()
