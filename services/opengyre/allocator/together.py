"""Many publishes at a time, but not too many."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

WIDTH = 64
"""Publishes in flight: beyond it nats-py is slower, not faster."""


async def together(do: Callable[[T], Awaitable[Any]], items: Iterable[T], width: int = WIDTH) -> None:
    """`do` each item, begun in their order, `width` at a time; the first fault cancels the others and is raised."""
    places = asyncio.Semaphore(width)

    async def one(item: T) -> None:
        try:
            await do(item)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                await places.acquire()
                tasks.create_task(one(item))
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None
