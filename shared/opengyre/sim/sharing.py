"""Processor sharing: calls that all run at one speed, the lesser of full speed and an even share of the capacity.

Virtual time `v` is the work that a call present since the start has done; a call of work `w` that comes at `v` ends at
`v + w`. So a change of speed touches no call, and an event costs O(log n).
"""

import heapq


class Sharing:
    """Work in hours at full speed. A call has a tag, which several may share."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int]] = []
        self._v = 0.0
        self._number = 0
        self._gone: dict[int, int] = {}
        """Tag -> calls in `_ends` that were taken out."""
        self._gone_total = 0

    def __len__(self) -> int:
        return len(self._ends) - self._gone_total

    def add(self, work: float, tag: int) -> None:
        self._number += 1
        heapq.heappush(self._ends, (self._v + work, self._number, tag))

    def take_out(self, tag: int, calls: int) -> None:
        """All calls of a tag that are left; the caller knows how many. The tag is not used again."""
        if calls:
            self._gone[tag] = calls
            self._gone_total += calls
            self._clear()

    def _clear(self) -> None:
        """Taken-out calls leave when they come to the front."""
        while self._ends and self._ends[0][2] in self._gone:
            tag = heapq.heappop(self._ends)[2]
            self._gone_total -= 1
            self._gone[tag] -= 1
            if not self._gone[tag]:
                del self._gone[tag]

    def speed(self, capacity: float) -> float:
        """Of each call, at a capacity of so many calls at full speed."""
        return min(1.0, capacity / len(self)) if len(self) else 0.0

    def next_end(self, capacity: float) -> float:
        """Hours until the next call ends at this capacity; infinity where none will."""
        speed = self.speed(capacity)
        return max(0.0, self._ends[0][0] - self._v) / speed if speed > 0 else float("inf")

    def advance(self, hours: float, capacity: float) -> list[int]:
        """Let time pass; the tags of the calls that ended, in order."""
        self._v += hours * self.speed(capacity)
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= self._v + 1e-12:
            ended.append(heapq.heappop(self._ends)[2])
            self._clear()
        return ended
