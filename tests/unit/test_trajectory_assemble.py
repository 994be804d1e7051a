"""From logs to groups: scores, advantages, and that the order and repetition of events change nothing."""

import io
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, EndReason, Part, Started, TakenOver, TrajEvent, Verified, VersionSpan
from opengyre.trajectory.assemble import NotWholeError, assemble, score_of
from opengyre.trajectory.replay import replay_groups, run

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
    with pytest.raises(NotWholeError, match="e01 has not ended"):
        assemble(group(1.0, 0.0)[:-1])
    with pytest.raises(NotWholeError, match="no execution"):
        assemble([])


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
    again = assemble(codec.decode(codec.encode(e)) for e in mixed)  # type: ignore[misc]
    assert codec.encode(again.scored) == codec.encode(expected.scored)
    assert (again.ready is None) == (expected.ready is None)
    if again.ready and expected.ready:
        assert codec.encode(again.ready) == codec.encode(expected.ready)


def test_replay_makes_the_groups_again_and_passes_over_what_is_not_whole() -> None:
    events = group(1.0, 0.0)
    other = [msgspec.structs.replace(e, group="r-g000002") for e in group(1.0, 0.0)[:3]]
    source = io.BytesIO(b"\n".join(codec.encode(e) for e in [*other, *reversed(events)]))
    target = io.BytesIO()
    assert run(source, target) == 1
    ready = assemble(events).ready
    assert target.getvalue() == codec.encode(ready) + b"\n"  # type: ignore[arg-type]
    assert replay_groups(events) == [ready]
    with pytest.raises(codec.UndecodableError, match="line 1"):
        run(io.BytesIO(b"{"), io.BytesIO())


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
