"""An execution that went on as several lanes: what each is worth, and what its tokens weigh. Pure.

A lane that could not be evaluated is as if it had never been (law 6): its calls are not trained, and the execution's
score and the weights of the others are those of an execution that had only these.

Invariants: the weights of one turn's tokens add up to 1 over the lanes, so that the weighted sum over an execution's
tokens is the mean over its lanes of the sum along each, from the root on; a lane that sampled nothing has its share of
the score, and nobody else has it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opengyre.proto.traj import Call, Forked, TrajEvent, Verified
from opengyre.trajectory.score import score_of

UNSCORED = "unscored_lane"
"""Why a call of a lane that could not be evaluated is not trained."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Of one execution."""

    verdicts: dict[int, Verified | None]
    """Lane -> its verdict, in order; None: it has none (yet)."""

    @property
    def scores(self) -> dict[int, float]:
        """Lane -> score, of those that have one."""
        return {
            lane: score
            for lane, verdict in self.verdicts.items()
            if verdict is not None and why_unscored(verdict) is None and (score := score_of(verdict.parts)) is not None
        }

    @property
    def score(self) -> float | None:
        """Of the execution: the mean of its lanes'."""
        scores = self.scores.values()
        return math.fsum(scores) / len(scores) if scores else None

    @property
    def fault(self) -> str | None:
        """Why the execution has no score; None where it has one."""
        if self.scores:
            return None
        reasons = {why_unscored(verdict) for verdict in self.verdicts.values()}
        return "no_valid_parts" if reasons == {"no_valid_parts"} else "infra"

    def kept(self, calls: Iterable[Call]) -> tuple[Call, ...]:
        """Those of the trunk, and of lanes that have a score."""
        scores = self.scores
        return tuple(call for call in calls if call.lane is None or call.lane in scores)

    def scored(self, calls: Iterable[Call]) -> dict[str, float]:
        """Call -> the score of its lane, for calls of lanes that have one."""
        scores = self.scores
        return {call.call: scores[call.lane] for call in calls if call.lane in scores}

    def weights(self, calls: Iterable[Call]) -> dict[str, float]:
        """Call -> the weight of each of its tokens, for those that are kept."""
        share = 1 / len(scores) if (scores := self.scores) else 1.0
        return {call.call: 1.0 if call.lane is None else share for call in self.kept(calls)}


def why_unscored(verdict: Verified | None) -> str | None:
    """Why a lane has no score; None where it has one."""
    if verdict is None:
        return "not_verified"
    if verdict.infra_error is not None or verdict.reason == "infra":
        return "infra"
    return "no_valid_parts" if score_of(verdict.parts) is None else None


def lanes_of(log: Sequence[TrajEvent]) -> Lanes | None:
    """Of an execution's events; None for one that has no lanes."""
    forked = next((event for event in log if isinstance(event, Forked)), None)
    if forked is None:
        return None
    verdicts: dict[int, Verified | None] = dict.fromkeys(range(forked.copies))
    verdicts |= {event.lane: event for event in log if isinstance(event, Verified) and event.lane is not None}
    return Lanes(verdicts)
