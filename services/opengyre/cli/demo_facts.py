"""What the demo knows from the events of its run, and whether that meets its promises. Pure.

`Facts` is a fold: taking the events of all streams in the order of their time stamps gives the final account, taking
them as they come gives the live view.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opengyre.proto.base import Event
from opengyre.proto.decision import Book, StalenessReport
from opengyre.proto.host import HostState, HostStateChanged
from opengyre.proto.task import GroupScored
from opengyre.proto.traj import Ended, Resumed, Started, Suspended
from opengyre.proto.update import Committed, RunFinished
from opengyre.proto.weights import WeightsApplied, WeightsPublished, WeightsRefused

ROLES = {HostState.ROLLOUT: "rollout", HostState.TRAIN: "train"}
RISE = 0.15
VERSIONS = 8
SWITCHES = 6


@dataclass(frozen=True)
class Point:
    """One update."""

    update: int
    version: int
    score: float
    staleness: tuple[int, ...]


@dataclass
class Facts:
    """An account of a run."""

    curve: dict[int, Point] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)
    applied: set[int] = field(default_factory=set)
    refused: int = 0
    roles: dict[str, str] = field(default_factory=dict)
    """Host -> the last role that it settled in."""
    switches: int = 0
    switches_live: int = 0
    """Of these, those that were completed while episodes were live."""
    moved_calls: int = 0
    live: set[str] = field(default_factory=set)
    suspended: set[str] = field(default_factory=set)
    suspensions: int = 0
    ended: dict[str, str] = field(default_factory=dict)
    """Execution -> reason."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """Task -> score."""
    finished: bool = False

    def take(self, event: Event) -> None:  # noqa: C901 - one case an event
        """Take one event; a repeated one changes nothing, but for switches, whose stream is read once."""
        match event:
            case Committed():
                self.curve[event.update] = Point(event.update, event.version, event.score, event.staleness)
            case RunFinished():
                self.finished = True
            case WeightsPublished():
                self.published.add(event.manifest.version)
            case WeightsApplied():
                self.applied.add(event.version)
            case WeightsRefused():
                self.refused += 1
            case HostStateChanged():
                self._move(event)
            case Started():
                if event.execution not in self.ended:
                    self.live.add(event.execution)
            case Suspended():
                self.suspended.add(event.execution)
                self.suspensions += 1
            case Resumed():
                self.suspended.discard(event.execution)
            case Ended():
                self.ended[event.execution] = event.reason
                self.live.discard(event.execution)
                self.suspended.discard(event.execution)
            case GroupScored(outcome="evaluated"):
                self.evaluations[event.task] = sum(event.scores.values()) / max(1, len(event.scores))
            case _:
                pass

    def _move(self, event: HostStateChanged) -> None:
        self.moved_calls += event.moved_calls
        role = ROLES.get(event.after)
        if role is None:
            return
        if self.roles.get(event.host, role) != role:
            self.switches += 1
            self.switches_live += bool(self.live)
        self.roles[event.host] = role

    @property
    def interrupted(self) -> int:
        """Episodes that ended because of us and not for a reason of their own."""
        return sum(reason == "infra" for reason in self.ended.values())

    @property
    def scores(self) -> list[float]:
        """Of the updates, in order."""
        return [point.score for _, point in sorted(self.curve.items())]

    def evaluation(self, prefix: str) -> float | None:
        """Mean score of the evaluated tasks whose name begins with `prefix`."""
        scores = [score for task, score in self.evaluations.items() if task.startswith(prefix)]
        return sum(scores) / len(scores) if scores else None


def account(events: Iterable[tuple[float, Event]]) -> Facts:
    """The facts of events with their time stamps, in any order."""
    facts = Facts()
    for _, event in sorted(events, key=lambda pair: pair[0]):
        facts.take(event)
    return facts


def rise(scores: Sequence[float]) -> float | None:
    """Mean of the last quarter less mean of the first; None below four updates."""
    quarter = len(scores) // 4
    if quarter == 0:
        return None
    return sum(scores[-quarter:]) / quarter - sum(scores[:quarter]) / quarter


def shortfalls(facts: Facts, staleness: StalenessReport | None, updates: int, switches: int | None = None) -> list[str]:
    """Which promises of the demo were not met, a sentence each; empty if all were.

    A demo that was asked for fewer updates than are needed to learn or to publish is held to what is possible.
    `switches`: how many are promised where they are dear.
    """
    missed: list[str] = []
    if len(facts.curve) < updates:
        missed.append(f"{len(facts.curve)} of {updates} updates were committed")
    gain = rise(facts.scores)
    if updates >= 24 and (gain is None or gain < RISE):
        missed.append(f"the score rose by {gain or 0:.3f} from the first to the last quarter; {RISE} was promised")
    both = len(facts.published & facts.applied)
    wanted = min(VERSIONS, updates // 2)
    if both < wanted:
        missed.append(f"{both} versions were published and applied; {wanted} were promised")
    wanted = switches or (SWITCHES if updates >= 8 else 1)
    if facts.switches_live < wanted:
        missed.append(f"{facts.switches_live} role switches happened with episodes live; {wanted} were promised")
    if facts.interrupted:
        missed.append(f"{facts.interrupted} episodes were interrupted; none may be")
    if staleness is None:
        missed.append("the ledger could not be read")
    else:
        for name, book in (("groups", staleness.groups), ("executions", staleness.executions)):
            if not balances(book):
                missed.append(f"the books of {name} do not balance: {book}")
    return missed


def balances(book: Book) -> bool:
    """Law 2, computed here again and not believed."""
    return book.balances and book.dispatched == book.trained + sum(book.dropped.values()) + book.ready + book.live


def _terms(book: Book) -> dict[str, Any]:
    return {
        "dispatched": book.dispatched,
        "trained": book.trained,
        "dropped": book.dropped,
        "ready": book.ready,
        "live": book.live,
        "balances": balances(book),
    }


def summary(
    facts: Facts,
    staleness: StalenessReport | None,
    wall_s: dict[str, float],
    settings: dict[str, Any],
    missed: list[str],
) -> dict[str, Any]:
    """The content of `summary.json`."""
    report = staleness
    return {
        "passed": not missed,
        "shortfalls": missed,
        "settings": settings,
        "curve": [
            {"update": p.update, "version": p.version, "score": round(p.score, 4)}
            for _, p in sorted(facts.curve.items())
        ],
        "rise": rise(facts.scores),
        "evaluation": {"before": facts.evaluation("before"), "after": facts.evaluation("after")},
        "weight_versions": {
            "published": len(facts.published),
            "applied": len(facts.published & facts.applied),
            "refused": facts.refused,
        },
        "role_switches": facts.switches_live,
        "role_switches_all": facts.switches,
        "moved_calls": facts.moved_calls,
        "suspensions": facts.suspensions,
        "episodes": {
            reason: sum(r == reason for r in facts.ended.values()) for reason in sorted({*facts.ended.values()})
        },
        "episodes_interrupted": facts.interrupted,
        "accounting": {
            "identity": "dispatched = trained + dropped + ready + live",
            "balances": report is not None and balances(report.groups) and balances(report.executions),
            "groups": _terms(report.groups) if report else None,
            "executions": _terms(report.executions) if report else None,
            "evaluated_groups": report.evaluated_groups if report else None,
        },
        "staleness": {
            "predicted": report.predicted if report else None,
            "mean": report.mean if report else None,
            "max": report.maximum if report else None,
            "distribution": report.distribution if report else None,
        },
        "wall_s": {phase: round(seconds, 2) for phase, seconds in wall_s.items()},
    }
