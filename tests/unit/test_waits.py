"""What a process waits for, and for how long: also where it waits by looking again and again (law 7)."""

import asyncio
from types import SimpleNamespace

import pytest

from opengyre.shared.waits import AGAIN_S, Waits


class Clock:
    """A loop's clock that a test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: self.now))


def ages(waits: Waits) -> dict[str, float]:
    return {wait.what: wait.since_s for wait in waits.report()}


def look(waits: Waits, clock: Clock, what: str, seconds: float, *, looking: bool = True) -> float:
    """One look; the age that is told at its end."""
    with waits.on(what, 1.0, looking=looking):
        clock.now += seconds
        return ages(waits)[what]


def test_a_wait_that_looks_again_and_again_keeps_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gyre status` said "an active run, for 0.4 s" of a trainer that had waited for minutes."""
    clock, waits = Clock(monkeypatch), Waits()
    assert [look(waits, clock, "a run", 10.0) for _ in range(3)] == [10.0, 20.0, 30.0]
    assert look(waits, clock, "another", 1.0) == 1.0
    clock.now += AGAIN_S
    assert look(waits, clock, "a run", 2.0) == 2.0
    assert ages(waits) == {}


def test_waits_of_their_own_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Clock(monkeypatch), Waits()
    assert [look(waits, clock, "an answer", 3.0, looking=False) for _ in range(2)] == [3.0, 3.0]
