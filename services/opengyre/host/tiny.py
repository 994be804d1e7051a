"""The tiny engine behind the host's interface.

Awaits: each is woken by the engine's own thread, with its bound (60 s).
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from opengyre.host.engine import WAITING_FACTOR, CallProgress
from opengyre.proto.host import Sampler
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.engine import TIMEOUT_S, TinyEngine
from opengyre.tiny.types import (
    EngineSettings,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Increment,
    WrongStateError,
)


class TinyHostEngine:
    """`TinyEngine` behind the interface; made when the first weights are known."""

    name = "tiny"
    takes_turns = True
    load_bound_s = TIMEOUT_S

    def __init__(self, capacity: int, threads: int) -> None:
        self.capacity: float = capacity
        self._settings = EngineSettings(max_batch=capacity, max_waiting=WAITING_FACTOR * capacity, threads=threads)
        self._engine: TinyEngine | None = None

    def submit(self, request: GenerateRequest) -> "asyncio.Future[GenerateResult]":
        return asyncio.wrap_future(self._awake().submit(request))

    async def pause(self) -> None:
        await asyncio.to_thread(self._awake().pause)

    async def resume(self) -> None:
        await asyncio.to_thread(self._awake().resume)

    async def load(self, directory: Path, version: int) -> None:
        await asyncio.to_thread(self._awake().load, directory, version)

    async def sleep(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.sleep)

    async def wake(self, directory: Path, version: int) -> None:
        await asyncio.to_thread(self._wake, directory, version)

    async def abort(self, request_ids: Iterable[str] | None) -> int:
        return 0 if self._engine is None else await asyncio.to_thread(self._engine.abort, request_ids)

    def stats(self) -> EngineStats:
        if self._engine is None:
            return EngineStats("asleep", -1, 0, 0, 0, 0.0, 0, 0)
        return self._engine.stats()

    def sampler(self) -> Sampler:
        return Sampler()

    def progress(self) -> list[CallProgress]:
        return [] if self._engine is None else [CallProgress(*call) for call in self._engine.progress()]

    def sampled(self, request_id: str, after: int) -> Increment:
        return Increment() if self._engine is None else self._engine.sampled(request_id, after)

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _awake(self) -> TinyEngine:
        if self._engine is None:
            raise WrongStateError("the engine has no weights yet")
        return self._engine

    def _wake(self, directory: Path, version: int) -> None:
        engine = self._engine
        if engine is not None and engine.stats().state == "asleep":
            if engine.config == TinyConfig.load(directory):
                engine.wake(directory, version)
                return
            # Another run's model may have another shape, for which the engine's buffers do not fit.
            self._engine = None
            engine.close()
            engine = None
        if engine is not None:
            raise WrongStateError(f"wake: the engine is {engine.stats().state}; it must be asleep")
        engine = TinyEngine(directory, version, self._settings)
        engine.pause()
        self._engine = engine
