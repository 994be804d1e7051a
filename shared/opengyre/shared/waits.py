"""What a service is waiting for, so that nothing waits silently (law 7)."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

from opengyre.proto.service import Wait

AGAIN_S = 0.5


class Waits:
    """The present waits of one process. `/v1/status` shows them."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, float, float | None]] = {}
        self._looks: dict[str, tuple[float, float]] = {}
        """What was waited for by looking again and again -> since when, and when the last look ended."""
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def on(self, what: str, bound_s: float | None = None, *, looking: bool = False) -> Iterator[None]:
        """Name what the block waits for; `bound_s` is when it gives up or looks again.

        `looking`: the block is one look of many; one that follows another within `AGAIN_S` goes on waiting with it.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        since = loop.time()
        if looking:
            self._looks = {name: look for name, look in self._looks.items() if since - look[1] < AGAIN_S}
            since = self._looks.get(what, (since, since))[0]
        self._open[number] = (what, since, bound_s)
        try:
            yield
        finally:
            del self._open[number]
            if looking:
                self._looks[what] = (since, loop.time())

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
