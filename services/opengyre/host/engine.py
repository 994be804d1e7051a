"""The engine of a host: what the rest of the host knows of it, and the tiny one.

States: asleep (no weights, no keys/values) -> awake and paused -> running, and back. `submit` never blocks, so that a
call that was let in is in the engine before anything else happens; the other calls reach the engine's own thread and
are awaited with its bound (60 s). Values are those of `opengyre.tiny.types`, which need no torch.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from opengyre.shared.settings import HostSettings
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.engine import TinyEngine
from opengyre.tiny.types import EngineSettings, EngineStats, GenerateRequest, GenerateResult, WrongStateError

WAITING_FACTOR = 8
"""How many times its capacity an engine queues before it refuses."""


class Engine(Protocol):
    """What serves tokens. Errors are `EngineError`s and, where a directory is read, `ModelDirectoryError`."""

    name: str

    def submit(self, request: GenerateRequest) -> "asyncio.Future[GenerateResult]":
        """Queue a call, at once. Cancelling the future frees its place."""
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`; calls in flight and new ones are kept."""
        ...

    async def resume(self) -> None: ...

    async def load(self, directory: Path, version: int) -> None:
        """While paused: exchange the weights; calls in flight go on under the new ones, with exact version spans."""
        ...

    async def sleep(self) -> None:
        """Free weights and keys/values. No call may be in flight."""
        ...

    async def wake(self, directory: Path, version: int) -> None:
        """From asleep (or from the start): be paused with these weights."""
        ...

    async def abort(self, request_ids: Iterable[str] | None) -> int:
        """End these calls, or all, with their partial tokens and finish reason `abort`; how many ended."""
        ...

    def stats(self) -> EngineStats:
        """What it does and holds now, measured; does not block."""
        ...

    async def close(self) -> None: ...


class TinyHostEngine:
    """`TinyEngine` behind the interface; made when the first weights are known."""

    name = "tiny"

    def __init__(self, capacity: int, threads: int) -> None:
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


def make_engine(settings: HostSettings) -> Engine:
    """The engine that the settings ask for."""
    return TinyHostEngine(settings.capacity, settings.threads)
