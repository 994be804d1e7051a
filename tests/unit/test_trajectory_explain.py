"""An execution opened again says what was trained, and of everything else why not."""

from typing import Any

import msgspec
import pytest

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.explain import ExplainReport
from opengyre.proto.run import Harness, Sampling
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Started, TrajEvent, Verified, VersionSpan
from opengyre.trajectory.assemble import assemble
from opengyre.trajectory.explain import UnknownExecutionError, explain

MEMBERS = ("r-g000001-e00", "r-g000001-e01")
TASK = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1),))


def call(name: str, prompt: tuple[int, ...], sampled: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {
        "call": name, "prompt_ids": prompt, "sampled_ids": sampled, "logprobs": (-0.5,) * len(sampled),
        "parent": None, "prefix_tokens": 0, "versions": (VersionSpan(version=1, start=0, end=len(sampled)),), **more,
    }  # fmt: skip


def log(
    member: str, value: float | None, *calls: dict[str, Any], ends: bool = True, **dispatch: Any
) -> list[TrajEvent]:
    ids: dict[str, Any] = {"run": "r", "group": "r-g000001", "execution": member, "attempt": 0}
    first = EpisodeDispatch(
        run="r", group="r-g000001", execution=member, members=MEMBERS, version=1, seed=7, harness=Harness(),
        **{"min_members": 2, "task": TASK, **dispatch},
    )  # fmt: skip
    events: list[TrajEvent] = [Started(**ids, index=0, dispatch=first, replica="x")]
    for turn, one in enumerate(calls):
        events.append(
            Call(
                **{
                    **ids, "index": len(events), "turn": turn, "request_digest": "d", "temperature": 1.0,
                    "finish_reason": "stop", "text": one["call"], "hosts": ("h",), **one,
                }
            )
        )  # fmt: skip
    if value is not None:
        events.append(Verified(**ids, index=len(events), parts=(Part(name="a", weight=1, value=value),)))
    if ends:
        events.append(
            Ended(**ids, index=len(events), reason="done", turns=1, sampled_tokens=1, duration_s=1, members=MEMBERS)
        )
    return events


BRANCHING = (
    call("a", (1, 2), (3, 4, 5)),
    call("b", (6,), (7, 8), parent="a", prefix_tokens=5),
    call("b-again", (6,), (7, 9), parent="a", prefix_tokens=5),
    call("c", (10,), (11,), parent="b-again", prefix_tokens=8),
    call("side", (20, 21), (22, 23, 24, 25)),
    call("bare", (30,), (31, 32), logprobs=(-0.5,)),
)
OTHER = log(MEMBERS[1], 0.0, call("z", (1, 2), (3,)))


def outcomes(report: ExplainReport) -> dict[str, str]:
    return {one.call: one.outcome if one.reason is None else f"{one.outcome}: {one.reason}" for one in report.per_call}


def test_every_call_is_trained_or_says_why_not() -> None:
    events = [*log(MEMBERS[0], 1.0, *BRANCHING), *OTHER]
    report = explain(MEMBERS[0], events)
    assert outcomes(report) == {
        "a": "trained", "b": "refused: superseded", "b-again": "trained", "c": "trained", "side": "trained",
        "bare": "refused: logprobs_length",
    }  # fmt: skip
    assert report.refused == {"logprobs_length": 1, "superseded": 1}
    assert (report.group_state, report.score, report.calls) == ("ready", 1.0, 6)
    assert [path.calls for path in report.paths] == [("a", "b-again", "c"), ("side",)]
    assert {one.call: one.path for one in report.per_call} == {
        "a": 0, "b": None, "b-again": 0, "c": 0, "side": 1, "bare": None,
    }  # fmt: skip


def test_it_says_what_went_to_the_trainer() -> None:
    events = [*log(MEMBERS[0], 1.0, *BRANCHING), *OTHER]
    (part,) = assemble(events)
    assert part.ready is not None
    for member in part.ready.members:
        report = explain(member.execution, events)
        assert report.trained_tokens == member.trained_tokens
        assert report.advantage == member.advantage
        assert [path.tokens for path in report.paths] == [len(one.tokens) for one in member.sequences]
        trained = sum(one.sampled_tokens for one in report.per_call if one.outcome == "trained")
        assert trained == member.trained_tokens


def test_what_the_bound_left_out_is_named() -> None:
    sampling = Sampling(j_max=1)
    events = [*log(MEMBERS[0], 1.0, *BRANCHING, sampling=sampling), *OTHER]
    report = explain(MEMBERS[0], events)
    assert (report.j_max, len(report.paths), report.left_out) == (1, 1, {"sub-agent": 4})
    assert outcomes(report)["side"] == "left_out: the bound on paths did not reach it"
    (part,) = assemble(events)
    assert part.ready is not None
    assert part.ready.members[0].trained_tokens == report.trained_tokens == 6


def test_tokens_that_another_path_trains_are_masked() -> None:
    calls = (
        call("a", (1, 2), (3, 4, 5)),
        call("b", (6,), (7,), parent="a", prefix_tokens=5),
        call("c", (8,), (9, 9), parent="a", prefix_tokens=5),
    )
    report = explain(MEMBERS[0], [*log(MEMBERS[0], 1.0, *calls), *OTHER])
    assert [(path.trained_tokens, path.masked_tokens) for path in report.paths] == [(4, 0), (2, 3)]
    assert (report.trained_tokens, report.masked_tokens, report.events) == (6, 3, 6)


ONE = call("a", (1,), (2,))
EVALUATION = msgspec.structs.replace(TASK, purpose="evaluate")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (log(MEMBERS[0], None, ONE, ends=False), "the execution is live"),
        (log(MEMBERS[0], 1.0, ONE), "the group has not closed"),
        ([*log(MEMBERS[0], None, ONE, min_members=1), *OTHER], "the execution has no score: not_verified"),
        ([*log(MEMBERS[0], 1.0, ONE, min_members=3), *OTHER], "the group was dropped: too_few_members"),
        ([*log(MEMBERS[0], 1.0, ONE, task=EVALUATION), *OTHER], "the task is for evaluation"),
    ],
)
def test_why_nothing_is_trained(events: list[TrajEvent], why: str) -> None:
    report = explain(MEMBERS[0], events)
    assert outcomes(report) == {"a": f"not_trained: {why}"}
    assert (report.paths, report.trained_tokens, report.advantage) == ((), 0, None)


def test_a_call_whose_parent_never_came_is_shown() -> None:
    lost = call("b", (6,), (7,), parent="gone", prefix_tokens=5)
    report = explain(MEMBERS[0], [*log(MEMBERS[0], 1.0, call("a", (1,), (2,)), lost), *OTHER])
    assert outcomes(report) == {"a": "trained", "b": "refused: parent_missing"}


def test_ids_outside_the_vocabulary_are_refused_as_they_were() -> None:
    events = [*log(MEMBERS[0], 1.0, call("a", (1, 2), (3, 4)), call("b", (1, 99), (3,))), *OTHER]
    events = [msgspec.structs.replace(one, vocabulary=50) if isinstance(one, Started) else one for one in events]
    assert outcomes(explain(MEMBERS[0], events)) == {"a": "trained", "b": "refused: token_id"}


def test_an_execution_that_the_log_does_not_have() -> None:
    with pytest.raises(UnknownExecutionError, match="no start of execution"):
        explain(MEMBERS[1], log(MEMBERS[0], 1.0))


def test_show_says_trained_where_nothing_was() -> None:
    """In a group without variance every advantage is 0: the trainer leaves it out."""
    refused = call("bare", (30,), (31, 32), logprobs=(-0.5,))
    events = [*log(MEMBERS[0], 1.0, ONE, refused), *log(MEMBERS[1], 1.0, call("z", (1, 2), (3,)))]
    report = explain(MEMBERS[0], events)
    assert outcomes(report) == {"a": "not_trained: no advantage", "bare": "refused: logprobs_length"}
    assert (report.group_state, report.advantage, report.trained_tokens) == ("ready", 0.0, 0)
    assert [(path.calls, path.trained_tokens) for path in report.paths] == [(("a",), 0)]
    assert [(one.path, one.weight, one.advantage) for one in report.per_call] == [(None, None, None)] * 2
