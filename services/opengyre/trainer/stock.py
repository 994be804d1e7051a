"""The messages that are the trainer's: held until the last of their executions is consumed or has left training.

A message stays ours (`in_progress`) across updates, for it may straddle them, and is acknowledged when the commit that
took the last of it is told. What is held when the block ends is given back at once.

Awaits: the broker's answers; nothing here waits for anybody else.
"""

import contextlib
from collections.abc import Iterable
from typing import Final, Self

from opengyre.shared.bus import Delivery
from opengyre.trainer.books import Held

KEEP_S: Final = 4.0


class Stock:
    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        """Message -> what it brought, in order of arrival."""
        self.pending: dict[str, tuple[str, ...]] = {}
        """Message -> its executions that no committed update took."""
        self._kept: dict[str, list[tuple[Delivery, contextlib.AsyncExitStack]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for key in list(self._kept):
            while self._kept[key]:
                delivery, keeping = self._kept[key].pop()
                await keeping.aclose()
                await delivery.retry()

    async def keep(self, delivery: Delivery, held: Held, executions: tuple[str, ...]) -> None:
        """Hold the message; a second delivery of one is held with the first."""
        keeping = contextlib.AsyncExitStack()
        await keeping.enter_async_context(delivery.held(KEEP_S))
        self._kept.setdefault(held.key, []).append((delivery, keeping))
        self.held.setdefault(held.key, held)
        self.pending.setdefault(held.key, executions)

    def settle(self, executions: Iterable[str]) -> None:
        """These are consumed, or have left training."""
        gone = set(executions)
        for key, left in self.pending.items():
            if not gone.isdisjoint(left):
                self.pending[key] = tuple(execution for execution in left if execution not in gone)

    def ending(self, executions: Iterable[str]) -> list[Held]:
        """Messages of which nothing is left once these are settled."""
        gone = set(executions)
        return [self.held[key] for key, left in self.pending.items() if gone.issuperset(left)]

    async def acknowledge(self) -> None:
        """Let go of the messages of which nothing is left."""
        for key in [key for key, left in self.pending.items() if not left]:
            while self._kept[key]:
                delivery, keeping = self._kept[key][-1]
                await delivery.ack()
                await keeping.aclose()
                self._kept[key].pop()
            del self._kept[key], self.pending[key], self.held[key]
