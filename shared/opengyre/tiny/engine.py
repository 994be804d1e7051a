"""The tiny engine: a thread that samples, behind a front that any thread may call.

One worker thread owns the core. Everything reaches it through one queue, in order: requests, commands, the end. The
worker waits in one place only, for the queue, when it has nothing to sample; every call of the front wakes it. While
it samples it empties the queue between any two steps, so `pause` returns when no further token will be sampled.

A caller waits for the worker with a bound (`timeout` seconds). The front's blocking calls belong in a thread other
than an event loop's; `submit` and `stats` do not block. When the worker ends, by `close` or by a failure, every
request and command that it has not answered fails with `EngineClosedError`.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from opengyre.tiny.checkpoint import load_tensors
from opengyre.tiny.config import ModelDirectoryError, TinyConfig
from opengyre.tiny.core import Core
from opengyre.tiny.kernel import Weights
from opengyre.tiny.state import Effect, EngineEvent, EngineState, advance
from opengyre.tiny.types import (
    EngineClosedError,
    EngineError,
    EngineSettings,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Increment,
    WrongStateError,
)

T = TypeVar("T")

_RATE_WINDOW_S: Final = 3.0
_RATE_SAMPLE_S: Final = 0.1
TIMEOUT_S: Final = 60.0


class TinyEngine:
    """Serves one model. Made RUNNING, with the weights of `directory` as `version`.

    Raises `ModelDirectoryError` if the directory cannot be used.
    """

    def __init__(self, directory: Path, version: int, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        config = TinyConfig.load(directory)
        self.config = config
        self._core = Core(config, settings)
        self._core.set_weights(Weights(config, load_tensors(directory, config)), version)
        self._core.allocate()
        self._directory = directory
        self._state = EngineState.RUNNING
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._pending: set[Future[Any]] = set()
        self._rate: tuple[tuple[float, int], ...] = ()
        self._thread = threading.Thread(target=self._work, args=(settings.threads,), name="tiny-engine", daemon=True)
        self._thread.start()

    # The front: any thread.

    def submit(self, request: GenerateRequest) -> "Future[GenerateResult]":
        """Queue a call. The future fails with an `EngineError` if it is refused; cancelling it frees its slot."""
        future: Future[GenerateResult] = Future()

        def deliver(result: GenerateResult) -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

        def add() -> None:
            if self._state is EngineState.ASLEEP:
                raise WrongStateError("submit: the engine is asleep; it must be running or paused")
            if not future.cancelled():
                self._core.add(request, deliver)

        def done(ended: "Future[GenerateResult]") -> None:
            with self._lock:
                self._pending.discard(ended)
            if ended.cancelled():
                self._put(Future(), lambda: self._core.abort([request.request_id]))

        added: Future[None] = Future()
        added.add_done_callback(lambda ended: self._refuse(future, ended))
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(done)
        self._put(added, add)
        return future

    def pause(self, timeout: float = TIMEOUT_S) -> None:
        """Sample nothing until `resume`; requests in flight and new ones are kept."""
        self._call(lambda: self._advance(EngineEvent.PAUSE), timeout)

    def resume(self, timeout: float = TIMEOUT_S) -> None:
        self._call(lambda: self._advance(EngineEvent.RESUME), timeout)

    def abort(self, request_ids: Iterable[str] | None = None, timeout: float = TIMEOUT_S) -> int:
        """End these calls, or all, with the tokens they have and finish reason `abort`; returns how many ended."""
        wanted = None if request_ids is None else tuple(request_ids)
        return self._call(lambda: self._core.abort(wanted), timeout)

    def load(self, directory: Path, version: int, timeout: float = TIMEOUT_S) -> None:
        """Exchange the weights, while paused. Calls in flight go on under the new ones, their cache recomputed.

        Raises `ModelDirectoryError`, the old weights kept, if the directory cannot be used.
        """
        self._call(lambda: self._advance(EngineEvent.LOAD, (directory, version)), timeout)

    def sleep(self, timeout: float = TIMEOUT_S) -> int:
        """Free weights and cache; returns the bytes freed. Raises `WrongStateError` while calls are in flight."""
        return self._call(self._sleep, timeout)

    def wake(self, directory: Path | None = None, version: int | None = None, timeout: float = TIMEOUT_S) -> None:
        """Be PAUSED with a cache and weights: those of before, or those of `directory` as `version`."""
        if (directory is None) != (version is None):
            raise ValueError("wake: directory and version go together; give both or neither")
        source = None if directory is None or version is None else (directory, version)
        self._call(lambda: self._advance(EngineEvent.WAKE, source), timeout)

    def stats(self) -> EngineStats:
        """What it does now, without waiting for the worker."""
        core, now = self._core, time.monotonic()
        window = [(at, tokens) for at, tokens in self._rate if now - at <= _RATE_WINDOW_S]
        rate = (core.tokens - window[0][1]) / (now - window[0][0]) if window and now > window[0][0] else 0.0
        cache, weights = core.cache, core.weights
        return EngineStats(
            state="closed" if self._closed else self._state.value,
            version=core.version,
            running=core.running,
            waiting=core.waiting,
            tokens=core.tokens,
            tokens_per_s=rate,
            kv_bytes=cache.nbytes if cache is not None else 0,
            weight_bytes=weights.nbytes if weights is not None else 0,
        )

    def progress(self) -> list[tuple[str, int, int, int]]:
        """Of each call in flight: its id, and the tokens of its prompt, sampled so far, and sampled at most; without
        waiting for the worker."""
        return self._core.progress()

    def sampled(self, request_id: str, after: int) -> Increment:
        """What a call in flight has beyond its first `after` tokens, without waiting for the worker; nothing for a call
        that is not in flight."""
        return self._core.sampled(request_id, after)

    def close(self, timeout: float = TIMEOUT_S) -> None:
        """End the calls in flight with what they have, then the worker. Repeating it changes nothing."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise EngineError(f"close: the engine's thread has not ended within {timeout} s")

    def _call(self, action: Callable[[], T], timeout: float) -> T:
        future: Future[T] = Future()
        self._put(future, action)
        return future.result(timeout)

    def _put(self, future: "Future[Any]", action: Callable[[], Any]) -> None:
        with self._lock:
            if not self._closed:
                self._pending.add(future)
                self._queue.put((future, action))
                return
        if not future.done():
            future.set_exception(EngineClosedError("the engine is closed"))

    @staticmethod
    def _refuse(future: "Future[GenerateResult]", added: "Future[None]") -> None:
        error = added.exception()
        if error is not None and not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)

    # The worker: its thread only.

    def _work(self, threads: int | None) -> None:
        try:
            torch.set_flush_denormal(True)
            if threads is not None:
                torch.set_num_threads(threads)
            samples: deque[tuple[float, int]] = deque(maxlen=int(_RATE_WINDOW_S / _RATE_SAMPLE_S) + 1)
            while self._serve():
                if self._state is EngineState.RUNNING and self._core.live:
                    now = time.monotonic()
                    if not samples or now - samples[-1][0] >= _RATE_SAMPLE_S:
                        samples.append((now, self._core.tokens))
                        self._rate = tuple(samples)
                    self._core.step()
        finally:
            with self._lock:
                self._closed = True
                pending, self._pending = self._pending, set()
            for future in pending:
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(EngineClosedError("the engine is closed"))

    def _serve(self) -> bool:
        """Do what the queue holds; wait for it if there is nothing to sample. False when the engine is to end."""
        idle = self._state is not EngineState.RUNNING or not self._core.live
        while True:
            try:
                command = self._queue.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                self._core.abort(None)
                return False
            idle = False
            self._answer(*command)

    def _answer(self, future: "Future[Any]", action: Callable[[], Any]) -> None:
        with self._lock:
            self._pending.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = action()
        except (EngineError, ModelDirectoryError, OSError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _advance(self, event: EngineEvent, source: tuple[Path, int] | None = None) -> None:
        state, effects = advance(self._state, event)
        for effect in effects:
            match effect:
                case Effect.EXCHANGE:
                    self._read(source)
                case Effect.FREE:
                    self._core.free()
                case Effect.RESTORE:
                    self._read(source or (self._directory, self._core.version))
                    self._core.allocate()
        self._state = state

    def _read(self, source: tuple[Path, int] | None) -> None:
        assert source is not None
        directory, version = source
        config = TinyConfig.load(directory)
        if config != self.config:
            raise ModelDirectoryError(f"{directory}: its config.json is of another shape than the engine's model")
        self._core.set_weights(Weights(config, load_tensors(directory, config)), version)
        self._directory = directory

    def _sleep(self) -> int:
        if self._core.live:
            raise WrongStateError(f"sleep: {self._core.live} calls are in flight; end or abort them first")
        before = self.stats()
        self._advance(EngineEvent.SLEEP)
        return before.kv_bytes + before.weight_bytes
