"""Cancellation that always arrives.

nats-py swallows a cancellation while it flushes under back-pressure, so its calls run in a task of their own, and a
cancelled caller leaves at once.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def _collect(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


async def promptly(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`; when the caller is cancelled, cancel it and leave without waiting for it."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_collect)
        raise
