"""What holds things back is said by the bound that does."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opengyre.elastic.admission import room
from opengyre.elastic.explain import held_by, refused, suspended, unmet_floors
from opengyre.proto.decision import AdmissionInput, CellReport
from opengyre.proto.run import Dispatch, Elastic


def given_(dispatch: Dispatch | None = None, **fields: Any) -> AdmissionInput:
    values: dict[str, Any] = {
        "dispatch": dispatch or Dispatch(phi=0.5, mu=2, batch_groups=8, group_size=8), "updates": None,
        "state": "active", "finished": False, "published": 2, "kept_executions": 36 * 8,
        "unconsumed_executions": 20 * 8, "waiting": 5, "most": 64,
    }  # fmt: skip
    return AdmissionInput(**{**values, **fields})


def test_each_bound_has_its_sentence() -> None:
    assert held_by(given_()) == (
        "the depth (phi + mu) * batch_groups of 20 groups is full: 20 are unconsumed; the version after 2 makes room"
    )
    assert "first weights" in (held_by(given_(published=-1)) or "")
    assert held_by(given_(updates=4, kept_executions=256, unconsumed_executions=100)) == (
        "all groups of the run's 4 updates are admitted"
    )
    bound = Dispatch(phi=0.5, mu=2, d_max=1)
    assert "dispatch.d_max 1 holds admission: the oldest unconsumed group is of version 1, so no more is admitted" in (
        held_by(given_(bound, oldest_version=1, kept_executions=24 * 8, unconsumed_executions=64)) or ""
    )
    both = given_(Dispatch(phi=0, mu=1, d_max=0), kept_executions=24 * 8, unconsumed_executions=64, oldest_version=2)
    assert "the depth" in (held_by(both) or ""), "the bound that held before d_max was set is the reason"
    assert held_by(given_(Dispatch(continuous=6), live_groups=6, unconsumed_executions=64)) == (
        "dispatch.continuous keeps 6 groups unfinished: 6 are"
    )
    free = given_(kept_executions=30 * 8, unconsumed_executions=14 * 8)
    assert held_by(free) is None
    waits = held_by(given_(kept_executions=30 * 8, unconsumed_executions=14 * 8, waiting=0))
    assert waits == "admission waits for tasks: 6 groups could be admitted, and no task waits that trains"
    assert held_by(given_(finished=True)) is None
    assert held_by(given_(state="stopped")) is None


@given(st.integers(-1, 9), st.integers(0, 400), st.integers(0, 400), st.integers(0, 3), st.none() | st.integers(1, 9))
def test_there_is_a_sentence_exactly_when_nothing_is_admitted(
    published: int, unconsumed: int, consumed: int, waiting: int, updates: int | None
) -> None:
    asked = given_(
        published=published, unconsumed_executions=unconsumed, kept_executions=unconsumed + consumed, waiting=waiting,
        updates=updates,
    )  # fmt: skip
    assert (held_by(asked) is None) == (room(asked) > 0)


def cell(name: str, state: str = "rollout", role: Any = "rollout", wish: Any = None) -> CellReport:
    return CellReport(cell=name, hosts=(name,), state=state, role=role, wish=wish)


def test_floors_that_the_cells_cannot_meet() -> None:
    floors = Elastic(min_rollout_cells=1, min_train_cells=1)
    assert unmet_floors(floors, [cell("a"), cell("b")]) == []
    (sentence,) = unmet_floors(floors, [cell("a"), cell("b", "lost")])
    assert sentence == (
        "elastic.min_rollout_cells and elastic.min_train_cells are 2 together, and 1 cell can be in these roles "
        "(b is lost)"
    )
    (sentence,) = unmet_floors(Elastic(min_rollout_cells=2), [cell("a"), cell("b", "train", "train", "train")])
    assert sentence == (
        "elastic.min_rollout_cells is 2, and 1 cell can be in that role "
        "(b is held in the role train by an operator's wish)"
    )
    assert unmet_floors(Elastic(min_train_cells=1), [cell("b", "train", "train", "train")]) == []


def test_suspended_episodes_and_why() -> None:
    assert suspended(0, []) is None
    assert suspended(3, [cell("a"), cell("b", "train", "train")]) is None
    assert suspended(3, []) == "the episodes of 3 live executions are suspended: no cell serves (there are no cells)"
    why = suspended(3, [cell("a", "joining"), cell("b", "draining", "train"), cell("c", "lost")])
    assert why == (
        "the episodes of 3 live executions are suspended: no cell serves (a is joining, on its way to the rollout; "
        "b is draining, told to be in the role train; c is lost)"
    )


def test_a_refused_cell_is_named_with_its_reason_and_counts_for_no_floor() -> None:
    there = CellReport(cell="a", hosts=("a",), state="rollout", role="rollout", wish=None)
    away = CellReport(
        cell="b", hosts=("b",), state="refused", role=None, wish=None, refused="b does not serve run r: why"
    )
    assert refused([there, away]) == ["cell b is refused: b does not serve run r: why"]
    assert unmet_floors(Elastic(min_rollout_cells=2), [there, away]) == [
        "elastic.min_rollout_cells is 2, and 1 cell can be in that role (b is refused)"
    ]
    assert suspended(3, [away]) == "the episodes of 3 live executions are suspended: no cell serves (b is refused)"
