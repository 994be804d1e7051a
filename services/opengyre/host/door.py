"""Who is let in, and who is inside: the calls of a host.

Invariants: a call is counted from before it reaches the engine until its answer is made; nobody is let in while the
door is shut; at most `limit` are inside.

Awaits: `empty` is woken by the last call that leaves, or ends by its timeout.
"""

import asyncio
import contextlib
from collections.abc import Iterator


class NotServingError(Exception):
    """The host is not in the rollout role."""


class FullError(Exception):
    """As many calls are inside as may be."""


class Door:
    """Shut when made."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.live = 0

    def admit(self) -> None:
        self._open = True

    def refuse(self) -> None:
        self._open = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Hold a place for as long as the block lasts. Raises `NotServingError` or `FullError`."""
        if not self._open:
            raise NotServingError
        if self.live >= self._limit:
            raise FullError(f"{self.live} calls are in flight; at most {self._limit} are taken")
        self.live += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.live -= 1
            if not self.live:
                self._empty.set()

    async def empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside, `timeout_s` at most; whether it is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self.live
