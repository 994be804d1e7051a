"""One call, asked of a second host where the first one says nothing: whose first token comes first has it.

Invariants: who listens hears one host only, from its first token on; what the other one sampled is in no completion,
and it is left as soon as it is known which one has the call, which frees its place.

Awaits: `run` is woken by a token, by the end of an entrant, and by `after_s`; whom it leaves it waits for.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from opengyre.rollout.engine import Hear
from opengyre.rollout.figures import HEDGES

T = TypeVar("T")
MOST = 2
"""Hosts that have a call at a time."""
Asking = Coroutine[Any, Any, T]


class Race:
    """Of one call. `hear`: who listens to it."""

    def __init__(self, hear: Hear | None) -> None:
        self._hear = hear
        self._numbers = itertools.count()
        self._decided = asyncio.Event()
        self.winner: int | None = None

    def entrant(self) -> Hear:
        """Of the next host that is asked: what its tokens are told to."""
        number = next(self._numbers)

        def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
            if self.winner is None:
                self.winner = number
                self._decided.set()
            if self.winner != number:
                return True
            return self._hear is not None and self._hear(tokens, logprobs)

        return hear

    async def run(self, first: Asking[T], another: Callable[[], Asking[T] | None], after_s: float) -> T:
        """What became of the call at the host that had its first token first; where all end without one, at the last of
        them. `another` gives a further entrant, or None where there is none now; at most two are asked at a time.
        Raises what an entrant raises that has no token."""
        entrants = [asyncio.create_task(first)]
        alive = set(entrants)
        decided = asyncio.create_task(self._decided.wait())
        try:
            while self.winner is None:
                bound = after_s if len(alive) < MOST else None
                done, _ = await asyncio.wait({*alive, decided}, timeout=bound, return_when=asyncio.FIRST_COMPLETED)
                ended = [one for one in entrants if one in alive and one in done]
                alive.difference_update(ended)
                if self.winner is None and ended and (not alive or any(one.exception() for one in ended)):
                    return await max(ended, key=lambda one: one.exception() is not None)
                if not done and (further := another()) is not None:
                    entrants.append(asyncio.create_task(further))
                    alive.add(entrants[-1])
            await _leave([one for one in entrants if one is not entrants[self.winner]])
            return await entrants[self.winner]
        finally:
            await _leave([*entrants, decided])
            if len(entrants) > 1:
                HEDGES.labels("none" if self.winner is None else "first" if self.winner == 0 else "other").inc()


async def _leave(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
