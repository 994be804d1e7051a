"""Starts of the vLLM engine that end in a refusal: a server of ours in vLLM's place, and a python that is none."""

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from opengyre.cli import up as stack_up
from opengyre.cli.bench_model import write_policy
from opengyre.host import vllm
from opengyre.host.vllm import VllmEngine
from opengyre.shared import vllm as shared_vllm
from opengyre.shared.settings import HostSettings
from opengyre.shared.vllm import VllmMissingError, checked_interpreter
from opengyre.tiny.types import EngineError
from opengyre.weights.canary import CANARY_FILE, encode, prompts_for
from support.vllm_directory import model
from support.vllm_stand_ins import COMMANDS, Alive, instead_of_vllm, program, refused

SCORE = -2.0


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
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_start_s=60, vllm_python=sys.executable))
    async with instead_of_vllm(monkeypatch, answer) as started:
        try:
            if not off:
                assert engine.load_bound_s == 60
                await engine.wake(directory, 0)
                assert engine.load_bound_s == vllm.COMMAND_S
                assert (engine.stats().state, engine.stats().version) == ("paused", 0)
                return
            with pytest.raises(EngineError, match=r"canary are off by 0.01 nats on average; allowed are 0\.001"):
                await engine.wake(directory, 0)
            stats = engine.stats()
            assert (stats.state, stats.weight_bytes, stats.kv_bytes) == ("asleep", 0, 0)
            assert started.stopped
        finally:
            await engine.close()


class Mortal(Alive):
    """A server that ends while its memory is looked at."""

    def __init__(self, url: str, engine: VllmEngine) -> None:
        super().__init__(url)
        self._engine, self._loop, self._ends = engine, asyncio.get_running_loop(), asyncio.Event()

    async def gone(self) -> None:
        await self._ends.wait()

    async def last_words(self) -> str:
        return "out of memory"

    def memory(self) -> int:
        self._loop.call_soon_threadsafe(self._ends.set)
        until = time.monotonic() + 10
        while self._engine.stats().state != "closed" and time.monotonic() < until:
            time.sleep(0.01)
        return 0


async def test_a_server_that_ends_as_its_start_is_done_is_not_taken_for_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host had an engine that answered nothing, and never left to be started again."""
    directory = model(tmp_path, dtype="float32")
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=sys.executable))
    async with instead_of_vllm(monkeypatch, answer, lambda url: Mortal(url, engine)) as started:
        try:
            with pytest.raises(EngineError, match="vLLM has ended by itself"):
                await engine.wake(directory, 0)
            assert engine.stats().state == "closed"
            assert started.stopped
        finally:
            await engine.close()


async def test_a_server_whose_workers_do_not_say_how_they_sample_is_not_served_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=sys.executable))
    async with instead_of_vllm(monkeypatch, say_nothing) as started:
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


def test_an_interpreter_is_asked_whether_it_has_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither the working directory nor what this process adds to its path is the server's.
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = program(tmp_path / "python", f'exec "{sys.executable}" -S "$@"')
    with pytest.raises(
        VllmMissingError, match=r"vllm_python is .*/python, which has no vLLM; allowed is the python of"
    ):
        checked_interpreter(python)
    fitting = program(tmp_path / "fitting", "echo True")
    assert checked_interpreter(fitting) == fitting
    broken = program(tmp_path / "broken", "exit 3")
    with pytest.raises(VllmMissingError, match=r"broken, which is no python that runs; allowed"):
        checked_interpreter(broken)


def test_an_interpreter_that_does_not_answer_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_vllm, "LOOK_S", 0.1)
    with pytest.raises(VllmMissingError, match=r"slow, which does not run \(.*timed out after 0.1 seconds\)"):
        checked_interpreter(program(tmp_path / "slow", "exec sleep 60"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_python_without_vllm_is_refused_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", "/nowhere")
    assert refused(*command).startswith("host.vllm_python is /nowhere; allowed is the python of an environment")
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", program(tmp_path / "python", "echo False"))
    assert f"host.vllm_python is {tmp_path / 'python'}, which has no vLLM; allowed is" in refused(*command)
    assert not list((tmp_path / "here").iterdir())


def test_keys_and_values_of_all_hosts_of_a_stack_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stack_up, "free_memory", lambda: 20 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", program(tmp_path / "python", "echo True"))
    monkeypatch.setenv("GYRE_HOST__VLLM_KV_GB", "15")
    for command in (("up",), ("demo", "--headless")):
        said = refused(*command, "--engine", "vllm", "--hosts", "2")
        assert said.endswith("beside 1024 MiB of each of 2 hosts' own, 20480 MiB of memory leave 9 GiB to each")


async def test_a_server_that_dies_at_its_start_says_its_cause_and_not_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "check_directory", lambda _: None)
    frames = ["echo '  File x, in run'"] * 30
    last = "echo 'RuntimeError: Engine core initialization failed. See root cause above.'"
    python = program(
        tmp_path / "python", "echo 'ERROR [core.py] ValueError: 50000 are not 49152'", *frames, last, "exit 1"
    )
    engine = VllmEngine(HostSettings(engine="vllm", vllm_context=64, vllm_python=python))
    with pytest.raises(EngineError, match=r"^vLLM ended while it started: ValueError: 50000 are not 49152$"):
        await engine.wake(model(tmp_path), 0)
    await engine.close()


@pytest.mark.torch
def test_a_directory_whose_config_is_not_its_weights_is_refused_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    rows = len(write_policy(directory, 512)["model.embed_tokens.weight"])
    config = directory / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "vocab_size": rows + 48}))
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", program(tmp_path / "python", "echo True"))
    said = refused("bench", "engine", "--model", str(directory))
    assert said.startswith(f"--model: {config}: vocab_size is {rows + 48}; ")
    assert said.endswith(f"has {rows} rows, so {rows} is allowed")
