"""A decision that is decided again from its inputs is the same, and what was tampered with is told."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.elastic.admission import room
from opengyre.elastic.policy import decide, suspends
from opengyre.elastic.replay import redecide, replay
from opengyre.proto import codec
from opengyre.proto.decision import AdmissionInput, CellView, Decision, PolicyInput, RoleChange
from opengyre.proto.host import HostState
from opengyre.proto.run import Dispatch, Elastic

CELLS = st.builds(
    CellView,
    cell=st.just("c"),
    hosts=st.just(("h",)),
    state=st.sampled_from(HostState),
    settled=st.booleans(),
    since_s=st.floats(0, 100),
    capacity=st.integers(1, 32),
    running=st.integers(0, 40),
    wish=st.sampled_from((None, None, None, "rollout", "train", "cordoned")),
    role=st.sampled_from((None, "rollout", "train")),
    idle_s=st.floats(0, 3),
    held_tokens=st.integers(0, 9999),
)


@st.composite
def inputs(draw: st.DrawFn) -> PolicyInput:
    drawn = draw(st.lists(CELLS, max_size=5))
    return PolicyInput(
        cells=tuple(msgspec.structs.replace(cell, cell=f"c{number}") for number, cell in enumerate(drawn)),
        live_executions=draw(st.integers(0, 100)),
        ready_groups=draw(st.floats(0, 40)),
        dispatch=Dispatch(),
        elastic=Elastic(policy=draw(st.sampled_from(("fine", "static", "global", "coarse"))), standalone_cells=1),
        finished=draw(st.booleans()),
        demand_calls=draw(st.none() | st.floats(0, 200)),
        switch_s=draw(st.none() | st.floats(0, 10)),
        train_s=draw(st.none() | st.floats(0, 10)),
    )


def sent(decision: Decision) -> Decision:
    """The decision as it comes back from its stream."""
    event = codec.decode(codec.encode(decision))
    assert isinstance(event, Decision)
    return event


def roles(given: PolicyInput) -> Decision:
    changes = decide(given)
    return Decision(
        run="r", decision="1-0", kind="roles", input=given, changes=changes, suspends=suspends(given, changes)
    )


@given(inputs())
def test_a_roles_decision_comes_out_the_same_after_its_way_through_the_stream(given: PolicyInput) -> None:
    assert redecide(sent(roles(given))) == []


@given(inputs(), st.sampled_from(("role", "reason", "more", "fewer", "suspends")))
def test_what_was_tampered_with_is_told(given: PolicyInput, how: str) -> None:
    honest = roles(given)
    changes = honest.changes
    if how == "suspends":
        forged = msgspec.structs.replace(honest, suspends=not honest.suspends)
    elif how == "more":
        extra = RoleChange(cell="other", role="train", reason="x")
        forged = msgspec.structs.replace(honest, changes=(*changes, extra))
    elif not changes:
        return
    elif how == "fewer":
        forged = msgspec.structs.replace(honest, changes=changes[1:])
    else:
        other = "cordoned" if changes[0].role != "cordoned" else "train"
        values: dict[str, Any] = {"role": other} if how == "role" else {"reason": "because"}
        forged = msgspec.structs.replace(honest, changes=(msgspec.structs.replace(changes[0], **values), *changes[1:]))
    found = redecide(sent(forged))
    assert found
    fields = {one.field for one in found}
    cell = changes[0].cell if changes else "other"
    assert (
        fields
        & {
            "role": {f"changes.{cell}.role"},
            "reason": {f"changes.{cell}.reason"},
            "more": {"changes.other"},
            "fewer": {f"changes.{cell}"},
            "suspends": {"suspends"},
        }[how]
    )


@st.composite
def admissions(draw: st.DrawFn) -> AdmissionInput:
    size = draw(st.integers(1, 8))
    unconsumed = draw(st.integers(0, 30 * size))
    return AdmissionInput(
        dispatch=Dispatch(
            phi=draw(st.sampled_from((0, 0.5, 1))), mu=draw(st.integers(1, 3)), batch_groups=4, group_size=size,
            min_members=1, continuous=draw(st.none() | st.integers(1, 20)),
        ),
        updates=draw(st.none() | st.integers(1, 20)),
        state="active",
        finished=draw(st.booleans()),
        published=draw(st.integers(-1, 9)),
        kept_executions=unconsumed + draw(st.integers(0, 200)),
        unconsumed_executions=unconsumed,
        live_groups=draw(st.integers(0, 20)),
        waiting=draw(st.integers(0, 99)),
        most=64,
        evaluating=draw(st.integers(0, 2)),
    )  # fmt: skip


def admission(given: AdmissionInput, more: int = 0) -> Decision:
    count = room(given) + given.evaluating + more
    return Decision(
        run="r", decision="1-1", kind="admission", admission=given, version=given.published,
        admitted=tuple(f"r-g{number:06d}" for number in range(count)),
    )  # fmt: skip


@given(admissions())
def test_an_admission_comes_out_the_same_and_one_group_more_does_not(given: AdmissionInput) -> None:
    assert redecide(sent(admission(given))) == []
    (difference,) = redecide(sent(admission(given, more=1))) or []
    assert (difference.field, difference.recorded - difference.decided) == ("admitted", 1)


@pytest.mark.parametrize(("wish", "role"), [("drain", "train"), ("cordon", "cordoned"), ("resume", "rollout")])
def test_a_wish_is_checked_against_the_change_that_it_made(wish: Any, role: Any) -> None:
    change = RoleChange(cell="c0", role=role, reason="x")
    assert redecide(Decision(run="r", decision="1-2", kind="wish", wish=wish, changes=(change,))) == []
    wrong = msgspec.structs.replace(change, role="train" if role != "train" else "rollout")
    (difference,) = redecide(Decision(run="r", decision="1-2", kind="wish", wish=wish, changes=(wrong,))) or []
    assert (difference.field, difference.decided) == ("changes", [role])


def test_a_replay_counts_what_has_no_inputs() -> None:
    bare = Decision(run="r", decision="1-3", kind="admission", admitted=("r-g000000",), note="begun by a former leader")
    given = PolicyInput(cells=(), live_executions=0, ready_groups=0, dispatch=Dispatch(), elastic=Elastic())
    report = replay("r", [bare, roles(given), msgspec.structs.replace(bare, kind="wish")])
    assert (report.decisions, report.without_inputs, report.differences) == (3, 2, ())
    assert report.kinds == {"admission": 1, "roles": 1, "wish": 1}
