"""What benches take, tell and end with alike."""

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any, NoReturn, TypeVar

import typer

from opengyre.cli.client import errors, show_json
from opengyre.cli.stack import StackError

Found = TypeVar("Found")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def chosen(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """The comma-separated names that an option was given, each once, in order. Raises `StackError` for another name
    and for none."""
    wanted = _parts(text)
    for name in wanted:
        if name not in allowed:
            raise StackError(f"{option} names {name!r}; allowed: {', '.join(allowed)}")
    if not wanted:
        raise StackError(f"{option} is empty; allowed: {', '.join(allowed)}")
    return wanted


def numbers(option: str, text: str, low: int, high: int) -> list[int]:
    """The comma-separated whole numbers that an option was given, each once, in order. Raises `StackError`."""
    wanted = _parts(text)
    for number in wanted:
        # Digits before `int`, which takes thousands of them only to refuse them in another way.
        if not (number.isascii() and number.isdecimal() and len(number) <= 18 and low <= int(number) <= high):
            raise StackError(f"{option} names {number!r}; allowed: whole numbers from {low} to {high}")
    if not wanted:
        raise StackError(f"{option} is empty; allowed: whole numbers from {low} to {high}")
    return list(dict.fromkeys(map(int, wanted)))


def until_signal(main: Coroutine[Any, Any, Found]) -> Found:
    """Run it to its end; Ctrl-C, SIGTERM and SIGHUP end it, once it has ended what it started, with `stopped`."""
    told: list[int] = []

    async def run() -> Found:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            if not told:  # a second one does not cut off what the first began
                task.cancel()
            told.append(number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await main

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        stopped()
    except asyncio.CancelledError:
        if not told:
            raise
        stopped(128 + told[0])


def stopped(status: int = 130) -> NoReturn:
    """The end of a bench that Ctrl-C ended, or another signal with its status."""
    errors.print("stopped; nothing runs any more")
    raise typer.Exit(status) from None


def tell(found: Found, json: bool, show: Callable[[Found], None]) -> None:
    """Print what was measured, as JSON or by `show`."""
    if json:
        show_json(found)
    else:
        show(found)
