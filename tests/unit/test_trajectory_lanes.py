"""Executions that go on as lanes: what each token is credited with."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from opengyre.learn.advantage import Kind, baseline
from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Branching, Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Forked, Part, SandboxOpened, Started, TrajEvent, Verified, VersionSpan
from opengyre.trajectory.assemble import LogEvent, assemble

GROUP = "r-g000001"
TASK = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1),))
TRUNK, LANE = 10, 20
"""First ids of what the trunk and a lane may sample."""


def names(count: int) -> tuple[str, ...]:
    return tuple(f"{GROUP}-e{number:02d}" for number in range(count))


def log(
    member: str, members: tuple[str, ...], trunk: int, lanes: Sequence[Sequence[int]], scores: Sequence[float | None],
    kind: Kind = "loo", **changes: Any,
) -> list[TrajEvent]:  # fmt: skip
    """An execution whose trunk says one token, and each of whose lanes says some, one a call."""
    events: list[TrajEvent] = []

    def ids() -> dict[str, Any]:
        return {"run": "r", "group": GROUP, "execution": member, "index": len(events), "attempt": 0}

    def call(token: int, prompt: tuple[int, ...], before: tuple[str, int] | None, lane: int | None) -> tuple[str, int]:
        parent, length = before or (None, 0)
        name = f"c{len(events):04d}"
        events.append(
            Call(
                **ids(), call=name, turn=len(events), request_digest=name, parent=parent, prefix_tokens=length,
                prompt_ids=prompt, sampled_ids=(token,), logprobs=(-0.5,), temperature=1.0, finish_reason="stop",
                versions=(VersionSpan(version=2, start=0, end=1),), text="x", hosts=("h",), lane=lane,
            )
        )  # fmt: skip
        return name, length + len(prompt) + 1

    dispatch = EpisodeDispatch(
        run="r", group=GROUP, execution=member, members=members, version=2, seed=1, task=TASK, min_members=1,
        harness=Harness(branching=Branching(turn=1, copies=len(lanes))), advantage=kind, **changes,
    )  # fmt: skip
    events.append(Started(**ids(), dispatch=dispatch, replica="a"))
    events.append(SandboxOpened(**ids(), sandbox=member, node="n", isolated=True))
    root = call(TRUNK + trunk, (1,), None, None)
    events.append(Forked(**ids(), turn=1, copies=len(lanes), snapshot="s"))
    ends = [root] * len(lanes)
    for turn in range(max(len(lane) for lane in lanes)):  # side by side, as they are lived
        for number, lane in enumerate(lanes):
            if turn < len(lane):
                ends[number] = call(LANE + lane[turn], (2,), ends[number], number)
    for number, score in enumerate(scores):
        parts = () if score is None else (Part(name="a", weight=1, value=score),)
        fault = "it was killed" if score is None else None
        events.append(Verified(**ids(), parts=parts, infra_error=fault, reason="done", lane=number))
    events.append(Ended(**ids(), reason="done", turns=3, sampled_tokens=3, duration_s=1.0, members=members))
    return events


def ready(events: Sequence[LogEvent]) -> GroupReady:
    (part,) = assemble(events)
    assert part.ready is not None
    return part.ready


def spans(group: GroupReady) -> list[list[tuple[tuple[int, ...], float, float]]]:
    """Of each member, of each trained token: the path up to and with it, its weight, and its advantage."""
    return [
        sorted(
            (sequence.tokens[: span.end], span.weight, member.advantage if span.advantage is None else span.advantage)
            for sequence in member.sequences
            for span in sequence.spans
        )
        for member in group.members
    ]


def test_each_lane_has_the_advantage_of_what_it_got_and_the_trunk_their_mean() -> None:
    whole = names(2)
    forked = log(whole[0], whole, 0, [(0,), (1,)], [1.0, 0.0])
    plain = log(whole[1], whole, 1, [(0,), (0,)], [0.25, 0.25])
    group = ready([*forked, *plain])
    base = baseline([0.5, 0.25], "loo")
    assert [member.score for member in group.members] == [0.5, 0.25]
    first, second = spans(group)
    assert first == [
        ((1, 10), 1.5, pytest.approx((0.5 - base.center) * base.scale)),
        ((1, 10, 2, 20), 0.75, pytest.approx(1.0 - 0.25)),
        ((1, 10, 2, 21), 0.75, pytest.approx(0.0 - 0.25)),
    ]
    assert [weight for _, weight, _ in second] == [1.5, 0.75, 0.75], "lanes that say the same are lanes as well"


def gradient(preferences: dict[tuple[int, ...], float], kind: Kind, *, flat: bool = False) -> dict[Any, float]:
    """Expected gradient, by enumeration of a group of two with two lanes each, of what the trainer is given."""

    def chance(path: tuple[int, ...], token: int) -> float:
        return 1 / (1 + math.exp(-preferences[path] if token else preferences[path]))

    whole = names(2)
    total = dict.fromkeys(preferences, 0.0)
    for said in itertools.product(range(2), repeat=6):
        halves = (said[:3], said[3:])
        probability = math.prod(
            chance((), trunk) * chance((trunk,), one) * chance((trunk,), other) for trunk, one, other in halves
        )
        events = [
            event
            for name, (trunk, one, other) in zip(whole, halves, strict=True)
            for event in log(name, whole, trunk, [(one,), (other,)], [WORTH[trunk, one], WORTH[trunk, other]], kind)
        ]
        for found in spans(ready(events)):
            for path, weight, advantage in found:
                own = tuple(token % 10 for token in path[1::2])
                slope = (1 - chance(own[:-1], 1)) if own[-1] else -chance(own[:-1], 1)
                total[own[:-1]] += probability * (1.0 if flat else weight) * advantage * slope / len(found) / 2
    return total


WORTH = {(0, 0): 0.1, (0, 1): 0.9, (1, 0): 0.6, (1, 1): 0.2}
POLICY = {(): 0.4, (0,): -0.7, (1,): 0.3}


def exact(preferences: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Gradient of the expected score of one line of the tree, by differences."""

    def value(at: dict[tuple[int, ...], float]) -> float:
        high = {path: 1 / (1 + math.exp(-preference)) for path, preference in at.items()}
        return sum(
            (high[()] if trunk else 1 - high[()]) * (high[trunk,] if last else 1 - high[trunk,]) * score
            for (trunk, last), score in WORTH.items()
        )

    step = 1e-6
    return {
        path: (value({**preferences, path: at + step}) - value({**preferences, path: at - step})) / (2 * step)
        for path, at in preferences.items()
    }


@pytest.mark.parametrize(("kind", "factor"), [("loo", 1.0), ("no_std", 0.5)])
def test_the_expected_gradient_of_lanes_is_that_of_the_score(kind: Kind, factor: float) -> None:
    """Leaves that were sampled as alternatives count for their share, and are compared with other executions only (the
    whole subtree is left out). `factor`: of a center that the member itself is a half of. A path has two tokens, over
    which the execution's weight is spread."""
    wanted = exact(POLICY)
    expected = {path: factor * value / 2 for path, value in wanted.items()}
    assert gradient(POLICY, kind) == pytest.approx(expected, abs=1e-8)


def test_lanes_whose_tokens_counted_in_full_would_count_too_much() -> None:
    wanted = exact(POLICY)
    flat = gradient(POLICY, "loo", flat=True)
    ratios = [flat[path] / value for path, value in wanted.items()]
    assert max(ratios) - min(ratios) > 0.1, "the trunk's tokens are too few beside them"


def test_lanes_that_go_on_alike_do_not_share_their_weight_again() -> None:
    """Their later prompts are the same too, without being alternatives of each other."""
    whole = names(1)
    group = ready(log(whole[0], whole, 0, [(0, 1), (0, 1)], [1.0, 0.0]))
    (found,) = spans(group)
    assert [(path, weight) for path, weight, _ in found] == [
        ((1, 10), pytest.approx(5 / 3)),
        ((1, 10, 2, 20), pytest.approx(5 / 6)),
        ((1, 10, 2, 20), pytest.approx(5 / 6)),
        ((1, 10, 2, 20, 2, 21), pytest.approx(5 / 6)),
        ((1, 10, 2, 20, 2, 21), pytest.approx(5 / 6)),
    ]


def test_a_lane_that_could_not_be_evaluated_leaves_training_alone() -> None:
    whole = names(2)
    other = log(whole[1], whole, 1, [(0,), (1,)], [0.0, 0.0])
    group = ready([*log(whole[0], whole, 0, [(0,), (1,)], [1.0, None]), *other])
    assert [member.score for member in group.members] == [1.0, 0.0], "no zero among them"
    assert group.refused == {"unscored_lane": 1}
    assert [(path, weight) for path, weight, _ in spans(group)[0]] == [((1, 10), 1.0), ((1, 10, 2, 20), 1.0)]


def test_a_late_member_is_no_part_of_what_its_lanes_are_compared_with() -> None:
    whole = names(3)
    members = [
        log(name, whole, 0, [(0,), (1,)], scores, "no_std", close_at=2)
        for name, scores in zip(whole, ([0.2, 0.4], [0.6, 0.8], [1.0, 0.5]), strict=True)
    ]
    closing, late = [part.ready for part in assemble(itertools.chain(*members))]
    assert closing is not None
    assert late is not None
    assert (late.late, late.baseline) == (True, pytest.approx(0.5))
    assert [advantage for *_, advantage in spans(late)[0]] == pytest.approx([0.25, 0.5, 0.0])
    assert [advantage for *_, advantage in spans(closing)[0]] == pytest.approx([-0.2, -0.25, -0.15])


def test_an_execution_none_of_whose_lanes_could_be_evaluated_has_no_score() -> None:
    whole = names(2)
    lost = log(whole[0], whole, 0, [(0,), (1,)], [None, None])
    (part,) = assemble([*lost, *log(whole[1], whole, 0, [(0,), (1,)], [1.0, 0.0])])
    assert part.scored.unscored == {whole[0]: "infra"}
    assert part.scored.scores == {whole[1]: 0.5}


def test_lanes_shuffled_and_twice_make_the_same_bytes() -> None:
    whole = names(2)
    events: list[LogEvent] = [
        event for name in whole for event in log(name, whole, 0, [(0, 1), (1, 1), (0,)], [1.0, 0.0, 0.5])
    ]
    wanted = codec.encode(ready(events))
    for seed in range(20):
        again = events + events[::3]
        random.Random(seed).shuffle(again)
        assert codec.encode(ready(again)) == wanted
