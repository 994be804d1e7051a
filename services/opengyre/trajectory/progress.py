"""Credit for progress (`scoring.credit = "progress"`): the advantage of each call of an execution. Pure.

The clock of the potential is the order of the execution's log: a call of the main agent, of a sub-agent or after a
compaction stands at what was measured last before it was recorded. A measurement that failed says nothing, and what
was measured before it goes on; a call before the first measurement has its execution's advantage. What comes later
never reaches back: it depends on what the call did, and a baseline must not.

States: none. The line by which potentials foretell scores is frozen with the group's baseline: a closing member is
judged by those that closed with it, without itself; a late one by all of those.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opengyre.learn.advantage import Baseline, advantage
from opengyre.proto.traj import Call, Progressed, TrajEvent
from opengyre.trajectory.score import score_of
from opengyre.trees.credit import Course, Foretold, by_turn, course, foretold


def measured(event: Progressed) -> float | None:
    """The potential in [0, 1]; None where it could not be measured."""
    return None if event.infra_error is not None else score_of(event.parts)


def potentials(log: Iterable[TrajEvent]) -> dict[str, float | None]:
    """Call -> the potential before it, from an execution's events in order; None: nothing was measured until then."""
    found: dict[str, float | None] = {}
    now: float | None = None
    for event in log:
        if isinstance(event, Progressed):
            value = measured(event)
            now = now if value is None else value
        elif isinstance(event, Call):
            found.setdefault(event.call, now)
    return found


@dataclass(frozen=True, slots=True)
class Scored:
    """A member with a score: what credit is made from."""

    execution: str
    score: float
    potentials: dict[str, float | None]
    lanes: dict[str, float] = field(default_factory=dict)
    """Call -> the score of its lane, for calls of lanes."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What is frozen when a group closes."""

    baseline: Baseline
    courses: tuple[tuple[str, Course], ...]
    """Of the closing members that have potentials."""
    closed: frozenset[str]
    """The closing members: those that the baseline is made from."""

    def line(self, execution: str) -> Foretold:
        """By which an execution's turns are judged."""
        return foretold([found for name, found in self.courses if name != execution])

    def advantages(self, member: Scored) -> dict[str, float]:
        """Call -> advantage of its tokens; nothing where nothing was measured: then it is the execution's.

        A lane's calls have the execution's, and by how much the lane did better than the execution's lanes in the mean;
        the trunk's have the execution's. So lanes are compared with other executions only: a member's own score is one
        of the `n` that the center is the mean of, by which its advantage is `(n - 1) / n` of its distance from the
        others, and the difference between lanes counts for as much.
        """
        if member.lanes:
            base, own = self.baseline, advantage(member.score, self.baseline)
            scale = base.scale * (1 - 1 / len(self.closed) if member.execution in self.closed else 1)
            return {call: own + scale * (score - member.score) for call, score in member.lanes.items()}
        if all(value is None for value in member.potentials.values()):
            return {}
        line, base = self.line(member.execution), self.baseline
        return {
            call: by_turn(member.score, potential, line, base.center, base.scale)
            for call, potential in member.potentials.items()
        }


def freeze(baseline: Baseline, members: Sequence[Scored]) -> Credit:
    """From the members that a group closes with."""
    known = ((one.execution, course(one.score, tuple(one.potentials.values()))) for one in members)
    courses = tuple((name, found) for name, found in known if found is not None)
    return Credit(baseline, courses, frozenset(one.execution for one in members))
