"""A processor-sharing accelerator on a given clock.

Every call runs at `speed` tokens a second while at most `capacity` calls are in; above that all share
`speed * capacity` evenly. All calls always run equally fast, so one virtual time (the tokens that a call which was
always there would have) orders their ends, and one heap holds them: O(log n) a submission, an end or an abort.

Invariants: time never goes back; a call ends exactly when its work is done, before any later event is seen; the work
done in an interval is the integral of `min(calls, capacity) * speed`, and nothing while it is paused.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_SLACK: Final = 1e-9
"""Of a token, by which sums of floats may miss a whole one."""


@dataclass(slots=True)
class _Call:
    name: str
    start: float
    """Virtual time at its submission."""
    work: int
    left: bool = False


class Accelerator:
    """`speed` in tokens a second of a call alone, `capacity` in calls; the clock's unit is the second."""

    def __init__(self, speed: float, capacity: float) -> None:
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"speed is {speed}; allowed are finite values above 0")
        if not (capacity > 0 and math.isfinite(capacity)):
            raise ValueError(f"capacity is {capacity}; allowed are finite values above 0")
        self.speed = speed
        self.capacity = capacity
        self.virtual = 0.0
        """Tokens that a call which was always there would have."""
        self._now = -math.inf
        self._paused = False
        self._calls: dict[str, _Call] = {}
        self._heap: list[tuple[float, int, _Call]] = []
        self._ended: deque[str] = deque()
        self._numbers = itertools.count()
        self._starts = 0.0
        """Sum of the calls' `start`."""

    def __len__(self) -> int:
        """Calls in flight at the last event."""
        return len(self._calls)

    @property
    def rate(self) -> float:
        """Tokens a second of each call now."""
        if self._paused or not self._calls:
            return 0.0
        return self.speed * min(1.0, self.capacity / len(self._calls))

    @property
    def sampled(self) -> float:
        """Tokens that the calls in flight have, together."""
        return self.virtual * len(self._calls) - self._starts

    def submit(self, name: str, work: int, now: float) -> None:
        """A call of `work` tokens, at least one. Raises `ValueError` for a name that is in flight."""
        self._pass(now)
        if name in self._calls:
            raise ValueError(f"call {name!r} is in flight")
        if work < 1:
            raise ValueError(f"work is {work}; allowed are values from 1")
        call = _Call(name, self.virtual, work)
        self._calls[name] = call
        self._starts += call.start
        heapq.heappush(self._heap, (call.start + work, next(self._numbers), call))

    def advance(self, now: float) -> list[str]:
        """The calls that have ended since the last time, up to `now`, in the order of their ends."""
        self._pass(now)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def next_event(self, now: float) -> float | None:
        """When the next call ends if nothing is submitted or aborted before; None if none will."""
        self._pass(now)
        if self._ended:
            return now
        finish = self._first()
        if finish is None or not self.rate:
            return None
        return now + max(0.0, finish - self.virtual) / self.rate

    def abort(self, name: str, now: float) -> int:
        """Take a call out; the whole tokens that it has. Raises `KeyError` for one that is not in flight."""
        self._pass(now)
        call = self._calls[name]
        done = self._tokens(call)
        self._remove(call)
        return done

    def tokens(self, name: str) -> int:
        """Whole tokens that a call in flight has since the last event; raises `KeyError`."""
        return self._tokens(self._calls[name])

    def pause(self, now: float) -> None:
        """Do nothing until `resume`; calls are kept and taken."""
        self._pass(now)
        self._paused = True

    def resume(self, now: float) -> None:
        self._pass(now)
        self._paused = False

    def _tokens(self, call: _Call) -> int:
        return min(call.work, int(self.virtual - call.start + _SLACK))

    def _remove(self, call: _Call) -> None:
        call.left = True
        del self._calls[call.name]
        self._starts = self._starts - call.start if self._calls else 0.0

    def _first(self) -> float | None:
        """Virtual time of the first end; what was aborted is dropped on the way."""
        while self._heap and self._heap[0][2].left:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _pass(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        while not self._paused and (finish := self._first()) is not None:
            due = self._now + max(0.0, finish - self.virtual) / self.rate
            if due > now:
                self.virtual += (now - self._now) * self.rate
                break
            self._now, self.virtual = due, max(self.virtual, finish)
            _, _, call = heapq.heappop(self._heap)
            self._remove(call)
            self._ended.append(call.name)
        self._now = now
