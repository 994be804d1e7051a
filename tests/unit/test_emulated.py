"""Laws of the emulated accelerator: processor sharing, and tokens that no move changes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.emulated.accelerator import Accelerator
from opengyre.emulated.tokens import DEEPEST, FIRST, draw, noise
from opengyre.tiny.sampling import uniform

pytestmark = pytest.mark.torch

CALLS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), min_size=1, max_size=12)


def run_to_end(accelerator: Accelerator, calls: list[tuple[float, int]]) -> dict[str, float]:
    """Submit each call at its time; when each ended."""
    ends: dict[str, float] = {}
    arrivals = sorted((at, f"c{n}", work) for n, (at, work) in enumerate(calls))
    now = 0.0
    while arrivals or len(accelerator):
        due = accelerator.next_event(now)
        if arrivals and (due is None or arrivals[0][0] <= due):
            now, name, work = arrivals.pop(0)
            ends |= dict.fromkeys(accelerator.advance(now), now)
            accelerator.submit(name, work, now)
        else:
            assert due is not None
            now = due
            ends |= dict.fromkeys(accelerator.advance(now), now)
    return ends


def stepped(calls: list[tuple[float, int]], speed: float, capacity: float) -> dict[str, float]:
    """The same by definition: between two changes every call gets its share."""
    left = {f"c{n}": float(work) for n, (_, work) in enumerate(calls)}
    arrivals = {f"c{n}": at for n, (at, _) in enumerate(calls)}
    inside: set[str] = set()
    ends: dict[str, float] = {}
    now = 0.0
    while len(ends) < len(calls):
        rate = speed * min(1.0, capacity / len(inside)) if inside else 0.0
        changes = [at for name, at in arrivals.items() if name not in inside and name not in ends]
        changes += [now + left[name] / rate for name in inside]
        then = min(changes)
        for name in inside:
            left[name] -= rate * (then - now)
        now = then
        for name in [name for name in inside if left[name] <= 1e-7]:
            inside.discard(name)
            ends[name] = now
        inside |= {name for name, at in arrivals.items() if at <= now and name not in ends}
    return ends


@given(CALLS, st.floats(0.5, 20), st.floats(0.5, 8))
def test_calls_end_when_even_sharing_ends_them(calls: list[tuple[float, int]], speed: float, capacity: float) -> None:
    ends = run_to_end(Accelerator(speed, capacity), calls)
    wanted = stepped(calls, speed, capacity)
    assert ends.keys() == wanted.keys()
    for name, at in wanted.items():
        assert math.isclose(ends[name], at, rel_tol=1e-6, abs_tol=1e-5)


def test_a_call_alone_runs_at_full_speed_and_more_than_the_capacity_share() -> None:
    assert run_to_end(Accelerator(10, 2), [(0, 20), (0, 20)]) == {"c0": 2.0, "c1": 2.0}
    assert run_to_end(Accelerator(10, 2), [(0, 20)] * 4) == {f"c{n}": 4.0 for n in range(4)}


def test_a_pause_stops_the_work_and_keeps_the_calls() -> None:
    accelerator = Accelerator(10, 4)
    accelerator.submit("a", 20, 0.0)
    accelerator.pause(1.0)
    assert accelerator.next_event(1.0) is None
    assert accelerator.advance(50.0) == []
    assert accelerator.tokens("a") == 10
    accelerator.resume(50.0)
    assert accelerator.next_event(50.0) == 51.0
    assert accelerator.advance(51.0) == ["a"]


def test_what_cannot_be_is_refused() -> None:
    accelerator = Accelerator(10, 4)
    accelerator.submit("a", 20, 1.0)
    for wrong in (
        lambda: accelerator.submit("a", 1, 2.0),
        lambda: accelerator.submit("b", 0, 2.0),
        lambda: accelerator.advance(0.5),
        lambda: Accelerator(0, 1),
        lambda: Accelerator(1, math.inf),
    ):
        with pytest.raises(ValueError, match=r"in flight|allowed|went back"):
            wrong()


@given(CALLS, st.lists(st.tuples(st.floats(0, 30), st.integers(0, 11)), max_size=12))
def test_an_aborted_call_has_what_it_was_given_and_nothing_is_lost(
    calls: list[tuple[float, int]], aborts: list[tuple[float, int]]
) -> None:
    """Law: every call ends once, by its end or by an abort, with at most its work; the sum of what is in flight is
    the sum over the calls."""
    accelerator = Accelerator(3.0, 2.0)
    events = sorted(
        [(at, 0, f"c{n}", work) for n, (at, work) in enumerate(calls)] + [(at, 1, f"c{n}", 0) for at, n in aborts]
    )
    got: dict[str, int] = {}
    works = {f"c{n}": work for n, (_, work) in enumerate(calls)}
    live: set[str] = set()
    for at, kind, name, work in events:
        for ended in accelerator.advance(at):
            assert ended not in got
            got[ended] = works[ended]
            live.discard(ended)
        if kind == 0:
            accelerator.submit(name, work, at)
            live.add(name)
        elif name in live:
            got[name] = accelerator.abort(name, at)
            live.discard(name)
        assert len(accelerator) == len(live)
        exact = sum(accelerator.tokens(name) for name in live)
        assert exact - 1e-6 <= accelerator.sampled <= exact + len(live) + 1e-6
    for ended in accelerator.advance(1e6):
        got[ended] = works[ended]
    assert got.keys() == works.keys()
    assert all(0 <= tokens <= works[name] for name, tokens in got.items())


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 511), min_size=1, max_size=20),
    st.integers(1, 60),
    st.lists(st.integers(0, 60), max_size=6),
    st.sets(st.integers(0, 511), max_size=3),
)
def test_any_schedule_of_moves_gives_the_tokens_of_an_unmoved_call(
    seed: int, prompt: list[int], limit: int, stops_at: list[int], stop_tokens: set[int]
) -> None:
    stops = tuple(sorted(stop_tokens))
    whole = draw(seed, len(prompt), limit, 512, stops)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for at in [*sorted(stops_at), limit]:
        count = min(at, limit) - len(tokens)
        part = draw(seed, len(prompt) + len(tokens), count, 512, stops)
        tokens, logprobs = tokens + part[0], logprobs + part[1]
    assert (tokens, logprobs) == whole
    assert all(FIRST <= token < 512 and token not in stops for token in tokens)
    assert all(-DEEPEST <= value < 0 for value in logprobs)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1 << 20), st.integers(0, 16))
def test_the_noise_is_that_of_the_tiny_engine(seed: int, start: int, count: int) -> None:
    bits = noise(seed, start, count)
    assert [(int(value) >> 11) / (1 << 53) for value in bits] == [uniform(seed, start + n) for n in range(count)]


def test_a_vocabulary_of_stop_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token that is not a stop token"):
        draw(1, 0, 3, 2, (0, 1))
