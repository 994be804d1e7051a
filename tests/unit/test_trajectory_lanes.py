"""Executions that go on as lanes: what each token is credited with."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from opengyre.learn.advantage import Kind, baseline
from opengyre.proto import codec
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Dispatch, Optimization, RunSpec
from opengyre.proto.traj import Started, TrajEvent
from opengyre.trainer.books import Held, scale, token_weights
from opengyre.trainer.books import Part as HeldPart
from opengyre.trajectory.assemble import LogEvent, assemble
from support.lane_logs import log, names, plain


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
    alike = log(whole[1], whole, 1, [(0,), (0,)], [0.25, 0.25])
    group = ready([*forked, *alike])
    base = baseline([0.5, 0.25], "loo")
    assert [member.score for member in group.members] == [0.5, 0.25]
    first, second = spans(group)
    assert first == [
        ((1, 10), 1.0, pytest.approx((0.5 - base.center) * base.scale)),
        ((1, 10, 2, 20), 0.5, pytest.approx(1.0 - 0.25)),
        ((1, 10, 2, 21), 0.5, pytest.approx(0.0 - 0.25)),
    ]
    assert [weight for _, weight, _ in second] == [1.0, 0.5, 0.5], "lanes that say the same are lanes as well"
    assert [(member.trained_tokens, member.weighed_tokens) for member in group.members] == [(3, 2.0), (3, 2.0)]


Line = tuple[int, ...]
"""What was said from the root on, of 0 and 1."""
Tree = dict[Line, float]
"""The score of each whole line."""
Policy = dict[Line, float]
"""The log-odds of saying 1 next."""

EVEN: Tree = {(0, 0): 0.1, (0, 1): 0.9, (1, 0): 0.6, (1, 1): 0.2}
UNEVEN: Tree = {(1,): 0.4, (0, 0): 0.1, (0, 1, 0): 1.0, (0, 1, 1): 0.3}
"""A line may end before the fork, and lanes are of unlike lengths."""
POLICIES = ((EVEN, {(): 0.4, (0,): -0.7, (1,): 0.3}), (UNEVEN, {(): 0.4, (0,): -0.7, (0, 1): 0.8}))


def chance(policy: Policy, line: Line, begin: int = 0) -> float:
    """That this is said, after its first `begin` tokens."""
    odds = (policy[line[:at]] if line[at] else -policy[line[:at]] for at in range(begin, len(line)))
    return math.prod(1 / (1 + math.exp(-one)) for one in odds)


def executions(tree: Tree, policy: Policy) -> list[tuple[float, tuple[Line, ...]]]:
    """All that an execution of two lanes can be, each with its probability: a line that ended, or two that part."""
    found: list[tuple[float, tuple[Line, ...]]] = [(chance(policy, line), (line,)) for line in tree if len(line) == 1]
    for first in (0, 1):
        lanes = [line for line in tree if line[0] == first and len(line) > 1]
        for pair in itertools.product(lanes, repeat=2):
            both = math.prod(chance(policy, line, 1) for line in pair)
            found.append((chance(policy, (first,)) * both, pair))
    assert sum(probability for probability, _ in found) == pytest.approx(1)
    return found


def gradient(
    tree: Tree, policy: Policy, kind: Kind, optimization: Optimization, *, flat: bool = False
) -> dict[Line, float]:
    """Expected gradient of an update, of one group of two, by enumeration: what the trainer makes of what it is given.
    `flat`: every lane at the weight of a whole execution."""
    whole = names(2)
    spec = RunSpec(
        run="r", model="m", dispatch=Dispatch(batch_groups=1, group_size=2, min_members=1), optimization=optimization
    )
    total = dict.fromkeys(policy, 0.0)
    for one, other in itertools.product(executions(tree, policy), repeat=2):
        events: list[TrajEvent] = []
        for name, (_, lines) in zip(whole, (one, other), strict=True):
            scores = [tree[line] for line in lines]
            if len(lines) == 1:
                events += plain(name, whole, lines[0][0], scores[0])
            else:
                events += log(name, whole, lines[0][0], [line[1:] for line in lines], scores)
        group = ready([kinded(event, kind) for event in events])
        if flat:
            group = codec.decode(codec.encode(group).replace(b'"weight":0.5', b'"weight":1.0'))
            assert isinstance(group, GroupReady)
        held = Held(group, group.members)
        per_token = token_weights(spec, held, whole)
        factor = scale(spec, [HeldPart(held, whole, held.members)]) * one[0] * other[0]
        for member, found in zip(group.members, spans(group), strict=True):
            for path, weight, advantage in found:
                said = tuple(token % 10 for token in path[1::2])
                slope = (1 if said[-1] else 0) - chance(policy, (*said[:-1], 1), len(said) - 1)
                total[said[:-1]] += factor * per_token[member.execution] * weight * advantage * slope
    return total


def kinded(event: TrajEvent, kind: Kind) -> TrajEvent:
    if not isinstance(event, Started):
        return event
    return msgspec.structs.replace(event, dispatch=msgspec.structs.replace(event.dispatch, advantage=kind))


def exact(tree: Tree, policy: Policy) -> dict[Line, float]:
    """Gradient of the expected score of one line of the tree, by differences."""

    def value(at: Policy) -> float:
        return sum(chance(at, line) * score for line, score in tree.items())

    step = 1e-6
    return {
        line: (value({**policy, line: at + step}) - value({**policy, line: at - step})) / (2 * step)
        for line, at in policy.items()
    }


SUMMED = Optimization(average="constant", constant_tokens=1)
"""Tokens are added up: no average makes the tokens of a long line lighter."""


@pytest.mark.parametrize(("kind", "factor"), [("loo", 1.0), ("no_std", 0.5)])
@pytest.mark.parametrize(("tree", "policy"), POLICIES, ids=("even", "uneven"))
def test_the_expected_gradient_of_lanes_is_that_of_the_score(
    tree: Tree, policy: Policy, kind: Kind, factor: float
) -> None:
    """Lanes count for their share, and are compared with other executions only (the whole tree is left out). `factor`:
    of a center that the member itself is a half of."""
    expected = {line: factor * value for line, value in exact(tree, policy).items()}
    assert gradient(tree, policy, kind, SUMMED) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("average", ["execution", "token", "prompt"])
def test_averages_count_an_execution_as_long_as_its_lanes_are_in_the_mean(average: Any) -> None:
    """All lines have two tokens: what three trained tokens are divided by."""
    tree, policy = POLICIES[0]
    expected = {line: value / 2 for line, value in exact(tree, policy).items()}
    assert gradient(tree, policy, "loo", Optimization(average=average)) == pytest.approx(expected, abs=1e-8)


def test_lanes_whose_tokens_counted_in_full_would_count_twice() -> None:
    tree, policy = POLICIES[1]
    wanted, flat = exact(tree, policy), gradient(tree, policy, "loo", SUMMED, flat=True)
    assert {line: flat[line] / value for line, value in wanted.items()} == {
        (): pytest.approx(1), (0,): pytest.approx(2), (0, 1): pytest.approx(2),
    }  # fmt: skip


def test_a_lane_that_sampled_nothing_keeps_its_share_of_the_score() -> None:
    """What it would have said at most is nobody else's."""
    whole = names(2)
    idle = log(whole[0], whole, 0, [(0,), ()], [1.0, 0.0])
    group = ready([*idle, *log(whole[1], whole, 0, [(0,), (0,)], [0.0, 0.0])])
    assert [member.score for member in group.members] == [0.5, 0.0]
    assert [weight for _, weight, _ in spans(group)[0]] == [1.0, 0.5]


def test_lanes_that_go_on_alike_do_not_share_their_weight_again() -> None:
    """Their later prompts are the same too, without being alternatives of each other."""
    whole = names(1)
    group = ready(log(whole[0], whole, 0, [(0, 1), (0, 1)], [1.0, 0.0]))
    (found,) = spans(group)
    assert [(path, weight) for path, weight, _ in found] == [
        ((1, 10), 1.0),
        *[((1, 10, 2, 20), 0.5)] * 2,
        *[((1, 10, 2, 20, 2, 21), 0.5)] * 2,
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
