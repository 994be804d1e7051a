"""Folding of events, positions in streams, the status page's sums: no I/O."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.gateway.folding import TaskFold, score_of, shown
from opengyre.gateway.positions import DEFAULT, STREAMS, BadPositionError, chosen, filter_of, parse, render
from opengyre.gateway.status import gauges_of, waits_of
from opengyre.gateway.tasks import refusal
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.run import Branching, Harness, RunSpec, Scoring
from opengyre.proto.service import ServiceStatus, Wait
from opengyre.proto.task import (
    Check,
    GroupConsumed,
    GroupScored,
    TaskAdmitted,
    TaskSpec,
    TaskStep,
    TaskSubmitted,
    TaskTests,
)
from opengyre.proto.task_rules import InvalidTaskError, validate_task
from opengyre.proto.traj import Bulk, Call, Part, VersionSpan

SPEC = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1.0),), repeat=2)


def admitted(group: str) -> TaskAdmitted:
    return TaskAdmitted(run="r", task="t", group=group, executions=(f"{group}-e00",), version=3)


def scored(group: str, outcome: str) -> GroupScored:
    return msgspec.convert(
        {
            "type": "task.scored.v1", "run": "r", "task": "t", "group": group, "outcome": outcome,
            "scores": {f"{group}-e00": 0.5}, "sampled_version_min": 3, "sampled_version_max": 3, "tokens": 7,
        },
        GroupScored,
    )  # fmt: skip


def consumed(group: str) -> GroupConsumed:
    return GroupConsumed(run="r", task="t", group=group, outcome="trained", version=4)


EVENTS: list[Event] = [
    admitted("r-g000000"), scored("r-g000000", "ready"), consumed("r-g000000"),
    admitted("r-g000001"), scored("r-g000001", "dropped"),
]  # fmt: skip


def fold(events: list[Event]) -> TaskFold:
    made = TaskFold(TaskSubmitted(run="r", task="t", spec=SPEC), 9)
    for event in events:
        made.take(event)
    return made


@given(st.permutations(EVENTS), st.lists(st.sampled_from(EVENTS)))
def test_events_in_any_order_and_twice_give_the_same_task(order: list[Event], again: list[Event]) -> None:
    assert fold([*order, *again]).report() == fold(EVENTS).report()


def late(event: GroupScored | GroupConsumed, **fields: Any) -> Event:
    return msgspec.structs.replace(event, executions=("r-g000000-e01",), **fields)


LATE: list[Event] = [
    *EVENTS,
    late(scored("r-g000000", "ready"), late=True, scores={"r-g000000-e01": 1.0}),
    late(consumed("r-g000000"), version=6, outcome="dropped", reason="stale"),
]


@given(st.permutations(LATE))
def test_a_late_member_adds_its_score_and_takes_nothing_back(order: list[Event]) -> None:
    group = fold(order).report().groups[0]
    assert group.scores == {"r-g000000-e00": 0.5, "r-g000000-e01": 1.0}
    assert (group.state, group.consumed_version, group.reason) == ("trained", 4, None)


def test_a_task_goes_from_submitted_over_live_to_done() -> None:
    states = [fold(EVENTS[:many]).summary().state for many in range(len(EVENTS) + 1)]
    assert states == ["submitted", "live", "live", "live", "live", "done"]
    summary = fold(EVENTS).summary()
    assert (summary.groups, summary.mean_score) == ({"trained": 1, "dropped": 1}, 0.5)
    group = fold(EVENTS).report().groups[0]
    assert (group.state, group.admitted_version, group.consumed_version) == ("trained", 3, 4)


def test_a_score_is_the_weighted_mean_and_nothing_verified_is_no_zero() -> None:
    parts = (Part(name="a", weight=0.2, value=1.0), Part(name="b", weight=0.6, value=0.5))
    assert score_of(parts) == pytest.approx(0.625)
    assert score_of(()) is None


def test_token_ids_are_shown_only_when_asked_for() -> None:
    call = Call(
        run="r", group="r-g000000", execution="r-g000000-e00", index=1, attempt=0, call="c", turn=0,
        request_digest="", parent=None, prefix_tokens=0, prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.1,),
        versions=(VersionSpan(version=0, start=0, end=1),), temperature=1.0, finish_reason="stop", text="x",
        hosts=("h",),
    )  # fmt: skip
    assert shown(call, tokens=False)["prompt_ids"] == 2
    assert list(shown(call, tokens=True)["prompt_ids"]) == [1, 2]
    bulk = Bulk(blob="sha256:0", prompt_ids=70, sampled_ids=3)
    elsewhere = shown(msgspec.structs.replace(call, prompt_ids=(), sampled_ids=(), bulk=bulk), tokens=False)
    assert (elsewhere["prompt_ids"], elsewhere["sampled_ids"]) == (70, 3)


@given(st.dictionaries(st.sampled_from(STREAMS), st.integers(0, 2**63 - 2), min_size=1))
def test_a_position_survives_its_text(positions: dict[str, int]) -> None:
    assert parse(render(positions)) == positions


@given(st.text())
def test_any_text_is_a_position_or_refused(text: str) -> None:
    with contextlib.suppress(BadPositionError):
        assert set(parse(text)) <= set(STREAMS)


def test_a_single_stream_and_sequence_is_a_position() -> None:
    assert parse("TASKS:12") == {"TASKS": 12}


@pytest.mark.parametrize("names", ["", ",", "TASKS,NOPE", "EPISODES", "GROUPS"])
def test_queues_and_unknown_streams_cannot_be_followed(names: str) -> None:
    with pytest.raises(BadPositionError, match="allowed are TASKS, TRAJ"):
        chosen(names)
    assert chosen("traj, tasks,TRAJ") == ("TRAJ", "TASKS")
    assert chosen(None) == DEFAULT


def test_a_filter_takes_the_run_and_nothing_else() -> None:
    def matches(pattern: str, subject: str) -> bool:
        want, have = pattern.split("."), subject.split(".")
        for number, token in enumerate(want):
            if token == ">":
                return len(have) > number
            if number >= len(have) or token not in ("*", have[number]):
                return False
        return len(want) == len(have)

    of_run = {
        "TASKS": subjects.task("r", "t", "submitted"), "TRAJ": subjects.traj("r", "g", "e", "call"),
        "UPDATES": subjects.update("r", "opened"), "WEIGHTS": subjects.weights("r", "published"),
        "DECISIONS": subjects.decision("r"),
    }  # fmt: skip
    for stream, subject in of_run.items():
        assert matches(filter_of(stream, "r"), subject)
        assert not matches(filter_of(stream, "rr"), subject)
        assert matches(filter_of(stream, None), subject)
    assert matches(filter_of("HOSTS", "r"), subjects.host("h", "state"))


def test_waits_are_ordered_by_age_and_gauges_are_summed() -> None:
    def service(name: str, replica: str, since: float, live: float) -> ServiceStatus:
        waits = (Wait(what="a host", since_s=since, bound_s=None),)
        return ServiceStatus(
            service=name, replica=replica, pid=1, url="", ready=True, waits=waits, gauges={"live_episodes": live}
        )

    services = [service("rollout", "a", 1.0, 3), service("rollout", "b", 5.0, 4), service("host", "c", 2.0, 1)]
    assert [wait.replica for wait in waits_of(services)] == ["b", "c", "a"]
    assert gauges_of(services) == {"rollout.live_episodes": 7, "host.live_episodes": 1}


def test_versions_of_hosts_are_not_summed() -> None:
    hosts = [
        ServiceStatus(service="host", replica=name, pid=1, url="", ready=True, gauges={"version": version})
        for name, version in (("a", -1.0), ("b", 30.0), ("c", 29.0))
    ]
    assert gauges_of(hosts) == {"host.version": 30.0}


def test_a_finished_run_takes_tasks_that_evaluate_it_and_a_stopped_one_none() -> None:
    run = RunSpec(run="r", model="m")
    evaluate = msgspec.structs.replace(SPEC, purpose="evaluate")
    finished, stopped = (msgspec.structs.replace(run, state=state) for state in ("finished", "stopped"))
    assert refusal(run, [SPEC, evaluate]) is None
    assert refusal(finished, [evaluate]) is None
    assert "purpose evaluate" in (refusal(finished, [evaluate, SPEC]) or "")
    assert "stopped" in (refusal(stopped, [evaluate]) or "")


def test_a_task_that_evaluates_a_version_that_never_comes_is_refused() -> None:
    later = msgspec.structs.replace(SPEC, purpose="evaluate", from_version=5)
    assert refusal(RunSpec(run="r", model="m"), [later]) is None, "it has no last version"
    assert refusal(RunSpec(run="r", model="m", updates=5), [later]) is None
    assert "ends with version 4" in (refusal(RunSpec(run="r", model="m", updates=4), [SPEC, later]) or "")
    with pytest.raises(InvalidTaskError, match="from_version is 5 and purpose is train"):
        validate_task(msgspec.structs.replace(later, purpose="train"))
    with pytest.raises(InvalidTaskError, match="from_version is -1; allowed are values from 0"):
        validate_task(msgspec.structs.replace(later, from_version=-1))


def test_a_task_of_steps_is_refused_where_the_run_branches_or_measures_progress() -> None:
    step = TaskStep(name="s", instruction="x", tests=TaskTests(archive=b"x"))
    task = TaskSpec(task="t", instruction="x", steps=(step,))
    run = RunSpec(run="r", model="m")
    assert refusal(run, [SPEC, task]) is None
    branching = msgspec.structs.replace(run, harness=Harness(branching=Branching(turn=1)))
    along = msgspec.structs.replace(run, scoring=Scoring(progress_every=1))
    for other, field in ((branching, "harness.branching"), (along, "scoring.progress_every")):
        assert refusal(other, [SPEC]) is None
        assert f"task t has steps and run r sets {field}" in (refusal(other, [SPEC, task]) or "")
