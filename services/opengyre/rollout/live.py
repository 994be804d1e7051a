"""A call under way, as those see it who wait for it.

Awaits: who listens gives an event, which is set by each increment of the call and by its end.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from opengyre.proto.traj import Call
from opengyre.rollout.speech import Watch


@dataclass
class Live:
    call: str
    """Its name in the log."""
    opening: tuple[int, ...]
    """Tokens that begin the answer and were not sampled."""
    prompt_tokens: int
    most: int
    """What it may sample."""
    watch: Watch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    task: "asyncio.Task[Call] | None" = None
    _listeners: list[asyncio.Event] = field(default_factory=list)

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Take an increment; whether nothing more is needed."""
        self.tokens += tokens
        self.logprobs += logprobs
        self._tell()
        return self.watch.over(tokens)

    def begin(self, task: "asyncio.Task[Call]") -> None:
        self.task = task
        task.add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        for listener in self._listeners:
            listener.set()

    @contextlib.contextmanager
    def listening(self, listener: asyncio.Event) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    @property
    def task_of(self) -> "asyncio.Task[Call]":
        assert self.task is not None, "it has begun"
        return self.task
