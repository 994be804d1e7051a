"""The vLLM engine of a host, with vLLM itself: weights, versions, aborts, and its death.

One event loop for all: the engine's tasks live in it.
"""

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest
import torch

from opengyre.cli.bench_engine_life import Prompts, change, pair
from opengyre.host.vllm import VllmEngine
from opengyre.host.vllm_calls import body_of
from opengyre.host.vllm_process import Server, members
from opengyre.learn.events import Events
from opengyre.learn.objective import objective
from opengyre.proto.handshake import differs
from opengyre.proto.host import Sampler
from opengyre.proto.run import Optimization, RunSpec, Serving
from opengyre.proto.update import UpdateStats
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.types import EngineClosedError, EngineError, GenerateRequest, GenerateResult, InvalidRequestError
from opengyre.trainer.parity import alarm
from support import eventually
from support.vllm_models import VOCABULARY, Models, settings

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPT = tuple(range(10, 210))
LONG = 1800
"""Tokens of a call that is under way still, whatever is done meanwhile."""
NEAR = 2e-5
"""Between the engine's float32 and the reference's, in nats."""


def request(name: str, tokens: int = 1200, prompt: tuple[int, ...] = PROMPT, **changes: object) -> GenerateRequest:
    return GenerateRequest(name, prompt, tokens, **changes)  # type: ignore[arg-type]  # fields by keyword


async def some(engine: VllmEngine, name: str, tokens: int) -> None:
    """Until a call in flight has so many."""
    await eventually(lambda: len(engine.sampled(name, 0).token_ids) >= tokens, 60)


def off(
    result: GenerateResult, models: Models, name: str, start: int, end: int, prompt: tuple[int, ...] = PROMPT
) -> float:
    """By how much log-probs of tokens `[start, end)` differ from a forward of these weights, at most."""
    expected = models.logprobs(name, (*prompt, *result.token_ids))[len(prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(result.logprobs[start:end], expected[start:end], strict=True))


async def test_it_says_how_it_samples_as_it_is_in_force(engine: VllmEngine) -> None:
    said = engine.sampler()
    assert said is not None
    assert said == Sampler(chunked_prefill=True, prefix_caching=True)
    assert differs(RunSpec(run="r", model="m", serving=Serving(dtype="float32", chunked_prefill=True)), said) is None


async def test_an_engine_at_another_temperature_is_an_alarm_that_says_so(engine: VllmEngine, models: Models) -> None:
    """The run thinks that it samples at 1."""
    ages = torch.zeros(800, dtype=torch.int64)
    for temperature, alarmed in ((1.0, False), (0.5, True)):
        result = await engine.submit(request(f"t{temperature}", 800, temperature=temperature))
        behaviour = torch.tensor(result.logprobs)
        expected = torch.tensor(models.logprobs("old", (*PROMPT, *result.token_ids))[len(PROMPT) - 1 :])
        events = Events(behaviour=behaviour, advantage=behaviour * 0, weight=behaviour * 0, age=ages)
        found = objective(Optimization())(expected, events)[1]
        names = [name for name in UpdateStats.__struct_fields__ if hasattr(found, name)]
        said = alarm(Optimization(), UpdateStats(**{name: getattr(found, name) for name in names}))
        assert (said is not None) is alarmed
        if said is not None:
            assert "likely the engine samples at a lower temperature" in said


async def test_the_first_call_waits_for_nothing_to_be_compiled(engine: VllmEngine, compiled: Path) -> None:
    """A helper of log-probs was: the first call on a machine waited for it longer than for the start."""
    await engine.submit(request("first", 8))
    assert await asyncio.to_thread(lambda: list(compiled.iterdir())) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one processor who yields hands it to the other")
async def test_processes_of_vllm_that_wait_for_each_other_leave_the_processor_to_others(engine: VllmEngine) -> None:
    """Its engine waited for the worker's answer by `sched_yield` in a loop, and others got nothing for seconds."""

    def used() -> dict[str, int]:
        """Clock ticks by what a process calls itself."""
        assert isinstance(engine._server, Server)
        found = {}
        for pid in members(engine._server._process.pid):
            stat = Path(f"/proc/{pid}/stat").read_text()
            fields = stat.rpartition(") ")[2].split()
            found[stat[stat.index("(") + 1 : stat.rindex(")")]] = int(fields[11]) + int(fields[12])
        return found

    before = used()
    await engine.submit(request("alone"))
    after = used()
    ticks = {name.partition("::")[2]: after[name] - before[name] for name in before if "::" in name}
    assert ticks["Worker"] > 20, "it has computed"
    assert ticks["EngineCor"] < 0.5 * ticks["Worker"], "it only waits meanwhile"


async def test_a_call_in_flight_survives_new_weights_with_exact_versions(engine: VllmEngine, models: Models) -> None:
    old = engine.stats().version
    calls = [engine.submit(request(f"swap{n}", 1500)) for n in range(3)]
    await some(engine, "swap0", 100)
    await engine.pause()
    before = [len(engine.sampled(f"swap{n}", 0).token_ids) for n in range(3)]
    await engine.load(models.paths["new"], old + 1)
    await asyncio.sleep(0.2)
    assert [len(engine.sampled(f"swap{n}", 0).token_ids) for n in range(3)] == before, "nothing while it is paused"
    await engine.resume()
    await asyncio.gather(*(some(engine, f"swap{n}", before[n] + 20) for n in range(3)))
    # Of what came after the change some was sampled before it, which vLLM itself says at a call's end only.
    meanwhile = [engine.sampled(f"swap{n}", 0).weight_versions[0] for n in range(3)]
    for result, length, said in zip(await asyncio.gather(*calls), before, meanwhile, strict=True):
        assert (result.finish_reason, len(result.token_ids)) == ("length", 1500)
        first, second = result.weight_versions
        assert (first.version, first.start, second.version, second.end) == (old, 0, old + 1, 1500)
        assert first.end == second.start >= length
        assert first == said
        assert off(result, models, "old", 0, first.end) < NEAR
        assert off(result, models, "new", second.start, 1500) < NEAR


async def test_what_vllm_says_of_itself_is_what_its_host_reports(engine: VllmEngine) -> None:
    """Its page of metrics under the names that are read: running, cached prompts, memory, speed."""
    prompt = tuple(range(20, 420))
    await engine.submit(request("fills", 4, prompt))
    over = asyncio.Event()

    async def keep_busy(name: str) -> None:
        # However fast the machine is, and however seldom it reads the page.
        for turn in itertools.count():
            if over.is_set():
                return
            await engine.submit(request(f"{name}-{turn}", 200, prompt))

    def seen() -> bool:
        stats = engine.stats()
        return stats.running == 2 and stats.kv_usage > 0 and (stats.prefix_hits or 0) > 0.3 and stats.tokens_per_s > 1

    async with asyncio.TaskGroup() as group:
        for name in ("one", "other"):
            group.create_task(keep_busy(name))
        try:
            await eventually(seen, 60)
        except TimeoutError:
            pytest.fail(f"the last figures are {engine.stats()}")
        assert engine.stats().waiting == 0
        over.set()
        await engine.abort(None)
    await eventually(lambda: engine.stats().kv_usage == 0)


async def test_tied_embeddings_are_packed_again_after_a_load(engine: VllmEngine, models: Models) -> None:
    """vLLM's CPU build reloads all but an output head that is tied to the embedding (rl.md 1, bug 1)."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(models.paths["new"])}}
    await engine.pause()
    await engine._post("/collective_rpc", reload)
    await engine.resume()
    stale = await engine.score(PROMPT)
    await engine.pause()
    await engine.load(models.paths["new"], engine.stats().version + 1)
    await engine.resume()
    found, expected = await engine.score(PROMPT), models.logprobs("new", PROMPT)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < NEAR
    assert max(abs(a - b) for a, b in zip(stale, expected, strict=True)) > 1, "the fault is still there to be mended"


async def test_weights_are_taken_once_their_canary_is_scored_as_the_trainer_does(
    engine: VllmEngine, models: Models
) -> None:
    old = engine.stats().version
    running = engine.submit(request("proven", 1500))
    await some(engine, "proven", 60)
    await engine.pause()
    await engine.load(models.with_canary("true", "new"), old + 1)
    before = len(engine.sampled("proven", 0).token_ids)
    await asyncio.sleep(0.2)
    assert len(engine.sampled("proven", 0).token_ids) == before, "nothing while it is paused"
    await engine.resume()
    result = await running
    first, second = result.weight_versions
    assert (first.version, second.version, second.end) == (old, old + 1, 1500)
    assert off(result, models, "old", 0, first.end) < NEAR
    assert off(result, models, "new", second.start, 1500) < NEAR


async def test_weights_by_which_the_engine_does_not_compute_are_refused(engine: VllmEngine, models: Models) -> None:
    """The fault of tied embeddings, which no checksum shows: what calls got by them is gone, the old weights serve."""
    old = engine.stats().version
    directory = models.with_canary("faulty", "new")
    running = [engine.submit(request(f"call{n}")) for n in range(3)]
    await some(engine, "call0", 60)
    await engine.pause()
    seen = [len(engine.sampled(f"call{n}", 0).token_ids) for n in range(3)]
    post = engine._post

    async def faulty(path: str, body: object = None, *bound: float) -> object:
        if isinstance(body, dict) and body.get("args") == [str(directory)]:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        return await post(path, body, *bound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_post", faulty)
        with pytest.raises(EngineError, match=r"canary are off by .* nats on average; allowed are 0\.001"):
            await engine.load(directory, old + 1)
    assert (engine.stats().state, engine.stats().version) == ("paused", old)
    await engine.resume()
    for result, length in zip(await asyncio.wait_for(asyncio.gather(*running), 90), seen, strict=True):
        assert result.finish_reason == "abort"
        assert length <= len(result.token_ids) < 1200
        assert {span.version for span in result.weight_versions} == {old}
        assert off(result, models, "old", 0, len(result.token_ids)) < NEAR
    after = await engine.submit(request("after", 50))
    assert off(after, models, "old", 0, 50) < NEAR
    await engine.pause()
    with pytest.raises(EngineError, match="does not compute by these weights"):
        await engine.load(directory, old + 1)  # it is not tried at once again
    await engine.resume()


async def test_a_canary_does_not_wait_for_calls_that_have_all_seats(engine: VllmEngine, models: Models) -> None:
    """vLLM takes no seat from a call, whatever another's priority: a good version was refused as not scored in time."""
    version = engine.stats().version + 1
    directory = models.with_canary("crowded", "new")
    calls = [engine.submit(request(f"seat{n}", LONG)) for n in range(int(engine.capacity) + 4)]
    await some(engine, "seat0", 20)
    await engine.pause()
    await engine.load(directory, version)
    assert not any(call.done() for call in calls)
    await engine.resume()
    assert engine.stats().version == version
    await engine.abort(None)
    await asyncio.wait_for(asyncio.gather(*calls), 90)


async def test_a_call_that_ends_while_weights_are_proven_waits_for_it(engine: VllmEngine, models: Models) -> None:
    old = engine.stats().version
    directory = models.with_canary("lying", "new", weights="old")
    await engine.pause()
    short = engine.submit(request("short", 1))
    with pytest.raises(EngineError, match="canary are off"):
        await engine.load(directory, old + 1)
    result = await asyncio.wait_for(short, 90)
    assert (result.token_ids, result.finish_reason) == ((), "abort")
    await engine.resume()
    assert engine.stats().version == old


async def test_a_call_of_less_priority_value_goes_first(engine: VllmEngine) -> None:
    order: list[str] = []
    await engine.pause()
    many = settings().capacity
    calls = [engine.submit(request(f"full{n}", 40)) for n in range(int(many))]
    for name, priority in (("late", 1), ("moved", -1)):
        call = engine.submit(request(name, 40, priority=priority))
        call.add_done_callback(lambda _, name=name: order.append(name))
        calls.append(call)
    await asyncio.sleep(2)  # until they are in its queue; it takes none while it is paused
    await engine.resume()
    await asyncio.gather(*calls)
    assert order == ["moved", "late"]


async def test_a_new_call_never_hits_a_block_of_old_weights(engine: VllmEngine, models: Models) -> None:
    prompt = tuple(3 + n % 400 for n in range(600))
    await engine.submit(request("warm", 8, prompt))
    await engine.pause()
    await engine.load(models.paths["new"], engine.stats().version + 1)
    await engine.resume()
    result = await engine.submit(request("after", 50, prompt))
    assert off(result, models, "new", 0, 50, prompt) < NEAR


async def test_a_stopped_call_delivers_what_it_has_and_goes_on_elsewhere(engine: VllmEngine, models: Models) -> None:
    """Where it goes on, log-probs are those of a call that was never stopped."""
    version = engine.stats().version
    running = engine.submit(request("cut", 1200))
    await some(engine, "cut", 60)
    assert await engine.abort(["cut"]) == 1
    part = await running
    assert part.finish_reason == "abort"
    assert 60 <= len(part.token_ids) < 1200
    assert [tuple(span) for span in part.weight_versions] == [(version, 0, len(part.token_ids))]
    other = VllmEngine(settings())
    try:
        await other.wake(models.paths["old"], version)
        await other.resume()
        rest = await other.submit(request("rest", 1200 - len(part.token_ids), (*PROMPT, *part.token_ids)))
    finally:
        await other.close()
    assert rest.finish_reason == "length"
    whole = GenerateResult((*part.token_ids, *rest.token_ids), (*part.logprobs, *rest.logprobs), "length", ())
    assert len(whole.token_ids) == 1200
    assert off(whole, models, "old", 0, 1200) < NEAR


async def test_a_call_can_be_stopped_while_the_engine_is_paused(engine: VllmEngine) -> None:
    running = engine.submit(request("held"))
    await some(engine, "held", 20)
    await engine.pause()
    assert await engine.abort(None) == 1
    result = await asyncio.wait_for(running, 90)
    assert result.finish_reason == "abort"
    assert len(result.token_ids) >= 20
    await engine.resume()


async def test_log_probs_are_of_the_distribution_that_was_sampled_from(engine: VllmEngine, models: Models) -> None:
    result = await engine.submit(request("warm", 100, temperature=0.5))
    expected = models.logprobs("old", (*PROMPT, *result.token_ids), 0.5)[len(PROMPT) - 1 :]
    # Logits that are off by so much are twice as far off at half the temperature.
    assert max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)) < 2 * NEAR


async def test_only_the_calls_own_stop_tokens_end_it(engine: VllmEngine) -> None:
    result = await engine.submit(request("stop", 800, stop_token_ids=tuple(range(5, VOCABULARY))))
    assert (result.finish_reason, len(result.token_ids)) == ("stop", 1)
    assert result.token_ids[0] >= 5
    ignoring = await engine.submit(request("on", 40, stop_token_ids=tuple(range(VOCABULARY)), ignore_eos=True))
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 40)


async def test_a_seed_of_a_call_never_reaches_the_engine(engine: VllmEngine) -> None:
    """One in a prompt that is read in parts ends it (rl.md 1, bug 2)."""
    assert "seed" not in body_of(request("seeded", seed=7), 2048, 0, 8)["sampling_params"]
    prompt = tuple(3 + n % 400 for n in range(1900))
    calls = [engine.submit(request(f"seeded{n}", 8, prompt, seed=n + 1)) for n in range(4)]
    assert {result.finish_reason for result in await asyncio.gather(*calls)} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [((), "one or more token ids from 0 to 499"), ((1, 500), "from 0 to 499"), ((1,) * 2048, "up to 2047")],
)
async def test_what_the_engine_would_die_of_is_refused(engine: VllmEngine, prompt: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        engine.submit(request("bad", prompt=prompt))


async def test_the_bench_measures_what_a_cached_prefix_saves_and_when_calls_go_on(
    engine: VllmEngine, models: Models
) -> None:
    prompts = Prompts(VOCABULARY, 1500)
    pairs = [await pair(engine, prompts) for _ in range(5)]
    assert min(warm for _, warm in pairs) < min(cold for cold, _ in pairs)
    reload = await change(engine, models.paths["new"], prompts, 3)
    assert 0 < reload.first <= reload.every
    assert reload.gap == pytest.approx(reload.pause + reload.load + reload.first)
    assert engine.progress() == []


async def test_what_it_holds_is_measured_and_given_back(models: Models) -> None:
    """On a CPU that is the end of its processes."""
    engine = VllmEngine(settings())
    try:
        await engine.wake(models.paths["old"], 3)
        stats = engine.stats()
        assert (stats.state, stats.version) == ("paused", 3)
        assert stats.weight_bytes + stats.kv_bytes > 1 << 30
        server = engine._server
        assert isinstance(server, Server)
        await engine.sleep()
        stats = engine.stats()
        assert (stats.state, stats.weight_bytes, stats.kv_bytes) == ("asleep", 0, 0)
        assert server.memory() == 0
    finally:
        await engine.close()


async def test_a_directory_without_a_tokenizer_is_refused_before_anything_starts(models: Models) -> None:
    directory = models.with_canary("mute", "old")
    (directory / "tokenizer.json").unlink()
    engine = VllmEngine(settings())
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json does not exist"):
        await engine.wake(directory, 0)
    assert engine._server is None
    await engine.close()


async def test_an_engine_that_is_killed_loses_no_token_that_was_recorded(models: Models) -> None:
    engine = VllmEngine(settings())
    try:
        await engine.wake(models.paths["old"], 5)
        await engine.resume()
        running = engine.submit(request("last"))
        await some(engine, "last", 50)
        heard = engine.sampled("last", 0)
        assert engine._server is not None
        os.kill(engine._server._process.pid, signal.SIGKILL)
        result = await asyncio.wait_for(running, 90)
        assert result.finish_reason == "abort"
        assert result.token_ids[: len(heard.token_ids)] == heard.token_ids
        assert off(result, models, "old", 0, len(result.token_ids)) < NEAR
        await eventually(lambda: engine.stats().state == "closed")
        with pytest.raises((EngineClosedError, EngineError)):
            await engine.submit(request("later"))
        await eventually(lambda: engine._server is not None and engine._server.memory() == 0)
    finally:
        await engine.close()
