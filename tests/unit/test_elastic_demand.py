"""Demand as it is measured: the share of live executions that has a call in flight."""

import pytest

from opengyre.elastic.demand import FALL_S, Demand
from opengyre.proto.decision import CellView
from opengyre.proto.host import HostState
from opengyre.proto.update import UpdateStats


def cell(running: int, state: HostState = HostState.ROLLOUT) -> CellView:
    return CellView(cell="c", hosts=("h",), state=state, settled=True, since_s=9, capacity=8, running=running)


def test_nothing_is_known_before_something_serves() -> None:
    demand = Demand()
    demand.observe([cell(0, HostState.TRAIN)], 10, 0.0)
    demand.observe([cell(5)], 0, 0.0)
    assert demand.calls(10, 10) is None
    assert demand.train_s(8) is None


def test_the_share_is_learned_and_a_moment_without_a_server_is_no_news() -> None:
    demand = Demand()
    demand.observe([cell(2), cell(3)], 10, 0.0)
    assert demand.calls(10, 10) == 10, "one call each until it is measured"
    for tick in range(1, 200):
        demand.observe([cell(2), cell(3)], 10, tick * FALL_S / 10)
    assert demand.calls(10, 10) == pytest.approx(5, abs=0.01)
    before = demand.calls(10, 10)
    demand.observe([cell(0, HostState.TRAIN)], 10, 1e6)
    assert demand.calls(10, 10) == before
    assert demand.calls(1, 1) == 1, "never less than a call while something is live"
    assert demand.calls(0, 0) is None


def test_what_training_takes_is_learned_by_execution() -> None:
    demand = Demand()
    demand.trained(UpdateStats(executions=0, busy_s=3.0))
    demand.trained(UpdateStats(executions=4, busy_s=8.0))
    assert demand.train_s(8) == 16
    for _ in range(50):
        demand.trained(UpdateStats(executions=2, busy_s=2.0))
    assert demand.train_s(8) == pytest.approx(8)


def test_executions_that_are_not_begun_need_a_call_each_and_a_falling_share_is_believed_late() -> None:
    """At a boundary hundreds of executions are live before the first of them calls; cells were sent to train."""
    demand = Demand()
    for tick in range(200):
        demand.observe([cell(5)], 10, tick * FALL_S)
    assert demand.calls(400, 10) == pytest.approx(395, abs=0.01)
    demand.observe([cell(8)], 10, 1e4)
    demand.observe([cell(0)], 10, 1e4 + 1.0, switch_s=5.0)
    assert demand.calls(10, 10) == pytest.approx(8, abs=0.2), "a second is little beside twenty switches"
