"""The machine of one supervised process: what is never told to stop always comes back, and nothing else does."""

from hypothesis import given
from hypothesis import strategies as st

from opengyre.cli.supervisor_state import (
    BACKOFF_MAX_S,
    STEADY_S,
    TABLE,
    Do,
    Event,
    Kind,
    Life,
    State,
    advance,
    backoff_s,
)

EVENTS = st.builds(
    Event,
    kind=st.sampled_from(Kind),
    code=st.sampled_from([None, 0, 1, -9]),
    uptime_s=st.sampled_from([0.0, 1.0, STEADY_S]),
)
LIVING = {State.STARTING, State.RUNNING, State.STOPPING, State.KILLED}


def walk(events: list[Event]) -> list[tuple[Life, tuple[Do, ...], Life]]:
    life, steps = Life(), []
    for event in events:
        before = life
        life, effects = advance(life, event)
        steps.append((before, tuple(effect.do for effect in effects), life))
    return steps


@given(st.lists(EVENTS, max_size=60))
def test_a_process_is_spawned_only_when_there_is_none(events: list[Event]) -> None:
    for before, done, after in walk(events):
        assert done.count(Do.SPAWN) == (1 if after.state is State.STARTING and Do.SPAWN in done else 0)
        if Do.SPAWN in done:
            assert after.state is State.STARTING
            # It was down, waiting, or its process has just ended.
            assert before.state in {State.DOWN, State.BACKOFF, State.STARTING, State.RUNNING}


@given(st.lists(EVENTS, max_size=60))
def test_after_a_stop_nothing_is_spawned_until_it_is_started_again(events: list[Event]) -> None:
    stopped = True
    for event, (_, done, after) in zip(events, walk(events), strict=True):
        if event.kind is Kind.START:
            stopped = False
        if event.kind is Kind.STOP and after.state in {State.DOWN, State.STOPPING, State.KILLED}:
            stopped = True
        if stopped and event.kind is not Kind.START:
            assert Do.SPAWN not in done
        if after.state is State.DOWN:
            stopped = True


@given(st.lists(st.sampled_from([0.0, 1.0, STEADY_S + 1]), min_size=1, max_size=40))
def test_it_always_comes_back_and_the_delay_is_bounded(uptimes: list[float]) -> None:
    life, _ = advance(Life(), Event(Kind.START))
    for uptime in uptimes:
        life, effects = advance(life, Event(Kind.EXITED, code=-9, uptime_s=uptime))
        assert effects[0].do is Do.REPORT
        assert 0 <= effects[0].delay_s <= BACKOFF_MAX_S
        if uptime >= STEADY_S:
            assert effects[1].do is Do.SPAWN  # at once after a steady life
        if life.state is State.BACKOFF:
            life, effects = advance(life, Event(Kind.DUE))
        assert life.state is State.STARTING
        assert effects[-1].do is Do.SPAWN
    assert life.restarts == len(uptimes)


def test_the_delays_double_from_nothing_to_their_bound() -> None:
    delays = [backoff_s(failures) for failures in range(1, 200)]
    assert delays[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF_MAX_S


def test_an_overdue_stop_is_a_kill_and_ends_in_down() -> None:
    life, _ = advance(Life(state=State.RUNNING), Event(Kind.STOP))
    life, effects = advance(life, Event(Kind.OVERDUE))
    assert (life.state, effects[0].do) == (State.KILLED, Do.KILL)
    life, effects = advance(life, Event(Kind.EXITED, code=-9))
    assert (life.state, effects) == (State.DOWN, ())


def test_every_state_that_has_a_process_knows_what_its_exit_means() -> None:
    for state in LIVING:
        assert (state, Kind.EXITED) in TABLE
