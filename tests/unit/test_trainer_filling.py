"""What enters an update, and what is kept of what was consumed."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.ids import execution_id, group_id, group_of
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.trainer.filling import arrivals, burst_left, open_for, stale
from opengyre.trainer.frontier import Frontier
from opengyre.trainer.store import Record
from opengyre.trainer.update import Arrived, Update, advance

SPEC = RunSpec(run="r", model="m", updates=5, dispatch=Dispatch(mu=2, batch_groups=2, group_size=3))


def record(version: int, published: int) -> Record:
    return Record(run="r", version=version, published=published)


def empty(size: int = 6, number: int = 1) -> Update:
    return Update(number=number, attempt="t", size=size, grain=3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(1, 7))
def test_updates_take_each_execution_once_in_the_order_of_arrival(sizes: list[int], size: int) -> None:
    pending = {
        f"m{number}": tuple(execution_id(group_id("r", number), member) for member in range(count))
        for number, count in enumerate(sizes)
    }
    everything = [name for names in pending.values() for name in names]
    taken: list[str] = []
    number = 0
    while sum(map(len, pending.values())) >= size:
        number += 1
        update = empty(size, number)
        for key, names in arrivals(pending, update):
            update, _ = advance(update, Arrived(key, names))
        assert len(update.units) == size
        assert arrivals(pending, update) == []
        taken += update.units
        inside = update.source
        pending = {key: tuple(name for name in names if name not in inside) for key, names in pending.items()}
    assert taken == everything[: len(taken)]
    assert len(taken) == number * size


def test_without_streaming_an_update_opens_when_its_burst_is_there() -> None:
    spec = msgspec.structs.replace(SPEC, elastic=Elastic(stream=False))
    first = record(0, 0)
    assert burst_left(spec, first) == 12
    assert open_for(SPEC, first, {}, empty())
    assert not open_for(spec, first, {"m": ("a",) * 11}, empty())
    assert open_for(spec, first, {"m": ("a",) * 12}, empty())
    assert burst_left(spec, record(1, 0)) == 6, "of the burst under way"
    assert burst_left(spec, record(4, 4)) == 6, "what is left of the run"
    assert burst_left(spec, record(3, 0)) == 6, "mu was lowered under way"
    begun, _ = advance(empty(), Arrived("m", ("a",)))
    assert open_for(spec, first, {}, begun)


@pytest.mark.parametrize(("d_max", "version", "old"), [(None, 99, False), (2, 5, False), (2, 6, True), (0, 3, False)])
def test_what_would_be_staler_than_the_bound_does_not_enter(d_max, version, old) -> None:
    spec = msgspec.structs.replace(SPEC, dispatch=Dispatch(d_max=d_max))
    assert stale(spec, record(version, 0), 3) == old


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=40), st.integers(0, 40))
def test_the_frontier_knows_what_was_consumed_and_keeps_whole_groups_by_name(pairs, cut) -> None:
    consumed = [execution_id(group_id("r", group), member) for group, member in pairs]
    sizes = {group_id("r", group): 3 for group in range(5)}
    frontier = Frontier()
    frontier.add(consumed[:cut], sizes)
    frontier = Frontier(frontier.whole, frontier.partial)
    frontier.add(consumed[cut:], sizes)
    every = {execution_id(group, member) for group in sizes for member in range(3)}
    assert {name for name in every if name in frontier} == set(consumed)
    members = Counter(map(group_of, set(consumed)))
    assert frontier.whole == tuple(sorted(group for group, count in members.items() if count == 3))
    assert all(members[group_of(name)] < 3 for name in frontier.partial)
