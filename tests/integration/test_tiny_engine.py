"""The engine against the model it serves, through pauses, aborts, exchanges of weights and sleep."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.config import ModelDirectoryError, TinyConfig
from opengyre.tiny.engine import TinyEngine
from opengyre.tiny.model import TinyModel
from opengyre.tiny.state import TABLE, EngineEvent, EngineState, advance
from opengyre.tiny.types import (
    EngineBusyError,
    EngineClosedError,
    EngineSettings,
    GenerateRequest,
    GenerateResult,
    InvalidRequestError,
    VersionSpan,
    WrongStateError,
)

pytestmark = pytest.mark.torch

VOCAB = 97
SETTINGS = EngineSettings(max_batch=8, max_context=160, threads=1)
BOUND_S = 30


def _model(seed: int) -> TinyModel:
    model = TinyModel(TinyConfig(VOCAB, hidden_size=64, intermediate_size=96), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # As initialised, every distribution is near uniform and would hide a wrong cache.
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 1), ("b", 2)):
        save_pretrained(_model(seed), root / name)
    return root / "a", root / "b"


@pytest.fixture
def engine(directories: tuple[Path, Path]) -> Iterator[TinyEngine]:
    engine = TinyEngine(directories[0], 10, SETTINGS)
    yield engine
    engine.close()


def _request(number: int, *, prompt: int = 20, new: int = 40, **fields) -> GenerateRequest:
    tokens = tuple(random.Random(number).choices(range(VOCAB), k=prompt))
    return GenerateRequest(f"r{number}", tokens, new, seed=number, **fields)


def _generate(engine: TinyEngine, *requests: GenerateRequest) -> list[GenerateResult]:
    futures = [engine.submit(request) for request in requests]
    return [future.result(BOUND_S) for future in futures]


def _gap(directory: Path, prompt: tuple[int, ...], result: GenerateResult, start: int, end: int) -> float:
    """Greatest distance between the result's log-probs [start, end) and the model's."""
    model = load_pretrained(directory)
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([prompt + result.token_ids]))[0], -1)
    at = torch.arange(len(prompt) + start, len(prompt) + end)
    wanted = logp[at - 1, torch.tensor(result.token_ids[start:end])]
    return float((wanted - torch.tensor(result.logprobs[start:end])).abs().max())


def test_log_probs_are_the_models(engine: TinyEngine, directories: tuple[Path, Path]) -> None:
    requests = [_request(n, prompt=1 + 11 * n, new=50) for n in range(10)]
    for request, result in zip(requests, _generate(engine, *requests), strict=True):
        assert len(result.token_ids) == 50
        assert result.finish_reason == "length"
        assert result.weight_versions == (VersionSpan(10, 0, 50),)
        assert _gap(directories[0], request.token_ids, result, 0, 50) < 2e-5


def test_company_changes_no_token(engine: TinyEngine) -> None:
    alone = [_generate(engine, _request(n, prompt=9 + 7 * n))[0] for n in range(12)]
    together = _generate(engine, *[_request(n, prompt=9 + 7 * n) for n in range(12)])
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    for one, other in zip(alone, together, strict=True):
        # Equal to the bit with MKL on AVX2; other libraries may compute rows of one product differently.
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("kept", [1, 17, 44, 99])
def test_a_continued_call_is_the_unbroken_call(engine: TinyEngine, kept: int) -> None:
    [whole] = _generate(engine, _request(3, new=100))
    request = _request(3, new=100)
    rest = GenerateRequest("rest", request.token_ids + whole.token_ids[:kept], 100 - kept, seed=3)
    [result, *_] = _generate(engine, rest, _request(4), _request(5))
    assert result.token_ids == whole.token_ids[kept:]
    assert result.logprobs == pytest.approx(whole.logprobs[kept:], abs=1e-5)


def test_temperature_is_in_the_log_probs(engine: TinyEngine, directories: tuple[Path, Path]) -> None:
    request = _request(1, new=5, temperature=0.5)
    [result] = _generate(engine, request)
    with torch.no_grad():
        logits = load_pretrained(directories[0])(torch.tensor([request.token_ids]))[0, -1]
    assert result.logprobs[0] == pytest.approx(
        float(torch.log_softmax(logits / 0.5, -1)[result.token_ids[0]]), abs=1e-5
    )


def test_a_stop_token_ends_the_call_and_is_its_last(engine: TinyEngine) -> None:
    [free] = _generate(engine, _request(6, new=60))
    stop = free.token_ids[12]
    end = free.token_ids.index(stop) + 1
    [stopped, ignored] = _generate(
        engine,
        _request(6, new=60, stop_token_ids=(stop,)),
        GenerateRequest("i", _request(6).token_ids, 60, stop_token_ids=(stop,), seed=6, ignore_eos=True),
    )
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:end], "stop")
    assert ignored.token_ids == free.token_ids


def test_the_context_ends_a_call(engine: TinyEngine) -> None:
    [result] = _generate(engine, _request(1, prompt=150, new=50))
    assert (len(result.token_ids), result.finish_reason) == (10, "length")


def test_abort_delivers_what_there_is(engine: TinyEngine) -> None:
    engine.pause()
    kept, ended = engine.submit(_request(1, new=100)), engine.submit(_request(2, new=100))
    assert engine.abort(["r2", "unknown"]) == 1
    result = ended.result(BOUND_S)
    assert (result.token_ids, result.finish_reason, result.weight_versions) == ((), "abort", ())
    engine.resume()
    assert len(kept.result(BOUND_S).token_ids) == 100


def _pause_midway(engine: TinyEngine, *requests: GenerateRequest, tokens: int):
    """Submit, and have the worker itself pause once it has sampled `tokens` tokens: no race, however slow we are."""
    engine.pause()
    futures = [engine.submit(request) for request in requests]
    reached = threading.Event()
    step, limit = engine._core.step, engine._core.tokens + tokens

    def stepping() -> int:
        count = step()
        if engine._core.tokens >= limit and not reached.is_set():
            engine._advance(EngineEvent.PAUSE)
            reached.set()
        return count

    engine._core.step = stepping
    engine.resume()
    assert reached.wait(BOUND_S)
    engine.pause()
    return futures


def test_abort_and_continuation_make_the_unbroken_call(engine: TinyEngine) -> None:
    requests = [_request(n, new=120) for n in range(3)]
    whole = _generate(engine, *requests)
    futures = _pause_midway(engine, *requests, tokens=60)
    engine.abort()
    engine.resume()
    for request, unbroken, future in zip(requests, whole, futures, strict=True):
        part = future.result(BOUND_S)
        assert part.finish_reason == "abort"
        assert 0 < len(part.token_ids) < 120
        prompt, left = request.token_ids + part.token_ids, 120 - len(part.token_ids)
        [rest] = _generate(engine, GenerateRequest("x", prompt, left, seed=request.seed))
        assert part.token_ids + rest.token_ids == unbroken.token_ids


def test_a_pause_samples_nothing_and_loses_nothing(engine: TinyEngine) -> None:
    requests = [_request(n, new=120) for n in range(3)]
    whole = _generate(engine, *requests)
    futures = _pause_midway(engine, *requests, tokens=60)
    before = engine.stats()
    late = engine.submit(_request(9, new=3))
    assert engine.abort(["nothing"]) == 0  # the worker has been round
    after = engine.stats()
    assert (after.state, after.tokens, after.running) == ("paused", before.tokens, 3)
    assert not late.done()
    engine.resume()
    assert [future.result(BOUND_S).token_ids for future in futures] == [one.token_ids for one in whole]
    assert len(late.result(BOUND_S).token_ids) == 3


def test_new_weights_take_over_in_the_middle_of_calls(engine: TinyEngine, directories: tuple[Path, Path]) -> None:
    requests = [_request(n, prompt=10 + n, new=120) for n in range(4)]
    futures = _pause_midway(engine, *requests, tokens=80)
    engine.load(directories[1], 11)
    engine.resume()
    for request, future in zip(requests, futures, strict=True):
        result = future.result(BOUND_S)
        old, new = result.weight_versions
        assert (old.version, old.start, new.version, new.end) == (10, 0, 11, 120)
        assert old.end == new.start
        assert _gap(directories[0], request.token_ids, result, 0, old.end) < 2e-5
        # The cache was made again: the new weights saw every token, not keys and values of the old ones.
        assert _gap(directories[1], request.token_ids, result, new.start, 120) < 2e-5


def test_unusable_weights_leave_the_old_ones(engine: TinyEngine, tmp_path: Path) -> None:
    [before] = _generate(engine, _request(1))
    save_pretrained(_model(3), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    engine.pause()
    with pytest.raises(ModelDirectoryError, match=r"model\.safetensors is not a safetensors file"):
        engine.load(tmp_path, 12)
    save_pretrained(TinyModel(TinyConfig(VOCAB)), tmp_path)
    with pytest.raises(ModelDirectoryError, match="another shape"):
        engine.load(tmp_path, 12)
    assert engine.stats().version == 10
    engine.resume()
    assert _generate(engine, _request(1)) == [before]


def test_not_a_number_leaves_with_its_weights(
    engine: TinyEngine, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = _model(1)
    with torch.no_grad():
        for name, parameter in broken.named_parameters():
            if "v_proj" in name:
                parameter.fill_(float("nan"))
    save_pretrained(broken, tmp_path)
    [before] = _generate(engine, _request(1))
    engine.pause()
    engine.load(tmp_path, 11)
    engine.resume()
    _generate(engine, _request(1, prompt=100))
    engine.pause()
    engine.load(directories[0], 12)
    engine.resume()
    assert _generate(engine, _request(1))[0].logprobs == before.logprobs


def test_sleep_frees_memory_and_waking_restores(engine: TinyEngine, directories: tuple[Path, Path]) -> None:
    [before] = _generate(engine, _request(1))
    awake = engine.stats()
    assert engine.sleep() == awake.kv_bytes + awake.weight_bytes > 0
    asleep = engine.stats()
    assert (asleep.state, asleep.kv_bytes, asleep.weight_bytes) == ("asleep", 0, 0)
    with pytest.raises(WrongStateError, match="asleep"):
        engine.submit(_request(1)).result(BOUND_S)
    with pytest.raises(WrongStateError, match="must be"):
        engine.resume()
    engine.wake()
    engine.resume()
    assert _generate(engine, _request(1)) == [before]
    engine.sleep()
    engine.wake(directories[1], 11)
    engine.resume()
    [other] = _generate(engine, _request(1))
    assert other.weight_versions == (VersionSpan(11, 0, 40),)
    assert other.token_ids != before.token_ids


def test_sleep_is_refused_while_calls_are_in_flight(engine: TinyEngine) -> None:
    engine.pause()
    future = engine.submit(_request(1))
    with pytest.raises(WrongStateError, match="1 calls are in flight"):
        engine.sleep()
    engine.abort()
    assert future.result(BOUND_S).finish_reason == "abort"
    engine.sleep()


def test_a_cancelled_call_frees_its_place(engine: TinyEngine) -> None:
    engine.pause()
    future = engine.submit(_request(1))
    assert engine.abort([]) == 0
    assert engine.stats().waiting == 1
    assert future.cancel()
    assert engine.abort([]) == 0
    assert engine.stats().waiting == 0


def test_requests_that_cannot_be_served_are_refused(engine: TinyEngine) -> None:
    for request, names in (
        (GenerateRequest("x", (), 1), "token_ids is empty"),
        (GenerateRequest("x", (VOCAB,), 1), "vocabulary"),
        (GenerateRequest("x", (1,) * 160, 1), "context of 160"),
        (GenerateRequest("x", (1,), 0), "max_tokens"),
        (GenerateRequest("x", (1,), 1, temperature=-1), "temperature"),
    ):
        with pytest.raises(InvalidRequestError, match=names):
            engine.submit(request).result(BOUND_S)
    engine.pause()
    first = engine.submit(_request(1))
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.submit(_request(1)).result(BOUND_S)
    engine.resume()
    assert len(first.result(BOUND_S).token_ids) == 40


def test_calls_that_wait_are_let_in_by_priority(directories: tuple[Path, Path]) -> None:
    engine = TinyEngine(directories[0], 0, EngineSettings(max_batch=1, max_context=160, threads=1))
    order: list[str] = []
    try:
        engine.pause()
        for name, priority in (("a", 0), ("b", 0), ("moved", -1), ("late", 2), ("c", 0)):
            request = replace(_request(1, new=3), request_id=name, priority=priority)
            future = engine.submit(request)
            future.add_done_callback(lambda _, name=name: order.append(name))
        engine.resume()
        future.result(BOUND_S)
    finally:
        engine.close()
    assert order[:4] == ["moved", "a", "b", "c"]


def test_the_queue_is_bounded(directories: tuple[Path, Path]) -> None:
    engine = TinyEngine(directories[0], 0, EngineSettings(max_batch=1, max_context=32, max_waiting=1))
    engine.pause()
    accepted = [engine.submit(_request(n, prompt=4, new=4)) for n in range(2)]
    with pytest.raises(EngineBusyError, match="max_waiting is 1"):
        engine.submit(_request(3, prompt=4, new=4)).result(BOUND_S)
    engine.resume()
    assert all(len(future.result(BOUND_S).token_ids) == 4 for future in accepted)
    engine.close()


def test_closing_ends_calls_and_refuses_new_ones(directories: tuple[Path, Path]) -> None:
    engine = TinyEngine(directories[0], 0, SETTINGS)
    engine.pause()
    future = engine.submit(_request(1))
    engine.close()
    engine.close()
    assert future.result(BOUND_S).finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        engine.submit(_request(2)).result(BOUND_S)
    with pytest.raises(EngineClosedError):
        engine.resume()
    assert engine.stats().state == "closed"


def test_a_failure_of_the_worker_fails_what_waits(directories: tuple[Path, Path], monkeypatch) -> None:
    engine = TinyEngine(directories[0], 0, SETTINGS)

    def fail() -> int:
        raise RuntimeError("broken")

    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    monkeypatch.setattr(engine._core, "step", fail)
    with pytest.raises(EngineClosedError):
        engine.submit(_request(1)).result(BOUND_S)
    with pytest.raises(EngineClosedError):
        engine.pause()
    engine._thread.join(BOUND_S)
    assert [str(report.exc_value) for report in reported] == ["broken"]


def test_every_event_is_allowed_somewhere_and_repeats_change_nothing() -> None:
    for (state, event), (after, _) in TABLE.items():
        if event is not EngineEvent.LOAD:
            again, effects = advance(after, event)
            assert (again, effects) == (after, ()), (state, event)
    for state in (EngineState.RUNNING, EngineState.ASLEEP):
        with pytest.raises(WrongStateError, match="must be paused"):
            advance(state, EngineEvent.LOAD)


def test_what_is_seen_of_a_call_under_way_is_its_beginning(engine: TinyEngine, directories: tuple[Path, Path]) -> None:
    """Looked at beside the worker, again and again, over an exchange of weights: nothing twice, nothing missed, and
    each token with the version that sampled it."""
    request = _request(3, new=130)
    [future] = _pause_midway(engine, request, tokens=60)
    engine.load(directories[1], 11)
    engine.resume()
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    looks = 0
    while not future.done():
        new = engine.sampled(request.request_id, len(tokens))
        spans = [(span.start, span.end) for span in new.weight_versions]
        edges = [start for start, _ in spans] + [len(tokens) + len(new.token_ids)]
        assert edges[0] == len(tokens)
        assert all(end == after for (_, end), after in zip(spans, edges[1:], strict=True))
        tokens += new.token_ids
        logprobs += new.logprobs
        versions += [span.version for span in new.weight_versions for _ in range(span.start, span.end)]
        looks += bool(new.token_ids)
    result = future.result(BOUND_S)
    assert looks > 2
    assert result.token_ids[: len(tokens)] == tuple(tokens)
    assert result.logprobs[: len(tokens)] == tuple(logprobs)
    covered = [span.version for span in result.weight_versions for _ in range(span.start, span.end)]
    assert covered[: len(versions)] == versions
    assert {10, 11} == set(covered)
    assert engine.sampled(request.request_id, 0).token_ids == (), "it is over"
