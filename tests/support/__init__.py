"""What tests of every suite use: `from support import eventually`."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def eventually(
    condition: Callable[[], Any],
    timeout_s: float = 30.0,
    every_s: float = 0.02,
    found: Callable[[], object] | None = None,
) -> None:
    """Wait until `condition()` (plain or async) is true; fail after `timeout_s`, however slow the machine is, and say
    what was `found()` instead."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(every_s)
    except TimeoutError:
        if found is None:
            raise
        raise AssertionError(f"not so after {timeout_s:g} s: {found()}") from None
