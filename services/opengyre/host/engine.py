"""The engine of a host: what the rest of the host knows of it.

States: asleep (no weights, no keys/values) -> awake and paused -> running, and back. `submit` never blocks, so that a
call that was let in is in the engine before anything else happens; the other calls reach the engine's own thread and
are awaited with its bound (60 s). Values are those of `opengyre.tiny.types`, which need no torch.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opengyre.host.learners import Learner
from opengyre.proto.host import Sampler
from opengyre.shared.settings import HostSettings
from opengyre.tiny.types import EngineStats, GenerateRequest, GenerateResult, Increment

WAITING_FACTOR = 8
"""How many times its capacity an engine queues before it refuses."""


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a call in flight is, in tokens."""

    request_id: str
    prompt: int
    sampled: int
    limit: int
    """The most that it samples."""


class Engine(Protocol):
    """What serves tokens. Errors are `EngineError`s and, where a directory is read, `ModelDirectoryError`."""

    name: str
    capacity: float
    """Calls that it serves at full speed."""
    takes_turns: bool
    """Whether a load stops its calls noticeably, so that hosts load one after another."""

    @property
    def load_bound_s(self) -> float | None:
        """How long the longest step of the next `load` or `wake` may take; None where it ends by itself."""
        ...

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

    def sampler(self) -> Sampler | None:
        """How it samples, as it is in force; None before it has been awake. Does not block."""
        ...

    def progress(self) -> Sequence[CallProgress]:
        """Of each call in flight, those that wait in it too; does not block."""
        ...

    def sampled(self, request_id: str, after: int) -> Increment:
        """What a call in flight has beyond its first `after` tokens, nothing where it is not in flight; does not
        block."""
        ...

    async def close(self) -> None: ...


def make_engine(settings: HostSettings) -> Engine:
    """The engine that the settings ask for; what it needs is imported only then."""
    if settings.engine == "emulated":
        from opengyre.host.emulated import EmulatedEngine

        return EmulatedEngine(settings)
    if settings.engine == "vllm":
        from opengyre.host.vllm import VllmEngine

        return VllmEngine(settings)
    from opengyre.host.tiny import TinyHostEngine

    return TinyHostEngine(int(settings.capacity), settings.threads)


def make_learner(settings: HostSettings) -> Learner:
    """The learner that belongs to the engine."""
    if settings.engine == "emulated":
        from opengyre.host.emulated import EmulatedLearner

        return EmulatedLearner(settings)
    if settings.ranks > 1:
        import torch

        from opengyre.host.crew import CrewLearner, backend_of

        backend = backend_of(settings.ranks, torch.cuda.device_count())
        return CrewLearner(
            settings.ranks,
            settings.threads,
            backend=backend,
            chunk=settings.chunk,
            offload=settings.offload,
            forest_tokens=settings.forest_tokens,
        )
    from opengyre.host.gradients import TorchLearner

    return TorchLearner(
        settings.threads, chunk=settings.chunk, offload=settings.offload, forest_tokens=settings.forest_tokens
    )
