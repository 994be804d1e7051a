"""The role machine: every table entry, and its laws under random events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.host.roles import (
    ACTIVITY,
    DONE,
    TURN,
    Activity,
    Effect,
    Position,
    Signal,
    advance,
    ended,
    goal,
    obeys,
)
from opengyre.proto.host import DesiredRole, HostState

S = HostState
GOALS = (S.STARTING, S.ROLLOUT, S.TRAIN, S.CORDONED)


def told(role: str, epoch: int) -> DesiredRole:
    return DesiredRole(host="h", role=role, epoch=epoch)  # type: ignore[arg-type]  # fields by keyword, checked at run time


def walk(*events: DesiredRole | Signal) -> list[HostState]:
    position, states = Position(), [S.STARTING]
    for event in events:
        position, _ = advance(position, event)
        states.append(position.state)
    return states


def test_a_switch_and_back_goes_through_every_state() -> None:
    assert walk(
        Signal.WEIGHTS,
        Signal.APPLIED,
        told("train", 1),
        Signal.DRAINED,
        told("rollout", 2),
        Signal.LEFT,
        Signal.APPLIED,
    ) == [S.STARTING, S.JOINING, S.ROLLOUT, S.DRAINING, S.TRAIN, S.LEAVING_TRAIN, S.JOINING, S.ROLLOUT]


def test_a_repeated_or_older_command_changes_nothing() -> None:
    position, _ = advance(Position(), Signal.WEIGHTS)
    position, _ = advance(position, Signal.APPLIED)
    position, _ = advance(position, told("train", 5))
    for command in (told("train", 5), told("rollout", 5), told("rollout", 4), told("cordoned", 0)):
        assert advance(position, command) == (position, ())


def test_a_wish_during_a_drain_counts_when_it_is_done() -> None:
    assert walk(Signal.WEIGHTS, Signal.APPLIED, told("train", 1), told("rollout", 2), Signal.DRAINED) == [
        S.STARTING, S.JOINING, S.ROLLOUT, S.DRAINING, S.DRAINING, S.JOINING,
    ]  # fmt: skip


def test_another_run_drains_and_waits_for_its_weights() -> None:
    assert walk(Signal.WEIGHTS, Signal.APPLIED, Signal.RUN_CHANGED, Signal.DRAINED, Signal.WEIGHTS) == [
        S.STARTING, S.JOINING, S.ROLLOUT, S.DRAINING, S.STARTING, S.JOINING,
    ]  # fmt: skip


def test_stop_drains_and_then_obeys_nothing() -> None:
    position = Position(S.ROLLOUT, known=True)
    position, effects = advance(position, Signal.STOP)
    assert (position.state, effects) == (S.DRAINING, (Effect.REFUSE,))
    assert not obeys(position, told("rollout", 99))
    assert not ended(position)
    position, _ = advance(position, Signal.DRAINED)
    assert position.state is S.CORDONED
    assert ended(position)


def test_cordoned_before_any_weights_stays_so_when_they_come() -> None:
    assert walk(told("cordoned", 1), Signal.WEIGHTS, told("train", 2)) == [
        S.STARTING, S.CORDONED, S.CORDONED, S.TRAIN,
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "aim"), [(s, g) for s in S for g in GOALS])
def test_the_table_is_total_and_never_skips_a_drain_a_hand_over_or_a_load(state: HostState, aim: HostState) -> None:
    allowed = {
        S.STARTING: {S.STARTING, S.JOINING, S.TRAIN, S.CORDONED},
        S.JOINING: {S.JOINING, S.DRAINING},
        S.ROLLOUT: {S.ROLLOUT, S.DRAINING},
        S.DRAINING: {S.DRAINING},
        S.TRAIN: {S.TRAIN, S.LEAVING_TRAIN},
        S.LEAVING_TRAIN: {S.LEAVING_TRAIN},
        S.CORDONED: {S.STARTING, S.JOINING, S.TRAIN, S.CORDONED},
    }
    after = TURN[state][aim]
    assert after in allowed[state]
    # A state that suits its goal is kept; one that does not is left or is on its way.
    resting = {S.STARTING: S.STARTING, S.ROLLOUT: S.ROLLOUT, S.TRAIN: S.TRAIN, S.CORDONED: S.CORDONED}
    if state is resting[aim]:
        assert after is state
    elif state in resting.values():
        assert after is not state


@pytest.mark.parametrize("state", S)
def test_every_state_has_an_activity_and_the_busy_ones_an_end(state: HostState) -> None:
    ending = {Activity.LOAD: Signal.APPLIED, Activity.DRAIN: Signal.DRAINED, Activity.LEAVE: Signal.LEFT}
    activity = ACTIVITY[state]
    if activity in ending:
        assert (state, ending[activity]) in DONE
    for signal in (Signal.APPLIED, Signal.DRAINED, Signal.LEFT):
        position = Position(state, known=True)
        if (state, signal) not in DONE:
            assert advance(position, signal) == (position, ())


EVENTS = st.one_of(
    st.builds(told, st.sampled_from(["rollout", "train", "cordoned"]), st.integers(0, 12)),
    st.sampled_from([s for s in Signal if s is not Signal.STOP]),
)


@settings(max_examples=400)
@given(st.lists(EVENTS, max_size=60), st.integers(0, 60))
def test_no_traffic_outside_rollout_epochs_only_grow_and_it_always_settles(
    events: list[DesiredRole | Signal], stop_at: int
) -> None:
    position, is_open = Position(), False
    for number, event in enumerate([*events, Signal.WEIGHTS]):
        if number == stop_at:
            event = Signal.STOP
        before = position
        position, effects = advance(position, event)
        for effect in effects:
            is_open = effect is Effect.ADMIT
        assert is_open == (position.state is S.ROLLOUT)
        assert position.epoch >= before.epoch
        if isinstance(event, DesiredRole) and event.epoch <= before.epoch:
            assert position == before
        if position.state is S.TRAIN and before.state is not S.TRAIN:
            assert before.state in (S.DRAINING, S.LEAVING_TRAIN, S.STARTING, S.CORDONED)
        if position.state is S.ROLLOUT and before.state is not S.ROLLOUT:
            assert (before.state, event) == (S.JOINING, Signal.APPLIED)
    # When every activity ends, it comes to rest in the state that was wished last.
    ends = {Activity.LOAD: Signal.APPLIED, Activity.DRAIN: Signal.DRAINED, Activity.LEAVE: Signal.LEFT}
    for _ in range(4):
        if ACTIVITY[position.state] in ends:
            position, _ = advance(position, ends[ACTIVITY[position.state]])
    assert position.state is goal(position)
