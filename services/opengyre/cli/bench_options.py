"""What benches take, tell and end with alike."""

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeVar

import typer

from opengyre.cli.client import errors, show_json
from opengyre.cli.stack import StackError

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a bench."""
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


@contextlib.contextmanager
def until_signal() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block, once it has ended what it started, with the signal's exit status.

    All come to it as Ctrl-C does: as a cancelled task where a loop runs, else as `KeyboardInterrupt`.
    """
    told: list[int] = []

    def end(number: int, _: object) -> None:
        if not told:  # a second one does not cut off what the first began
            told.append(number)
            signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
        signal.signal(signal.SIGTERM, end)
        if before[signal.SIGHUP] != signal.SIG_IGN:  # else `nohup` wants it to go on
            signal.signal(signal.SIGHUP, end)
        yield
    except KeyboardInterrupt:
        errors.print("stopped; nothing runs any more")
        raise typer.Exit(128 + (told or [signal.SIGINT])[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell(found: Found, json: bool, show: Callable[[Found], None]) -> None:
    """Print what was measured, as JSON or by `show`."""
    if json:
        show_json(found)
    else:
        show(found)
