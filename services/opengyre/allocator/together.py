"""Many publishes at a time, but not too many."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

WIDTH = 64
"""Publishes in flight: beyond it nats-py is slower, not faster."""


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]], width: int = WIDTH) -> None:
    """Run all, `width` at a time; the first fault cancels the others and is raised by itself."""
    places = asyncio.Semaphore(width)

    async def one(coroutine: Coroutine[Any, Any, Any]) -> None:
        async with places:
            await coroutine

    waiting = list(coroutines)
    try:
        async with asyncio.TaskGroup() as tasks:
            while waiting:
                tasks.create_task(one(waiting.pop()))
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None
