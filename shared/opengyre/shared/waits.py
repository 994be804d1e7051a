"""What a service is waiting for, so that nothing waits silently (law 7)."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

from opengyre.proto.service import Wait


class Waits:
    """The present waits of one process. `/v1/status` shows them."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, float, float | None]] = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def on(self, what: str, bound_s: float | None = None) -> Iterator[None]:
        """Name what the block waits for; `bound_s` is when it gives up or looks again."""
        number = next(self._numbers)
        self._open[number] = (what, asyncio.get_running_loop().time(), bound_s)
        try:
            yield
        finally:
            del self._open[number]

    def report(self) -> tuple[Wait, ...]:
        """Waits for the same thing as one, the oldest first."""
        now = asyncio.get_running_loop().time()
        merged: dict[str, Wait] = {}
        for what, since, bound in self._open.values():
            before = merged.get(what)
            merged[what] = Wait(
                what=what,
                since_s=round(max(now - since, before.since_s if before else 0.0), 3),
                bound_s=bound,
                count=(before.count if before else 0) + 1,
            )
        return tuple(sorted(merged.values(), key=lambda wait: -wait.since_s))
