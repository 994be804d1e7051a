"""A call that two hosts are asked for: one is heard, the other is left."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from opengyre.rollout.engine import Hear
from opengyre.rollout.hedge import Race
from support import eventually

SOON = 0.01


class Entrant:
    """A host that says a token when it is let, and then what it was told to end with."""

    def __init__(self, name: str, hear: Hear, token: int = 1) -> None:
        self.name = name
        self.hear = hear
        self.token = token
        self.speak = asyncio.Event()
        self.end = asyncio.Event()
        self.fault: Exception | None = None
        self.left = False
        self.unwanted = False

    async def ask(self) -> str:
        try:
            speak, end = asyncio.create_task(self.speak.wait()), asyncio.create_task(self.end.wait())
            try:
                await asyncio.wait({speak, end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                speak.cancel()
                end.cancel()
            if self.speak.is_set():
                self.unwanted = self.hear([self.token], [-1.0])
            await self.end.wait()
            if self.fault is not None:
                raise self.fault
        except asyncio.CancelledError:
            self.left = True
            raise
        return self.name


class Field:
    """Entrants of a race, made as they are asked for; `names` are those that there are."""

    def __init__(self, *names: str) -> None:
        self.heard: list[int] = []
        self.race = Race(self._hear)
        self.entrants: list[Entrant] = []
        self._names = list(names)
        self.asked = asyncio.Event()

    def _hear(self, tokens: Sequence[int], _logprobs: Sequence[float]) -> bool:
        self.heard += tokens
        return False

    def enter(self) -> Entrant:
        entrant = Entrant(self._names.pop(0), self.race.entrant(), len(self.entrants))
        self.entrants.append(entrant)
        return entrant

    def another(self):
        if not self._names:
            return None
        entrant = self.enter()
        if len(self.entrants) == 2:
            self.asked.set()
        return entrant.ask()

    def run(self, after_s: float = SOON) -> "asyncio.Task[str]":
        return asyncio.create_task(self.race.run(self.enter().ask(), self.another, after_s))


async def test_a_host_that_speaks_in_time_is_the_only_one_that_is_asked() -> None:
    field = Field("a", "b")
    running = field.run(after_s=30)
    await asyncio.sleep(0)
    field.entrants[0].speak.set()
    field.entrants[0].end.set()
    assert await running == "a"
    assert (len(field.entrants), field.heard) == (1, [0])


@pytest.mark.parametrize(("first", "winner"), [(0, "a"), (1, "b")])
async def test_the_first_token_decides_and_the_other_host_is_left(first: int, winner: str) -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    chosen, other = field.entrants[first], field.entrants[1 - first]
    await asyncio.sleep(0)
    chosen.speak.set()
    await eventually(lambda: other.left)
    assert not running.done(), "the call goes on"
    chosen.end.set()
    assert await running == winner
    assert field.heard == [first]
    assert not chosen.unwanted


async def test_tokens_of_one_only_are_heard_where_both_speak_at_once() -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    await asyncio.sleep(0)
    for entrant in field.entrants:
        entrant.speak.set()
        entrant.end.set()
    winner = await running
    chosen = next(entrant for entrant in field.entrants if entrant.name == winner)
    other = next(entrant for entrant in field.entrants if entrant is not chosen)
    assert field.heard == [chosen.token]
    assert other.unwanted or other.left


def _fails(entrant: Entrant) -> None:
    entrant.fault = ValueError("refused")
    entrant.end.set()


def _ends(entrant: Entrant) -> None:
    entrant.end.set()


@pytest.mark.parametrize("gone", [0, 1])
async def test_a_host_that_ends_without_a_token_leaves_the_call_to_the_other(gone: int) -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    field.entrants[gone].end.set()
    other = field.entrants[1 - gone]
    other.speak.set()
    other.end.set()
    assert await running == other.name
    assert field.heard == [1 - gone]


async def test_a_third_host_takes_the_place_of_one_that_ended_without_a_token() -> None:
    field = Field("a", "b", "c")
    running = field.run()
    await field.asked.wait()
    field.entrants[1].end.set()
    await eventually(lambda: len(field.entrants) == 3)
    field.entrants[2].speak.set()
    field.entrants[2].end.set()
    assert await running == "c"
    assert field.entrants[0].left


@pytest.mark.parametrize(("end", "result"), [(_ends, "ab"), (_fails, None)])
async def test_what_the_last_one_says_is_said_where_none_has_a_token(
    end: Callable[[Entrant], None], result: str | None
) -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    _ends(field.entrants[0])
    await asyncio.sleep(0)
    end(field.entrants[1])
    if result is None:
        with pytest.raises(ValueError, match="refused"):
            await running
    else:
        assert await running in result
    assert field.heard == []


async def test_a_refusal_ends_the_call_while_the_other_host_hangs() -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    _fails(field.entrants[1])
    with pytest.raises(ValueError, match="refused"):
        await running
    assert field.entrants[0].left


async def test_a_call_that_is_cancelled_leaves_both() -> None:
    field = Field("a", "b")
    running = field.run()
    await field.asked.wait()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(entrant.left for entrant in field.entrants)
