"""Progress as credit: what it leaves as it is, and what a turn earns."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.learn.advantage import Kind, advantage, baseline
from opengyre.trees.credit import NOTHING, Foretold, by_turn, course, foretold, rewards, to_go

UNIT = st.floats(0, 1)
GRID = st.sampled_from([n / 8 for n in range(9)])
COURSES = st.lists(
    st.tuples(GRID, st.lists(st.one_of(st.none(), GRID), min_size=1, max_size=6)), min_size=2, max_size=6
)
KINDS: tuple[Kind, ...] = ("grpo", "loo", "no_std")


def lines(members: Sequence[tuple[float, Sequence[float | None]]]) -> list[Foretold]:
    """By which each member is judged: those of the others."""
    found = [course(score, potentials) for score, potentials in members]
    return [
        foretold([one for other, one in enumerate(found) if other != number and one is not None])
        for number in range(len(members))
    ]


def test_what_is_earned_from_a_turn_on_is_what_was_still_missing() -> None:
    assert rewards(1, [0, 0.5, 0.25]) == [0.5, -0.25, 0.75]
    assert to_go(1, [0, 0.5, 0.25]) == [1, 0.5, 0.75]
    for wrong in ((1, [0, 1.5]), (1.5, [0])):
        with pytest.raises(ValueError, match="outside"):
            rewards(*wrong)


@given(UNIT, st.lists(UNIT, min_size=1, max_size=20))
def test_the_differences_telescope(score: float, potentials: list[float]) -> None:
    for turn, left in enumerate(to_go(score, potentials)):
        assert math.fsum(rewards(score, potentials)[turn:]) == pytest.approx(left, abs=1e-12)


@given(st.lists(UNIT, min_size=2, max_size=6), UNIT, st.integers(1, 5), st.sampled_from(KINDS))
def test_a_constant_potential_gives_the_executions_advantage_exactly(scores, potential, turns, kind) -> None:
    base = baseline(scores, kind)
    members = [(score, [potential] * turns) for score in scores]
    for (score, potentials), line in zip(members, lines(members), strict=True):
        for value in potentials:
            found = by_turn(score, value, line, base.center, base.scale)
            assert found.hex() == advantage(score, base).hex()


@given(COURSES, st.sampled_from(KINDS))
def test_a_step_back_costs_what_a_step_forward_earned(members, kind) -> None:
    """What a turn has over the next is the difference of the potentials around it, the same for each; there and back is
    nothing."""
    base = baseline([score for score, _ in members], kind)
    for (score, potentials), line in zip(members, lines(members), strict=True):
        known = [value for value in potentials if value is not None]
        found = [by_turn(score, value, line, base.center, base.scale) for value in known]
        for (here, there), (before, after) in zip(itertools.pairwise(found), itertools.pairwise(known), strict=True):
            assert here - there == pytest.approx(line.slope * base.scale * (after - before), abs=1e-9)
        back = by_turn(score, known[0], line, base.center, base.scale) if known else 0.0
        assert not known or found[0] == back


def test_a_step_forward_has_more_than_what_follows_it_and_a_step_back_less() -> None:
    """One member advances and holds it, another advances and goes back; the third did nothing."""
    members = [(1.0, [0.0, 0.5, 1.0]), (0.0, [0.0, 0.5, 0.0]), (0.0, [0.0, 0.0, 0.0]), (1.0, [0.0, 1.0, 1.0])]
    base = baseline([score for score, _ in members])
    found = [
        [by_turn(score, value, line, base.center, base.scale) for value in potentials]
        for (score, potentials), line in zip(members, lines(members), strict=True)
    ]
    assert all(line.slope > 0.3 for line in lines(members))
    assert found[0] == sorted(found[0], reverse=True)
    assert found[1][1] < found[1][0] == found[1][2], "the turn that went back is worst, and there and back is nothing"
    assert len({round(value, 9) for value in found[2]}) == 1


def test_where_everyone_gets_everything_done_nobody_looks_bad() -> None:
    """A baseline that is the same in all states would call every later turn bad."""
    members = [(1.0, [0.0, 0.5, 1.0])] * 3
    base = baseline([1.0] * 3, "no_std")
    found = [by_turn(1.0, value, line, base.center, base.scale) for line in lines(members) for value in members[0][1]]
    assert found == [0.0] * 9


@given(COURSES, st.sampled_from(KINDS))
def test_a_line_is_bounded_and_flat_where_there_is_nothing_to_tell(members, kind) -> None:
    base = baseline([score for score, _ in members], kind)
    for (score, _), line in zip(members, lines(members), strict=True):
        assert 0 <= line.slope <= 1
        assert 0 <= line.mean <= 1
        assert by_turn(score, None, line, base.center, base.scale) == advantage(score, base), "nothing was measured"
    assert course(0.5, [None, None]) is None
    assert foretold([]) == foretold([one for one in [course(1.0, [0.0, 1.0])] if one]) == NOTHING


def test_progress_that_foretells_failure_is_taken_for_chance() -> None:
    assert lines([(0.0, [1.0]), (1.0, [0.0]), (0.0, [1.0])])[0] == NOTHING


class Decisions:
    """Two decisions with two choices each; what the second is made on is what the first was. Everything is enumerated:
    the four executions, and all groups of them."""

    def __init__(self, scores: Sequence[float], before: Sequence[float]) -> None:
        self.scores = scores
        """Of the executions 00, 01, 10, 11."""
        self.before = before
        """Potential at the first decision, and at the second after 0 and after 1."""
        self.executions = tuple(itertools.product((0, 1), (0, 1)))

    def states(self, execution: tuple[int, int]) -> tuple[int, int]:
        return 0, 1 + execution[0]

    def potentials(self, execution: tuple[int, int]) -> list[float]:
        return [self.before[state] for state in self.states(execution)]

    def score(self, execution: tuple[int, int]) -> float:
        return self.scores[2 * execution[0] + execution[1]]

    def tilts(self, logits: np.ndarray, execution: tuple[int, int]) -> list[np.ndarray]:
        """Gradient of the log-probability of each decision by the three states' logits (of choice 1)."""
        found = []
        for state, choice in zip(self.states(execution), execution, strict=True):
            tilt = np.zeros(3)
            tilt[state] = choice - 1 / (1 + np.exp(-logits[state]))
            found.append(tilt)
        return found

    def chance(self, logits: np.ndarray, execution: tuple[int, int]) -> float:
        of_one = 1 / (1 + np.exp(-logits))
        chances = [of_one[s] if c else 1 - of_one[s] for s, c in zip(self.states(execution), execution, strict=True)]
        return float(np.prod(chances))

    def true_gradient(self, logits: np.ndarray) -> np.ndarray:
        found = np.zeros(3)
        for execution in self.executions:
            for tilt in self.tilts(logits, execution):
                found += self.chance(logits, execution) * self.score(execution) * tilt
        return found

    def expected(self, logits: np.ndarray, members: int, kind: Kind, credit: Callable[..., float]) -> np.ndarray:
        """Expectation, over all groups, of what a group's update does to the logits (a mean over its members)."""
        total = np.zeros(3)
        for of_group in itertools.product(self.executions, repeat=members):
            chance = math.prod(self.chance(logits, execution) for execution in of_group)
            courses = [(self.score(e), self.potentials(e)) for e in of_group]
            base = baseline([score for score, _ in courses], kind)
            for execution, (score, potentials), line in zip(of_group, courses, lines(courses), strict=True):
                for tilt, potential in zip(self.tilts(logits, execution), potentials, strict=True):
                    total += chance / members * credit(score, potential, line, base.center, base.scale) * tilt
        return total


def execution_credit(score: float, _potential: float, _line: Foretold, center: float, scale: float) -> float:
    return (score - center) * scale


@given(
    st.lists(UNIT, min_size=4, max_size=4), st.lists(UNIT, min_size=3, max_size=3),
    st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.sampled_from(["loo", "no_std"]), st.integers(2, 3),
)  # fmt: skip
def test_the_expected_gradient_is_that_of_the_score_whatever_the_potential(
    scores, before, logits, kind, members
) -> None:
    """By enumeration of all groups. So what is best stays best: the gradient is that of the expected score itself (of
    `no_std`, times (n - 1) / n, which is its own)."""
    task, at = Decisions(scores, before), np.array(logits)
    found = task.expected(at, members, kind, by_turn)
    assert found == pytest.approx(task.expected(at, members, kind, execution_credit), abs=1e-12)
    factor = 1.0 if kind == "loo" else (members - 1) / members
    assert found == pytest.approx(factor * task.true_gradient(at), abs=1e-12)


@pytest.mark.parametrize("before", [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.9, 0.1], [1.0, 0.0, 0.5]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_policy_is_found_also_when_the_potential_misleads(before: list[float], kind: Kind) -> None:
    """The best execution is 1 then 0. A potential that praises the other way, followed as a reward, would lead away."""
    task = Decisions([0.4, 0.5, 1.0, 0.0], before)
    logits = np.zeros(3)
    for _ in range(60):
        logits += 2.0 * task.expected(logits, 3, kind, by_turn)
    assert max(task.executions, key=task.score) == (1, 0)
    assert task.chance(logits, (1, 0)) > 0.8


def test_what_a_turn_earns_alone_would_lead_away() -> None:
    """That the law above can fail: with the next difference in place of all that follow, the policy goes where the
    potential points."""
    task, logits = Decisions([0.4, 0.5, 1.0, 0.0], [0.0, 1.0, 0.0]), np.zeros(3)
    for _ in range(60):
        step = np.zeros(3)
        for execution in task.executions:
            earned = rewards(task.score(execution), task.potentials(execution))
            for tilt, reward in zip(task.tilts(logits, execution), earned, strict=True):
                step += task.chance(logits, execution) * reward * tilt
        logits += 2.0 * step
    assert task.chance(logits, (1, 0)) < 0.2
