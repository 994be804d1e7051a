"""Groups whose tokens are credited with the progress of their turn."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.learn.advantage import advantage, baseline
from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Harness, Scoring
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Progressed, Started, TrajEvent, Verified, VersionSpan
from opengyre.trajectory.assemble import LogEvent, assemble
from opengyre.trajectory.explain import explain
from opengyre.trajectory.progress import potentials

GROUP = "r-g000001"
TASK = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1),))
PROGRESS = Scoring(credit="progress", progress_every=1)
Course = Sequence[float | str | None]
"""A potential, `None` for a measurement that failed, or the name of a call."""


def names(count: int) -> tuple[str, ...]:
    return tuple(f"{GROUP}-e{number:02d}" for number in range(count))


def log(
    member: str, members: tuple[str, ...], score: float | None, course: Course, *, scoring: Scoring = PROGRESS,
    calls: dict[str, dict[str, Any]] | None = None, **changes: Any,
) -> list[TrajEvent]:  # fmt: skip
    """An execution whose calls extend one another unless `calls` says otherwise, with measurements between them."""
    events: list[TrajEvent] = []

    def ids() -> dict[str, Any]:
        return {"run": "r", "group": GROUP, "execution": member, "index": len(events), "attempt": 0}

    dispatch = EpisodeDispatch(
        run="r", group=GROUP, execution=member, members=members, version=2, seed=1, task=TASK, harness=Harness(),
        scoring=scoring, **{"min_members": 2, **changes},
    )  # fmt: skip
    events.append(Started(**ids(), dispatch=dispatch, replica="a"))
    before: str | None = None
    length = turn = 0
    for one in course:
        if not isinstance(one, str):
            parts = () if one is None else (Part(name="a", weight=3, value=one), Part(name="b", weight=1, value=one))
            error = "the copy failed" if one is None else None
            events.append(Progressed(**ids(), turn=turn, call=before, parts=parts, infra_error=error))
            continue
        fields: dict[str, Any] = {
            "call": one, "turn": turn, "request_digest": "d", "parent": before, "prefix_tokens": length,
            "prompt_ids": (1, turn + 2), "sampled_ids": (10 + turn, 20 + turn, 30 + turn), "temperature": 1.0,
            "logprobs": (-0.5,) * 3, "versions": (VersionSpan(version=2, start=0, end=3),), "finish_reason": "stop",
            "text": "x", "hosts": ("h",), **(calls or {}).get(one, {}),
        }  # fmt: skip
        events.append(Call(**ids(), **fields))
        before, turn, length = one, turn + 1, length + 5
    parts = () if score is None else (Part(name="a", weight=1, value=score),)
    events.append(Verified(**ids(), parts=parts, infra_error="gone" if score is None else None))
    events.append(Ended(**ids(), reason="done", turns=turn, sampled_tokens=0, duration_s=1.0, members=members))
    return events


def group(*members: tuple[float | None, Course], **changes: Any) -> list[LogEvent]:
    whole = names(len(members))
    return [
        event
        for name, (score, course) in zip(whole, members, strict=True)
        for event in log(name, whole, score, course, **changes)
    ]


def made(events: Sequence[LogEvent]) -> list[GroupReady]:
    return [part.ready for part in assemble(events) if part.ready is not None]


def advantages(events: Sequence[LogEvent]) -> list[list[Any]]:
    """Of each member that is trained, those of its spans."""
    return [[s.advantage for q in m.sequences for s in q.spans] for ready in made(events) for m in ready.members]


GOOD = (1.0, [0.0, "a", 0.5, "b", 1.0, "c"])
BACK = (0.0, [0.0, "a", 0.5, "b", 0.0, "c"])
STILL = (0.0, [0.0, "a", 0.0, "b", 0.0, "c"])


def test_each_turn_has_the_advantage_of_where_it_stood() -> None:
    """By hand: the least-squares line of the other three."""
    good, back, still, _ = advantages(group(GOOD, BACK, STILL, (1.0, [0.0, "a", 0.0, "b", 1.0, "c"])))
    base = baseline([1.0, 0.0, 0.0, 1.0])
    others = [(0.0, [0.0, 0.5, 0.0]), (0.0, [0.0] * 3), (1.0, [0.0, 0.0, 1.0])]
    mean = (0.5 / 3 + 0 + 1 / 3) / 3
    spread = (0.25 / 3 + 1 / 3) / 3 - mean**2
    center = sum(score for score, _ in others) / 3
    along = sum((score - center) * (sum(values) / 3 - mean) for score, values in others) / 3
    slope = along / spread
    assert 0 < slope < 1
    assert good == pytest.approx([(0.5 - slope * (value - mean)) * base.scale for value in (0.0, 0.5, 1.0)])
    assert good[0] > good[1] > good[2]
    assert back[1] < back[0] == back[2]
    assert still[0] == still[1] == still[2]


def test_a_member_is_credited_with_progress_only_if_its_run_says_so() -> None:
    """The groups of the execution's credit are the same bytes, whether progress was measured or not."""
    plain = Scoring()
    members = (GOOD, BACK, STILL)
    unmeasured = [(score, [one for one in course if isinstance(one, str)]) for score, course in members]
    (one,), (other,) = made(group(*members, scoring=plain)), made(group(*unmeasured, scoring=plain))
    assert codec.encode(one) == codec.encode(other)
    assert {s.advantage for m in one.members for q in m.sequences for s in q.spans} == {None}
    (third,) = made(group(*unmeasured))
    assert codec.encode(one) == codec.encode(third), "nothing was measured: the execution's advantage"


def test_a_measurement_that_failed_says_nothing_and_the_one_before_goes_on() -> None:
    events = log(names(1)[0], names(1), 1.0, [None, "a", 0.5, "b", None, "c", 0.25, "d"])
    assert potentials(events) == {"a": None, "b": 0.5, "c": 0.5, "d": 0.25}
    found = advantages(group((1.0, [None, "a", 0.5, "b", None, "c"]), GOOD, BACK, (0.0, ["a", None, "b"])))
    (ready,) = made(group((1.0, [None, "a", 0.5, "b", None, "c"]), GOOD, BACK, (0.0, ["a", None, "b"])))
    assert found[0][0] == ready.members[0].advantage, "before the first measurement"
    assert found[0][1] == found[0][2] != found[0][0], "carried forward"
    assert found[3] == [None, None], "never measured: the execution's"


def test_what_is_measured_later_does_not_reach_back() -> None:
    """A baseline may not know what the turn did."""
    early = advantages(group((1.0, ["a", 0.5, "b"]), GOOD, BACK))
    late = advantages(group((1.0, ["a", 1.0, "b"]), GOOD, BACK))
    assert early[0][0] == late[0][0]
    assert early[0][1] != late[0][1]


def test_sub_agents_and_compactions_stand_on_the_same_clock() -> None:
    """A sub-agent's call, and one after a compaction, have the potential that was measured last in the log."""
    calls = {
        "s": {"parent": None, "prefix_tokens": 0, "prompt_ids": (90, 91), "role": "sub-agent"},
        "c": {"parent": None, "prefix_tokens": 0, "prompt_ids": (1, 2, 70, 71, 72)},
    }
    course = [0.0, "a", 0.25, "s", "b", 0.5, "c", 0.75]
    events = log(names(1)[0], names(1), 1.0, course, calls=calls)
    assert potentials(events) == {"a": 0.0, "s": 0.25, "b": 0.25, "c": 0.5}


def test_a_late_member_is_judged_by_what_was_frozen() -> None:
    """By the baseline and the line of the members that closed the group, whoever else came late before it."""
    members = names(5)
    courses = [GOOD, BACK, STILL, (1.0, [0.0, "a", 1.0, "b"]), (0.5, [0.5, "a", 0.0, "b"])]
    logs = [log(name, members, *courses[n], close_at=3) for n, name in enumerate(members)]
    whole = made([event for one in logs for event in one])
    assert [ready.late for ready in whole] == [False, True, True]
    alone = made([event for one in (*logs[:3], logs[4]) for event in one])
    assert codec.encode(whole[2]) == codec.encode(alone[1])
    spans = whole[2].members[0].sequences[0].spans
    assert spans[0].advantage is not None
    assert spans[1].advantage is not None
    assert spans[0].advantage < spans[1].advantage, "it went back from 0.5 to 0"


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=4)),
        min_size=2, max_size=4,
    ),
    st.sampled_from(["grpo", "loo", "no_std"]),
)  # fmt: skip
def test_groups_with_progress_are_the_same_again_and_a_constant_changes_nothing(found, kind) -> None:
    def of(potential: float | None) -> list[LogEvent]:
        courses = [
            (score, [one for n, v in enumerate(values) for one in (v if potential is None else potential, f"c{n}")])
            for score, values in found
        ]
        return group(*courses, advantage=kind)

    (one,), (two,) = made(of(None)), made(list(reversed(of(None))))
    assert codec.encode(one) == codec.encode(two)
    base = baseline([score for score, _ in found], kind)
    for (score, _), spans in zip(found, advantages(of(0.375)), strict=True):
        assert {span.hex() for span in spans if span is not None} == {advantage(score, base).hex()}


def test_an_execution_opened_again_tells_its_potentials_and_advantages() -> None:
    events = group(GOOD, BACK, (1.0, [0.0, "a", None, "b", 0.25, "c"]), STILL)
    member = names(4)[2]
    report = explain(member, events)
    assert report.credit == "progress"
    assert [(one.turn, one.call, one.potential, one.infra_error) for one in report.progress] == [
        (0, None, 0.0, None), (1, "a", None, "the copy failed"), (2, "b", 0.25, None),
    ]  # fmt: skip
    assert [call.potential for call in report.per_call] == [0.0, 0.0, 0.25]
    assert [call.advantage for call in report.per_call] == advantages(events)[2]
    assert report.per_call[2].advantage != report.advantage
    plain = explain(member, group(GOOD, BACK, STILL, STILL, scoring=Scoring()))
    assert {call.advantage for call in plain.per_call} == {plain.advantage}
