"""The elastic rule as a pure function: laws over random cells, and the cases that once hung."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.elastic.policy import LATE_S, decide, needed, target, useful
from opengyre.proto.decision import CellView, PolicyInput
from opengyre.proto.host import HostState
from opengyre.proto.run import Dispatch, Elastic

S = HostState


def cell(name: str, state: HostState = S.ROLLOUT, **fields) -> CellView:
    settled = {S.ROLLOUT: "rollout", S.TRAIN: "train", S.CORDONED: "cordoned"}.get(state)
    values = {"settled": settled is not None, "since_s": 10.0, "capacity": 4, "running": 0, "role": settled}
    return CellView(cell=name, hosts=(name,), state=state, **(values | fields))


def situation(*cells: CellView, live: int = 0, ready: int = 0, batch: int = 8, **elastic) -> PolicyInput:
    return PolicyInput(
        cells=cells,
        live_executions=live,
        ready_groups=ready,
        dispatch=Dispatch(batch_groups=batch),
        elastic=Elastic(**elastic),
    )


def roles(given: PolicyInput) -> dict[str, str]:
    return {change.cell: change.role for change in decide(given)}


def test_nothing_ready_and_nothing_to_serve_leaves_every_cell_where_it_is() -> None:
    assert roles(situation(cell("a"), cell("b", S.TRAIN))) == {}


def test_spare_cells_train_while_groups_wait_and_the_least_loaded_goes() -> None:
    cells = (cell("a", running=3), cell("b", running=1), cell("c", running=2))
    assert roles(situation(*cells, live=4, ready=1)) == {"b": "train"}
    assert roles(situation(*cells, live=4, ready=2)) == {"b": "train", "c": "train"}
    assert roles(situation(*cells, live=5, ready=2)) == {"b": "train"}
    assert roles(situation(*cells, live=12, ready=3)) == {}


def test_one_trains_once_half_a_batch_waits_though_all_are_needed() -> None:
    assert roles(situation(cell("a"), cell("b"), live=99, ready=3)) == {}
    assert roles(situation(cell("a"), cell("b"), live=99, ready=4)) == {"a": "train"}


def test_cells_return_as_soon_as_new_groups_are_dispatched() -> None:
    busy = (cell("a", S.TRAIN), cell("b", S.TRAIN))
    assert roles(situation(*busy, live=0, ready=2)) == {}
    assert roles(situation(*busy, live=8, ready=0)) == {"a": "rollout", "b": "rollout"}
    assert len(roles(situation(*busy, live=8, ready=2))) == 1


def test_a_lone_cell_alternates() -> None:
    assert roles(situation(cell("a"), live=9, ready=4)) == {"a": "train"}
    assert roles(situation(cell("a", S.TRAIN), live=9, ready=1)) == {}
    assert roles(situation(cell("a", S.TRAIN), live=9, ready=0)) == {"a": "rollout"}


def test_a_lone_cell_with_a_full_accumulator_goes_back_to_make_the_missing_groups() -> None:
    """Five of eight groups are in its accumulator: they stay `ready`, and only rollout makes the other three."""
    assert roles(situation(cell("a", S.TRAIN, idle_s=1.0), live=9, ready=5)) == {"a": "rollout"}


def test_one_busy_trainer_means_that_the_groups_that_wait_are_work() -> None:
    trainers = (cell("a", S.TRAIN, idle_s=1.0), cell("b", S.TRAIN))
    assert roles(situation(*trainers, live=4, ready=5)) == {"a": "rollout"}, "the idle one goes"


def test_dwell_and_unsettled_cells_are_respected() -> None:
    assert roles(situation(cell("a"), cell("b", since_s=0.2), live=0, ready=9, dwell_s=0.5)) == {"a": "train"}
    assert roles(situation(cell("a", settled=False, role="train"), cell("b"), live=4, ready=9)) == {}


def test_the_last_cell_that_serves_stays_while_another_is_on_its_way() -> None:
    coming = cell("b", S.JOINING, role="rollout", since_s=1.0)
    assert roles(situation(cell("a"), coming, live=8, ready=8)) == {}
    late = cell("b", S.JOINING, role="rollout", since_s=LATE_S + 1)
    assert roles(situation(cell("a"), late, live=8, ready=8)) == {"a": "train"}, "as if it were alone"


def test_wishes_are_obeyed_at_once_and_a_released_cell_serves() -> None:
    drained = cell("a", wish="train", since_s=0.0)
    assert roles(situation(drained, cell("b", S.TRAIN, wish="cordoned"), live=8)) == {"a": "train", "b": "cordoned"}
    assert roles(situation(cell("a", S.CORDONED))) == {"a": "rollout"}
    assert roles(situation(cell("a", S.TRAIN, wish="train"), live=8)) == {}, "all are wished away: SUSPENDED"


def test_static_keeps_its_split_and_a_lone_cell_alternates_all_the_same() -> None:
    three = (cell("a"), cell("b"), cell("c"))
    assert roles(situation(*three, live=99, policy="static", train_cells=2)) == {"a": "train", "b": "train"}
    split = (cell("a", S.TRAIN), cell("b"))
    assert roles(situation(*split, live=99, ready=0, policy="static", train_cells=1)) == {}
    assert roles(situation(*split, live=99, ready=0, policy="static", train_cells=5)) == {}, "one serves"
    assert roles(situation(cell("a"), live=9, ready=0, policy="static")) == {}
    assert roles(situation(cell("a"), live=9, ready=4, policy="static")) == {"a": "train"}


def test_static_sends_a_cell_to_train_before_it_has_started_an_engine() -> None:
    begin = cell("a", S.STARTING, since_s=0.1), cell("b", S.STARTING, since_s=0.1)
    assert roles(situation(*begin, policy="static")) == {"a": "train"}
    assert roles(situation(*begin, policy="static", train_cells=5)) == {"a": "train"}, "one serves"
    assert roles(situation(cell("a"), begin[1], live=9, policy="static")) == {"b": "train"}
    assert roles(situation(cell("a", S.TRAIN), begin[1], live=9, policy="static")) == {}
    assert roles(situation(begin[0], policy="static")) == {}, "alone, it serves first"


def test_the_floor_of_rollout_cells_gives_way_to_one_trainer_only() -> None:
    cells = (cell("a"), cell("b"), cell("c"))
    assert roles(situation(*cells, live=1, ready=3, min_rollout_cells=2)) == {"a": "train"}
    assert roles(situation(*cells, live=1, ready=3, min_rollout_cells=3)) == {}
    assert roles(situation(*cells, live=1, ready=4, min_rollout_cells=3)) == {"a": "train"}


def test_a_finished_run_trains_nothing() -> None:
    given = situation(cell("a", S.TRAIN), cell("b"), live=8, ready=8)
    finished = PolicyInput(
        cells=given.cells, live_executions=8, ready_groups=8, dispatch=given.dispatch, elastic=given.elastic,
        finished=True,
    )  # fmt: skip
    assert roles(finished) == {"a": "rollout"}


@pytest.mark.parametrize(("live", "floor", "expected"), [(0, 2, 0), (1, 0, 1), (4, 0, 1), (5, 0, 2), (99, 0, 3)])
def test_needed_is_the_ceiling_of_live_over_capacity(live: int, floor: int, expected: int) -> None:
    assert needed(live, floor, [cell("a"), cell("b"), cell("c")]) == expected


@st.composite
def situations(draw: st.DrawFn) -> PolicyInput:
    cells = []
    for number in range(draw(st.integers(1, 6))):
        state = draw(st.sampled_from(list(S)))
        role = draw(st.sampled_from([None, "rollout", "train", "cordoned"]))
        settled = role is None or {"rollout": S.ROLLOUT, "train": S.TRAIN, "cordoned": S.CORDONED}[role] is state
        cells.append(
            cell(
                f"c{number}",
                state,
                role=role,
                settled=settled and state in (S.ROLLOUT, S.TRAIN, S.CORDONED),
                since_s=draw(st.sampled_from([0.0, 1.0, 100.0])),
                running=draw(st.integers(0, 9)),
                idle_s=draw(st.sampled_from([0.0, 1.0])),
                wish=draw(st.sampled_from([None, None, None, "train", "cordoned", "rollout"])),
            )
        )
    return situation(
        *cells,
        live=draw(st.integers(0, 40)),
        ready=draw(st.integers(0, 12)),
        policy=draw(st.sampled_from(["fine", "static"])),
        train_cells=draw(st.integers(1, 6)),
        min_rollout_cells=draw(st.integers(0, 6)),
    )


@given(situations())
@settings(max_examples=400, deadline=None)
def test_live_episodes_never_lose_their_last_serving_cell(given: PolicyInput) -> None:
    changes = decide(given)
    assert len({change.cell for change in changes}) == len(changes)
    assert changes == decide(given), "the same input, the same decision"
    after = {view.cell: target(view) for view in given.cells} | {change.cell: change.role for change in changes}
    for view in given.cells:
        assert view.wish is None or after[view.cell] == view.wish
        if view.cell in {change.cell for change in changes} and view.wish is None and target(view) != "cordoned":
            begins = given.elastic.policy == "static" and view.state is S.STARTING
            assert view.settled or begins
            assert view.since_s >= given.elastic.dwell_s or begins
    served = [
        view for view in given.cells if view.settled and view.state is S.ROLLOUT and view.wish in (None, "rollout")
    ]
    left = [view for view in served if after[view.cell] == "rollout"]
    moved_away = [view for view in served if after[view.cell] == "train"]
    if given.live_executions and moved_away and not left:
        candidates = [
            view
            for view in given.cells
            if view.wish is None and target(view) != "cordoned"
            and (view.since_s <= LATE_S or (view.settled and view.state not in (S.STARTING, S.JOINING)))
        ]  # fmt: skip
        assert len(candidates) == 1, "only a lone cell may leave live episodes without any"
        assert given.ready_groups >= 4


@given(situations(), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_decisions_come_to_rest(given: PolicyInput, since: int) -> None:
    """Obeyed at once, decisions reach a state that they leave as it is: no two cells chase each other."""
    cells = [
        cell(view.cell, S.ROLLOUT if number % 2 else S.TRAIN, wish=view.wish, running=view.running, since_s=since)
        for number, view in enumerate(given.cells)
    ]
    where = {"rollout": S.ROLLOUT, "train": S.TRAIN, "cordoned": S.CORDONED}
    for _ in range(10):
        now = PolicyInput(
            cells=tuple(cells), live_executions=given.live_executions, ready_groups=given.ready_groups,
            dispatch=given.dispatch, elastic=given.elastic,
        )  # fmt: skip
        changes = {change.cell: change.role for change in decide(now)}
        if not changes:
            return
        cells = [
            cell(c.cell, where[changes[c.cell]], wish=c.wish, running=c.running, since_s=since)
            if c.cell in changes
            else c
            for c in cells
        ]
    raise AssertionError(f"still changing: {cells}")


@pytest.mark.parametrize(("gate", "switch_s"), [(1e-200, 1e-200), (1.0, 5e-324), (1e-300, 1e-8)])
def test_a_gate_too_small_to_divide_by_holds_nothing_back(gate: float, switch_s: float) -> None:
    given = situation(cell("a"), cell("b"), ready=3, gate=gate)
    assert useful(msgspec.structs.replace(given, train_s=1.0, switch_s=switch_s), 3) == 3
