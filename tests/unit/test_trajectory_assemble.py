"""From logs to groups: scores, advantages, and that the order and repetition of events change nothing."""

import io
import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.learn.advantage import advantages, baseline
from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import (
    Call,
    Ended,
    EndReason,
    Overdue,
    Part,
    Started,
    TakenOver,
    TrajEvent,
    Verified,
    VersionSpan,
)
from opengyre.shared.blobs import BlobMissingError
from opengyre.trajectory.assemble import Assembled, LogEvent, NotWholeError
from opengyre.trajectory.assemble import assemble as parts_of
from opengyre.trajectory.replay import replay_groups, run
from opengyre.trajectory.score import score_of

GROUP = "r-g000001"


def dispatch(members: tuple[str, ...], member: str, **changes) -> EpisodeDispatch:
    purpose = changes.pop("purpose", "train")
    task = TaskSpec(task="t1", instruction="x", checks=(Check(name="a", command="true", weight=1),), purpose=purpose)
    return EpisodeDispatch(
        run="r", group=GROUP, execution=member, members=members, version=2, seed=1, task=task, harness=Harness(),
        **{"min_members": 2, **changes},
    )  # fmt: skip


def log(
    member: str,
    members: tuple[str, ...],
    value: float | None,
    *,
    turns: int = 2,
    ended: EndReason = "done",
    **changes,
) -> list[TrajEvent]:
    """A log whose calls extend each other; `value` None: the evaluation failed."""

    def ids() -> dict:
        return {"run": "r", "group": GROUP, "execution": member, "index": len(events), "attempt": 0}

    events: list[TrajEvent] = []
    events.append(Started(**ids(), dispatch=dispatch(members, member, **changes), replica="a"))
    length = 0
    for turn in range(turns):
        sampled = (10 + turn, 20 + turn)
        events.append(
            Call(
                **ids(), call=f"{member}-c{turn}", turn=turn, request_digest="d",
                parent=f"{member}-c{turn - 1}" if turn else None, prefix_tokens=length, prompt_ids=(1, 2, 3),
                sampled_ids=sampled, logprobs=(-0.5, -0.25), versions=(VersionSpan(version=2 + turn, start=0, end=2),),
                temperature=1.0, finish_reason="stop", text="x", hosts=("h",),
            )
        )  # fmt: skip
        length += 5
    error = "the sandbox is gone" if value is None else None
    parts = () if value is None else (Part(name="a", weight=0.5, value=value), Part(name="b", weight=0.5, value=value))
    events.append(Verified(**ids(), parts=parts, infra_error=error))
    events.append(Ended(**ids(), reason=ended, turns=turns, sampled_tokens=2 * turns, duration_s=1.0, members=members))
    return events


def assemble(events: Iterable[LogEvent]) -> Assembled:
    """The one part of a group that closes with its last member."""
    (part,) = parts_of(events)
    return part


def names(count: int) -> tuple[str, ...]:
    return tuple(f"{GROUP}-e{number:02d}" for number in range(count))


def group(*values: float | None, **changes) -> list[TrajEvent]:
    members = names(len(values))
    return [e for name, value in zip(members, values, strict=True) for e in log(name, members, value, **changes)]


def test_scores_and_advantages_belong_to_executions() -> None:
    assembled = assemble(group(0.0, 1.0, 1.0, 0.0))
    assert assembled.scored.outcome == "ready"
    assert list(assembled.scored.scores.values()) == [0, 1, 1, 0]
    assert assembled.ready is not None
    assert [member.advantage for member in assembled.ready.members] == [-1, 1, 1, -1]
    member = assembled.ready.members[0]
    assert [len(sequence.spans) for sequence in member.sequences] == [2]
    assert member.sequences[0].tokens == (1, 2, 3, 10, 20, 1, 2, 3, 11, 21)
    assert (member.trained_tokens, member.path_tokens) == (4, 15)
    assert (assembled.scored.sampled_version_min, assembled.scored.sampled_version_max) == (2, 3)
    assert assembled.ready.version == 2


def test_the_advantage_of_the_dispatch_is_used() -> None:
    ready = assemble(group(0.0, 1.0, advantage="no_std")).ready
    assert ready is not None
    assert [member.advantage for member in ready.members] == [-0.5, 0.5]


def test_a_failed_evaluation_is_not_a_zero() -> None:
    assembled = assemble(group(1.0, None, 0.0, 1.0))
    failed = names(4)[1]
    assert assembled.scored.unscored == {failed: "infra"}
    assert failed not in assembled.scored.scores
    assert assembled.ready is not None
    assert [member.execution for member in assembled.ready.members] == [names(4)[i] for i in (0, 2, 3)]
    assert sum(member.advantage for member in assembled.ready.members) == pytest.approx(0)


@pytest.mark.parametrize(
    ("values", "changes", "outcome", "reason"),
    [
        ((None, None), {}, "dropped", "infra"),
        ((1.0, None), {}, "dropped", "too_few_members"),
        ((1.0,), {"purpose": "evaluate"}, "evaluated", None),
        ((None,), {"purpose": "evaluate"}, "dropped", "infra"),
        ((1.0, 0.0), {"ended": "infra"}, "dropped", "infra"),
        ((1.0, 0.0), {"ended": "time_budget"}, "ready", None),
    ],
)
def test_outcomes(values, changes, outcome, reason) -> None:
    assembled = assemble(group(*values, **changes))
    assert (assembled.scored.outcome, assembled.scored.reason) == (outcome, reason)
    assert (assembled.ready is not None) == (outcome == "ready")


def test_a_log_with_a_gap_or_two_events_at_a_place_has_no_score() -> None:
    events = group(1.0, 0.0, 1.0, 0.5)
    first, second = names(2)
    gap = [e for e in events if not (e.execution == first and e.index == 1)]
    rival = TakenOver(run="r", group=GROUP, execution=second, index=1, attempt=1, replica="b")
    assert assemble([*gap, rival]).scored.unscored == {first: "broken_log", second: "broken_log"}


def test_a_group_with_a_live_member_is_not_whole() -> None:
    assert parts_of(group(1.0, 0.0)[:-1]) == []
    with pytest.raises(NotWholeError, match="no execution"):
        parts_of([])


def test_a_call_that_cannot_be_trained_is_counted_and_fails_nothing() -> None:
    events = [msgspec.structs.replace(e, logprobs=()) if isinstance(e, Call) and e.turn else e for e in group(1.0, 0.0)]
    ready = assemble(events).ready
    assert ready is not None
    assert ready.refused == {"logprobs_length": 2}
    assert [member.trained_tokens for member in ready.members] == [2, 2]


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=2, max_size=5), st.integers(1, 4), st.randoms())
def test_shuffled_and_duplicated_events_make_the_same_bytes(values, turns, rng: random.Random) -> None:
    events = group(*values, turns=turns)
    expected = assemble(events)
    mixed = events + rng.choices(events, k=len(events))
    rng.shuffle(mixed)
    again = assemble(codec.decode(codec.encode(e)) for e in mixed)  # type: ignore[misc]  # events of the union, built or decoded
    assert codec.encode(again.scored) == codec.encode(expected.scored)
    assert (again.ready is None) == (expected.ready is None)
    if again.ready and expected.ready:
        assert codec.encode(again.ready) == codec.encode(expected.ready)


async def no_blob(ref: str) -> bytes:
    raise BlobMissingError(ref)


async def test_replay_makes_the_groups_again_and_passes_over_what_is_not_whole() -> None:
    events = group(1.0, 0.0)
    other = [msgspec.structs.replace(e, group="r-g000002") for e in group(1.0, 0.0)[:3]]
    source = io.BytesIO(b"\n".join(codec.encode(e) for e in [*other, *reversed(events)]))
    target = io.BytesIO()
    assert await run(source, target, no_blob, print) == 1
    ready = assemble(events).ready
    assert target.getvalue() == codec.encode(ready) + b"\n"  # type: ignore[arg-type]  # events of the union, built or decoded
    assert replay_groups(events) == [ready]


async def test_a_malformed_event_does_not_end_a_replay_and_is_told_of() -> None:
    """What a line has a subject for may not contradict it; what has none is of the group that it names."""
    first, *rest = group(1.0, 0.0)
    place = {"stream": "TRAJ", "subject": f"gyre.v1.traj.r.{GROUP}.x.call", "sequence": 70}
    call = msgspec.Raw(codec.encode(msgspec.structs.replace(first, group="r-g000007")))
    records = [
        msgspec.json.encode({**place, "event": event}) for event in (call, "caf\ufffd {", {"type": "traj.call.v1"})
    ]
    lines = [codec.encode(first), b"{", *records, b"[" * 9000, b'{"event":' + b"[" * 9000, *map(codec.encode, rest)]
    target, told = io.BytesIO(), list[str]()
    assert await run(io.BytesIO(b"\n".join(lines)), target, no_blob, told.append) == 1
    assert target.getvalue() == codec.encode(replay_groups([first, *rest])[0]) + b"\n"
    assert [line.split(" is passed over: ")[0].split(" on ")[0] for line in told] == [
        "event 2", *["event 70"] * 3, "event 6", "event 7",
    ]  # fmt: skip
    assert "contradict its subject" in told[1]
    assert "missing required field" in told[3]


OVERDUE = Overdue(run="r", group=GROUP)


def in_order(order: Sequence[int], *values: float | None, **changes) -> list[LogEvent]:
    """The logs of a group whose members end in this order, one after the other."""
    members = names(len(values))
    return [event for n in order for event in log(members[n], members, values[n], **changes)]


def advantages_of(part: Assembled) -> list[float]:
    assert part.ready is not None
    return [member.advantage for member in part.ready.members]


def test_a_group_closes_at_so_many_scores_and_late_members_are_judged_by_the_frozen_baseline() -> None:
    members = names(4)
    parts = parts_of(in_order([2, 0, 3, 1], 1.0, 0.75, None, 0.0, close_at=2))
    assert [part.cause for part in parts] == [members[3], members[1]]
    closing, late = parts
    assert closing.scored.executions == (members[0], members[2], members[3]), "in the order of the group"
    assert closing.scored.unscored == {members[2]: "infra"}
    assert advantages_of(closing) == [1.0, -1.0]
    assert closing.ready is not None
    assert (closing.ready.baseline, closing.ready.scale, closing.ready.slots) == (0.5, 2.0, 3)
    assert advantages_of(late) == [0.5]
    assert late.ready is not None
    assert (late.ready.late, late.ready.executions, late.ready.slots) == (True, (members[1],), 1)
    assert (late.scored.late, late.scored.scores, late.scored.tokens_by) == (True, {members[1]: 0.75}, {members[1]: 4})
    ids = [event.event_id() for part in parts for event in (part.scored, part.ready) if event]
    assert ids == [
        f"task-{GROUP}-scored", f"group-{GROUP}-ready", f"task-{members[1]}-scored", f"group-{members[1]}-ready",
    ]  # fmt: skip


def test_a_late_member_without_a_score_takes_its_place_and_trains_nothing() -> None:
    late = parts_of(in_order([0, 1, 2], 1.0, 0.0, None, close_at=2))[1]
    assert late.ready is not None
    assert (late.ready.members, late.ready.slots) == ((), 1)
    assert (late.scored.outcome, late.scored.unscored) == ("ready", {names(3)[2]: "infra"})


def test_a_deadline_closes_a_group_with_what_it_has_or_as_soon_as_it_has_enough() -> None:
    events = in_order([0, 1, 2, 3], 1.0, 0.0, 1.0, 0.0, close_at=4)
    length = len(events) // 4
    after_two = parts_of([*events[: 2 * length], OVERDUE, *events[2 * length :]])
    assert [part.cause for part in after_two] == [None, *names(4)[2:]]
    assert [len(advantages_of(part)) for part in after_two] == [2, 1, 1]
    too_early = parts_of([*events[:length], OVERDUE, OVERDUE, *events[length:]])
    assert [part.cause for part in too_early] == list(names(4)[1:]), "min_members is 2"
    evaluated = parts_of([*in_order([0], 1.0, purpose="evaluate", min_members=1)[:1], OVERDUE])
    assert evaluated == []


def test_a_group_that_is_dropped_has_no_late_members() -> None:
    parts = parts_of(in_order([0, 1, 2], 1.0, None, None, close_at=2))
    assert [(part.scored.outcome, part.scored.reason) for part in parts] == [("dropped", "too_few_members")]


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=2, max_size=6).flatmap(
        lambda values: st.tuples(st.just(values), st.permutations(range(len(values))), st.integers(2, len(values)))
    ),
    st.one_of(st.none(), st.integers(0, 6)),
    st.sampled_from(["grpo", "loo", "no_std"]),
)
def test_what_an_event_made_of_its_group_is_a_function_of_the_log_up_to_it(given_, mark, advantage) -> None:
    values, order, close_at = given_
    members = names(len(values))
    logs = [log(members[n], members, values[n], turns=1, close_at=close_at, advantage=advantage) for n in order]
    if mark is not None:
        logs.insert(min(mark, len(logs)), [OVERDUE])  # type: ignore[list-item]  # events of the union, built or decoded
    whole = parts_of([event for one in logs for event in one])
    told: list[Assembled] = []
    for count in range(1, len(logs) + 1):
        cause = getattr(logs[count - 1][0], "execution", None)
        prefix = [event for one in logs[:count] for event in one]
        if all(isinstance(event, Overdue) for event in prefix):
            continue
        told += [part for part in parts_of(prefix) if part.cause == cause]
    assert told == whole, "each event's handler tells what it caused, whatever came since"
    accounted = [name for part in whole for name in part.scored.executions]
    if whole and whole[0].ready is not None:
        assert sorted(accounted) == sorted(members), "each member in one part"
        closing = whole[0].ready
        scores = [member.score for member in closing.members]
        assert len(scores) >= min(close_at, 2)
        base = baseline(scores, advantage)
        assert (closing.baseline, closing.scale) == (base.center, base.scale)
        for part in whole:
            assert part.ready is not None
            for member in part.ready.members:
                assert member.advantage == (member.score - base.center) * base.scale


# What is so small that it has fewer digits (5e-324) is rounded to nothing where a score is weighed.
@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1, allow_subnormal=False)), min_size=2, max_size=5).flatmap(
        lambda values: st.tuples(st.just(values), st.permutations(range(len(values))))
    ),
    st.sampled_from(["grpo", "loo", "no_std"]),
)
def test_a_group_that_closes_with_its_last_member_is_one_part_with_the_advantages_of_all(given_, advantage) -> None:
    values, order = given_
    (part,) = parts_of(in_order(order, *values, turns=1, close_at=len(values), advantage=advantage))
    again = assemble(in_order(range(len(values)), *values, turns=1, advantage=advantage))
    assert (part.scored, part.ready) == (again.scored, again.ready), "whatever the order of the ends"
    scores = [value for value in values if value is not None]
    if part.ready is not None:
        assert advantages_of(part) == advantages(scores, advantage)
        assert not part.ready.late
        assert part.ready.executions == names(len(values))


@pytest.mark.parametrize(
    ("parts", "score"),
    [
        ([(1, 0.5)], 0.5),
        ([(0.2, 1), (0.3, 0), (0.5, 1)], 0.7),
        ([(2, 1), (2, 0)], 0.5),
        ([], None),
        ([(0, 1)], None),
        ([(1, 1.5)], None),
        ([(1, float("nan"))], None),
    ],
)
def test_score(parts, score) -> None:
    found = score_of([Part(name="p", weight=weight, value=value) for weight, value in parts])
    assert found == (pytest.approx(score) if score is not None else None)
