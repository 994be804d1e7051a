"""An engine measured: its start, calls with and without a cache, tokens a second, new weights under calls, its end.

Invariants: calls are of random tokens, so nothing of one is cached for another; all calls have ended before the engine
is put to sleep; the engine is closed, whatever happens.

Awaits: a call's tokens are looked for every `LOOK_S`, for the engine tells nobody that they came, `BOUND_S` at most;
the engine's own answers are bounded by it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opengyre.cli.bench_engine_facts import Life, Reload, Sampled
from opengyre.host.engine import Engine
from opengyre.tiny.types import EngineError, GenerateRequest

FURTHER = 512
"""Tokens that a call in flight may sample: more than it does until weights have changed."""
COUNTED = 256
"""Tokens of the furthest call over which tokens are counted."""
LOOK_S = 0.002
BOUND_S = 600.0

Say = Callable[[str], None]


class Prompts:
    """Random ones of so many tokens; and names of calls."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._random = random.Random(0)  # noqa: S311 - for prompts, not for secrets
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._made = 0

    def call(self, limit: int, prompt: Sequence[int] = ()) -> GenerateRequest:
        """A call of a prompt that was never asked, or of this one."""
        self._made += 1
        ids = tuple(prompt) or tuple(self._random.choices(range(self._vocabulary), k=self._tokens))
        return GenerateRequest(f"bench{self._made}", ids, limit, ignore_eos=True)


async def live(engine: Engine, directory: Path, prompts: Prompts, pairs: int, calls: int, say: Say) -> Life:
    """One life of an engine that has not been started."""
    try:
        began = time.monotonic()
        await engine.wake(directory, 0)
        await engine.resume()
        start = time.monotonic() - began
        say(f"ready after {start:.1f} s")
        # What a process does but once is of the start, not of a call.
        await _token(engine, prompts.call(1))
        found = [await pair(engine, prompts) for _ in range(pairs)]
        cold, warm = zip(*found, strict=True)
        say(f"next token of {pairs} calls after {_range(cold)} s, with the prefix cached after {_range(warm)} s")
        sampled = await sampling(engine, prompts, calls)
        say(f"{calls} calls get {sampled.tokens_per_s:.0f} tokens a second; others wait {sampled.late:.3f} s at most")
        reload = await change(engine, directory, prompts, calls)
        taken = reload.pause + reload.load + reload.resume
        say(f"new weights under {calls} calls in {taken:.2f} s, the first goes on {reload.first:.2f} s after")
        serving = _held(engine)
        began = time.monotonic()
        await engine.sleep()
        end = time.monotonic() - began
        after = _held(engine)
        say(f"ended in {end:.2f} s; it held {serving >> 20} MiB, and holds {after >> 20}")
        return Life(start, cold, warm, sampled, reload, end, serving, after)
    finally:
        await engine.close()


async def pair(engine: Engine, prompts: Prompts) -> tuple[float, float]:
    """Seconds to the next token of a call that was never here, and to the one after it."""
    request = prompts.call(1)
    cold, token = await _token(engine, request)
    warm, _ = await _token(engine, prompts.call(1, (*request.token_ids, token)))
    return cold, warm


async def _token(engine: Engine, request: GenerateRequest) -> tuple[float, int]:
    began = time.monotonic()
    async with asyncio.timeout(BOUND_S):
        result = await engine.submit(request)
    if not result.token_ids:
        raise EngineError("a call ended without a token")
    return time.monotonic() - began, result.token_ids[0]


async def sampling(engine: Engine, prompts: Prompts, calls: int) -> Sampled:
    """Tokens a second of so many calls, and how late this process, which does next to nothing, is woken meanwhile."""
    requests = [prompts.call(FURTHER) for _ in range(calls)]
    async with asyncio.timeout(BOUND_S):
        running = [engine.submit(request) for request in requests]
        names = [request.request_id for request in requests]
        await _beyond(engine, dict.fromkeys(names, 0), all)
        before, began = _sampled(engine), time.monotonic()
        now, until, tokens, late = began, began, 0, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            slept, now = time.monotonic() - now, time.monotonic()
            late = max(late, slept - LOOK_S)
            sampled = _sampled(engine)
            more = [sampled[name] - before[name] for name in names if name in sampled and name in before]
            if len(more) < calls:
                break
            tokens, until = sum(more), now
            if max(more) >= COUNTED:
                break
        await engine.abort(None)
        await asyncio.gather(*running)
    if not tokens:
        raise EngineError(f"some of {calls} calls ended before all of them sampled; fewer would do")
    return Sampled(tokens / (until - began), late)


async def change(engine: Engine, directory: Path, prompts: Prompts, calls: int) -> Reload:
    """The weights of the directory, as a new version, once `calls` calls sample; these are stopped afterwards."""
    version = engine.stats().version
    requests = [prompts.call(FURTHER) for _ in range(calls)]
    async with asyncio.timeout(BOUND_S):
        running = [engine.submit(request) for request in requests]
        names = [request.request_id for request in requests]
        await _beyond(engine, dict.fromkeys(names, 0), all)
        told = time.monotonic()
        await engine.pause()
        paused = time.monotonic()
        await engine.load(directory, version + 1)
        loaded = time.monotonic()
        # Streams bring what was sampled before; nothing is sampled while it is paused.
        before = _sampled(engine)
        if len(before) < calls:
            raise EngineError(f"{calls - len(before)} of {calls} calls ended before weights changed; fewer would do")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(_beyond(engine, before, any))
            every = tasks.create_task(_beyond(engine, before, all))
            await engine.resume()
            resumed = time.monotonic()
        await engine.abort(None)
        results = await asyncio.gather(*running)
    if any([one.version for one in result.weight_versions] != [version, version + 1] for result in results):
        raise EngineError("a call in flight does not say that weights changed")
    (went_on, came), (all_on, _) = first.result(), every.result()
    return Reload(
        paused - told, loaded - paused, resumed - loaded, went_on - loaded, all_on - loaded, went_on - told, came
    )  # fmt: skip


async def _beyond(
    engine: Engine, before: dict[str, int], enough: Callable[[Sequence[bool]], bool]
) -> tuple[float, int]:
    """When enough calls have more tokens than before, or have ended; how many more the furthest has."""
    while True:
        now = _sampled(engine)
        more = [now.get(name, count + 1) - count for name, count in before.items()]
        if enough([one > 0 for one in more]):
            return time.monotonic(), max(more)
        await asyncio.sleep(LOOK_S)


def _sampled(engine: Engine) -> dict[str, int]:
    return {call.request_id: call.sampled for call in engine.progress()}


def _held(engine: Engine) -> int:
    """Bytes, as they were measured last."""
    stats = engine.stats()
    return stats.kv_bytes + stats.weight_bytes


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f}"
