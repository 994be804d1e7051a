"""The time budget of an episode, on the event loop's clock; suspended time does not count.

`limit` is entered around what the budget bounds; `pause` and `resume` move its deadline meanwhile.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class BudgetSpentError(Exception):
    """The time budget is used up."""


class TimeBudget:
    """`spent_s` counts what former writers used."""

    def __init__(self, limit_s: float, spent_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._spent_s = spent_s
        self._since: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._pauses = 0

    @property
    def spent_s(self) -> float:
        running = asyncio.get_running_loop().time() - self._since if self._since is not None else 0.0
        return self._spent_s + running

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block with `BudgetSpentError` when the budget is used up."""
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeout = timeout
                self._run()
                try:
                    yield
                finally:
                    self._halt()
                    self._timeout = None
        except TimeoutError as error:
            if timeout.expired():
                raise BudgetSpentError(f"{self._limit_s:g} s are spent") from error
            raise

    def pause(self) -> None:
        """Stop the clock; pauses nest."""
        self._pauses += 1
        if self._pauses == 1:
            self._halt()

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self._timeout is not None:
            self._run()

    def _run(self) -> None:
        if self._pauses:
            return
        now = asyncio.get_running_loop().time()
        self._since = now
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(now + max(0.0, self._limit_s - self._spent_s))

    def _halt(self) -> None:
        if self._since is not None:
            self._spent_s += asyncio.get_running_loop().time() - self._since
            self._since = None
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(None)
