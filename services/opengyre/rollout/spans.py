"""Where the time of a request goes: spans of its stages, which its answer names in the header `Server-Timing`.

The spans of a request are held by a context variable, which the tasks that it begins inherit; a stage that happens
several times (choices, moves) is their sum. Outside a request nothing is kept.
"""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

HEADER = "Server-Timing"
_spans: ContextVar[dict[str, float] | None] = ContextVar("spans", default=None)


@contextlib.contextmanager
def spans() -> Iterator[dict[str, float]]:
    """Keep spans for as long as the block lasts: stage -> seconds."""
    found: dict[str, float] = {}
    token = _spans.set(found)
    try:
        yield found
    finally:
        _spans.reset(token)


def add(stage: str, seconds: float) -> None:
    found = _spans.get()
    if found is not None:
        found[stage] = found.get(stage, 0.0) + seconds


class stage:  # noqa: N801 - it is used as a verb is; a generator's context would take three times as long
    """The time of a block, whatever becomes of it."""

    __slots__ = ("_name", "_since")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        add(self._name, time.perf_counter() - self._since)


def written(found: dict[str, float]) -> str:
    """The header's value, in milliseconds (https://www.w3.org/TR/server-timing/)."""
    return ", ".join(f"{name};dur={1e3 * seconds:.3f}" for name, seconds in found.items())
