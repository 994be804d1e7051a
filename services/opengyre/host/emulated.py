"""The emulated engine and its learner: no model, no torch, only time (design section 9).

The engine shares a node's speed among its calls (`opengyre.emulated.accelerator`) on the event loop's clock, the
durations of the settings divided by `time_scale`. What a call says is a function of its seed and of positions
(`opengyre.emulated.tokens`), so a moved call goes on as the unmoved one would; it never says a stop token, so a call
ends with its last token. The learner takes its time for each execution and hands over a gradient of zeros in the
model's shape: everything around the arithmetic is real.

States: those of `opengyre.tiny.state`, from ASLEEP. Memory: nominal bytes of weights and keys/values, none asleep.

Awaits: a call is woken by the timer of the next end, by `abort` or `close`; a sleep, a wake and an execution's work by
timers. Nothing here waits for anybody.
"""

import asyncio
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opengyre.emulated.accelerator import Accelerator
from opengyre.emulated.tokens import draw
from opengyre.host.engine import WAITING_FACTOR, CallProgress
from opengyre.host.learners import Accumulator, counted, plus
from opengyre.learn.layout import header, size_of
from opengyre.proto.group import Member
from opengyre.proto.host import Sampler
from opengyre.proto.update import UpdateStats, WorkItem
from opengyre.proto.weights import Manifest
from opengyre.shared.blobs import SLICE, Written, write_pieces
from opengyre.shared.settings import HostSettings
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError
from opengyre.tiny.state import EngineEvent, EngineState, advance
from opengyre.tiny.types import (
    EngineBusyError,
    EngineClosedError,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Increment,
    InvalidRequestError,
    VersionSpan,
    WrongStateError,
    spans_from,
)
from opengyre.weights.manifest import MissingFileError

KV_BYTES = 1024
"""Nominal, of a token."""
LAST_MOMENT_S = 1e-4


@dataclass(slots=True)
class _Call:
    request: GenerateRequest
    answer: "asyncio.Future[GenerateResult]"
    start: float
    """Virtual time of the accelerator at its submission."""


@dataclass(frozen=True, slots=True)
class _Weights:
    vocabulary: int
    size: int


class EmulatedEngine:
    """`HostSettings` say how fast it is."""

    name = "emulated"
    takes_turns = False
    load_bound_s = None

    def __init__(self, settings: HostSettings) -> None:
        self._loop = asyncio.get_running_loop()
        scale = settings.time_scale
        self.capacity = settings.capacity
        self._accelerator = Accelerator(settings.tokens_per_s * scale, settings.capacity)
        self._accelerator.pause(self._loop.time())
        self._switch_s = settings.switch_s / scale
        self._limit = math.ceil((1 + WAITING_FACTOR) * settings.capacity)
        self._calls: dict[str, _Call] = {}
        self._prompts = 0
        """Tokens of the prompts in flight."""
        self._state = EngineState.ASLEEP
        self._closed = False
        self._weights: _Weights | None = None
        self._versions: list[tuple[float, int]] = [(0.0, -1)]
        """(Virtual time, version that samples from then on), as far back as calls in flight go."""
        self._tokens = 0
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, request: GenerateRequest) -> "asyncio.Future[GenerateResult]":
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._weights is None or self._state is EngineState.ASLEEP:
            raise WrongStateError("submit: the engine is asleep; it must be running or paused")
        self._check(request, self._weights.vocabulary)
        self._accelerator.submit(request.request_id, request.max_tokens, self._loop.time())
        answer: asyncio.Future[GenerateResult] = self._loop.create_future()
        self._calls[request.request_id] = _Call(request, answer, self._accelerator.virtual)
        self._prompts += len(request.token_ids)
        answer.add_done_callback(lambda ended: self._forget(request.request_id, ended))
        self._go_on()
        return answer

    def _check(self, request: GenerateRequest, vocabulary: int) -> None:
        if not request.token_ids:
            raise InvalidRequestError("token_ids is empty; a prompt has at least one token")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocabulary:
            raise InvalidRequestError(
                f"token_ids holds a token outside the vocabulary; allowed are 0 to {vocabulary - 1}"
            )
        if request.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {request.max_tokens}; allowed are values from 1")
        if request.request_id in self._calls:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in flight; it must be unique")
        if len(self._calls) >= self._limit:
            raise EngineBusyError(f"{len(self._calls)} calls are in flight; at most {self._limit} are taken")

    async def pause(self) -> None:
        self._advance(EngineEvent.PAUSE)
        self._accelerator.pause(self._loop.time())
        self._go_on()

    async def resume(self) -> None:
        self._advance(EngineEvent.RESUME)
        self._accelerator.resume(self._loop.time())
        self._go_on()

    async def load(self, directory: Path, version: int) -> None:
        self._advance(EngineEvent.LOAD)
        self._use(await asyncio.to_thread(_read_weights, directory), version)

    async def sleep(self) -> None:
        if self._calls:
            raise WrongStateError(f"sleep: {len(self._calls)} calls are in flight; end or abort them first")
        if self._state is EngineState.ASLEEP:
            return
        self._advance(EngineEvent.SLEEP)  # so that nothing is taken meanwhile; the memory is free at the end
        self._accelerator.pause(self._loop.time())
        await asyncio.sleep(self._switch_s)
        self._weights = None

    async def wake(self, directory: Path, version: int) -> None:
        if self._state is not EngineState.ASLEEP:
            raise WrongStateError(f"wake: the engine is {self._state.value}; it must be asleep")
        weights = await asyncio.to_thread(_read_weights, directory)
        await asyncio.sleep(self._switch_s)
        self._advance(EngineEvent.WAKE)
        self._use(weights, version)

    async def abort(self, request_ids: Iterable[str] | None) -> int:
        self._deliver()
        chosen = list(self._calls) if request_ids is None else [name for name in request_ids if name in self._calls]
        for name in chosen:
            self._finish(name, self._accelerator.abort(name, self._loop.time()), "abort")
        self._go_on()
        return len(chosen)

    def stats(self) -> EngineStats:
        accelerator = self._accelerator
        running = min(len(self._calls), math.ceil(accelerator.capacity))
        awake = self._weights is not None
        return EngineStats(
            state="closed" if self._closed else self._state.value,
            version=self._versions[-1][1],
            running=running,
            waiting=len(self._calls) - running,
            tokens=self._tokens + int(accelerator.sampled),
            tokens_per_s=accelerator.rate * len(accelerator),
            kv_bytes=KV_BYTES * (self._prompts + int(accelerator.sampled)) if awake else 0,
            weight_bytes=self._weights.size if self._weights is not None else 0,
        )

    def sampler(self) -> Sampler:
        """Its log-probs are drawn, and nothing is computed by them."""
        return Sampler()

    def progress(self) -> list[CallProgress]:
        self._deliver()
        return [
            CallProgress(name, len(call.request.token_ids), self._accelerator.tokens(name), call.request.max_tokens)
            for name, call in self._calls.items()
        ]

    def sampled(self, request_id: str, after: int) -> Increment:
        self._deliver()
        call = self._calls.get(request_id)
        if call is None or self._weights is None:
            return Increment()
        count = self._accelerator.tokens(request_id)
        if count <= after:
            return Increment()
        tokens, logprobs = self._draw(call.request, after, count)
        return Increment(tokens, logprobs, spans_from(self._spans(call.start, count), after, count))

    async def close(self) -> None:
        await self.abort(None)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _advance(self, event: EngineEvent) -> None:
        self._state, _ = advance(self._state, event)

    def _use(self, weights: _Weights, version: int) -> None:
        self._weights = weights
        virtual = self._accelerator.virtual
        oldest = min((call.start for call in self._calls.values()), default=virtual)
        # The last mark before the oldest call says who began it.
        first = max(n for n, (since, _) in enumerate(self._versions) if since <= oldest)
        self._versions = [*self._versions[first:], (virtual, version)]

    def _go_on(self) -> None:
        """Deliver what has ended, and look again at the next end."""
        self._deliver()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        due = self._accelerator.next_event(now)
        if due is not None:
            self._timer = self._loop.call_at(max(due, now + LAST_MOMENT_S), self._go_on)

    def _deliver(self) -> None:
        for name in self._accelerator.advance(self._loop.time()):
            if name in self._calls:
                self._finish(name, self._calls[name].request.max_tokens, "length")

    def _finish(self, name: str, count: int, reason: FinishReason) -> None:
        call = self._calls.pop(name)
        self._prompts -= len(call.request.token_ids)
        self._tokens += count
        if call.answer.done():
            return
        tokens, logprobs = self._draw(call.request, 0, count)
        call.answer.set_result(GenerateResult(tokens, logprobs, reason, self._spans(call.start, count)))

    def _draw(self, request: GenerateRequest, start: int, end: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens `[start, end)` of a completion, and their log-probs."""
        assert self._weights is not None
        first = len(request.token_ids) + start
        return draw(request.seed, first, end - start, self._weights.vocabulary, request.stop_token_ids)

    def _spans(self, start: float, count: int) -> tuple[VersionSpan, ...]:
        """Who sampled the first `count` tokens of a call."""
        spans: list[VersionSpan] = []
        for number, (since, version) in enumerate(self._versions):
            last = number + 1 == len(self._versions)
            end = count if last else min(count, math.floor(self._versions[number + 1][0] - start))
            begin = max(0, math.floor(since - start)) if spans else 0
            if end <= begin:
                continue
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, end)
            else:
                spans.append(VersionSpan(version, begin, end))
        return tuple(spans)

    def _forget(self, name: str, ended: "asyncio.Future[GenerateResult]") -> None:
        """The client is gone: its place is free."""
        if not ended.cancelled():
            return
        self._deliver()
        call = self._calls.get(name)
        if call is not None and call.answer is ended:
            self._finish(name, self._accelerator.abort(name, self._loop.time()), "abort")
            self._go_on()


class EmulatedLearner:
    """Takes `train_s_per_execution / time_scale` for each execution."""

    def __init__(self, settings: HostSettings) -> None:
        self._execution_s = settings.train_s_per_execution / settings.time_scale

    def open(self) -> None:
        """Nothing is needed."""

    async def add(self, item: WorkItem, members: Sequence[Member], into: Accumulator | None, name: str) -> Accumulator:
        gradients = into.gradients if into is not None else await asyncio.to_thread(read_shapes, item.base)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(self._execution_s * len(members))
        busy = UpdateStats(busy_s=loop.time() - began)
        into = into or Accumulator(item.update, item.attempt, name, gradients)
        into.groups.append(item.group.group)
        into.stats = plus(plus(into.stats, counted(members, item.base.version)), busy)
        return into

    async def write(self, accumulator: Accumulator, path: Path) -> Written:
        return await asyncio.to_thread(write_pieces, path, zeros(accumulator.gradients))

    def close(self) -> None:
        """Nothing is held."""

    async def ended(self) -> None:
        """Nothing was."""


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file; raises `ModelDirectoryError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(min(length, 100 << 20)))
    except (struct.error, ValueError) as error:
        raise ModelDirectoryError(f"{path} is not safetensors data: {error}") from error


def _read_weights(directory: Path) -> _Weights:
    """Raises `ModelDirectoryError`."""
    path = directory / CONFIG_FILE
    try:
        vocabulary = int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelDirectoryError(f"{path}: no vocab_size can be read ({error!r})") from error
    return _Weights(vocabulary, sum(file.stat().st_size for file in directory.glob("*.safetensors")))


def read_shapes(base: Manifest) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a version. Raises `WeightsError` or `ModelDirectoryError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in base.files:
        if not shard.name.endswith(".safetensors"):
            continue
        path = Path(base.directory) / shard.name
        if not path.is_file():
            raise MissingFileError(f"version {base.version}: {path} does not exist", path)
        fields = _header(path)
        shapes |= {name: tuple(field["shape"]) for name, field in fields.items() if name != "__metadata__"}
    return shapes


def zeros(shapes: dict[str, tuple[int, ...]]) -> Iterator[bytes | memoryview]:
    """A gradient of zeros as safetensors, float32, in pieces."""
    yield header(shapes)
    left, piece = sum(map(size_of, shapes.values())), memoryview(bytes(SLICE))
    while left > 0:
        yield piece[:left]
        left -= SLICE
