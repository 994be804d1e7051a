"""What a run has recorded of each update: scores, parity, tokens, and where its time went. Pure.

`rows` folds the events of a run, each with the broker's time stamp, whatever their order. Phases of an update:

- rollout: from the admission of the first of its groups to the last of their scores;
- training: seconds in which a cell computed gradients of it, the mean of the cells that did;
- wait: the rest of the time from the first admission to the last contribution, when such a cell had none of it to do;
- commit: from the last contribution to the commit (the sum, the optimizer's step, the checkpoint);
- weights: from the commit until the first host serves its version. None where it was not published.

Rollout and training overlap where groups train as they are ready, so phases do not add up to `seconds`, which is from
the first admission to the first host that serves the version, or to the commit.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from opengyre.proto.base import Event, Record
from opengyre.proto.task import GroupScored, TaskAdmitted, TaskSubmitted
from opengyre.proto.update import Committed, Contributed
from opengyre.proto.weights import WeightsApplied, WeightsPublished


class FamilyScore(Record, frozen=True, kw_only=True):
    """Of the held-out tasks of one family."""

    score: float
    """Mean over tasks of the mean of their executions."""
    tasks: int
    """That have a score."""


class Evaluated(Record, frozen=True, kw_only=True):
    """Held-out tasks that were begun while a version was the published one."""

    version: int
    score: float | None
    """Mean over tasks of the mean of their executions; None where none has a score."""
    tasks: int
    """That have a score."""
    solved: int = 0
    """Tasks of which each execution has a score of 1."""
    families: dict[str, FamilyScore] = msgspec.field(default_factory=dict)
    """Of tasks that name a family and have a score."""
    unscored: int = 0
    overtaken: int = 0
    """Tasks that were scored after the next version was published, so that it may have sampled some of their tokens."""


class Phases(Record, frozen=True, kw_only=True):
    """Seconds; None where what bounds it was not recorded."""

    rollout: float | None
    training: float
    wait: float | None
    commit: float | None
    weights: float | None


class Row(Record, frozen=True, kw_only=True):
    """One update."""

    update: int
    version: int
    score: float
    """Mean of its executions."""
    held_out: float | None
    """Of the version that it made."""
    gap: float | None
    """Mean |trainer log-prob - engine log-prob| of tokens that its base version sampled, nats."""
    tokens: int
    """That were trained."""
    unique_tokens: int
    path_tokens: int
    staleness: float
    executions: int
    phases: Phases
    seconds: float | None
    gradient_norm: float
    skipped: str | None = None
    alarm: str | None = None


class RunFacts(Record, frozen=True, kw_only=True):
    run: str
    updates: tuple[Row, ...]
    evaluations: tuple[Evaluated, ...]
    families: tuple[str, ...] = ()
    """Of the held-out tasks that were scored, in the order in which they were first submitted."""


@dataclass
class _Seen:
    """First or last times, by what they are of."""

    families: dict[str, str] = field(default_factory=dict)
    """Held-out task -> family, where it names one."""
    admitted: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Group -> when, and the version that was published then."""
    scored: dict[str, list[tuple[float, GroupScored]]] = field(default_factory=lambda: defaultdict(list))
    contributed: dict[tuple[int, str], dict[str, tuple[float, Contributed]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Update and attempt -> contribution -> when, and what."""
    committed: dict[int, tuple[float, Committed]] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    applied: dict[int, float] = field(default_factory=dict)

    def take(self, when: float, event: Event) -> None:
        match event:
            case TaskSubmitted(spec=spec):
                if spec.purpose == "evaluate" and spec.family is not None:
                    self.families.setdefault(event.task, spec.family)
            case TaskAdmitted():
                self.admitted.setdefault(event.group, (when, event.version))
            case GroupScored():
                self.scored[event.group].append((when, event))
            case Contributed():
                self.contributed[event.update, event.attempt].setdefault(event.contribution, (when, event))
            case Committed():
                self.committed.setdefault(event.update, (when, event))
            case WeightsPublished():
                self.published.setdefault(event.manifest.version, when)
            case WeightsApplied():
                self.applied.setdefault(event.version, when)
            case _:
                pass


def facts(run: str, events: Iterable[tuple[float, Event]]) -> RunFacts:
    """What is known of a run's updates and evaluations."""
    seen = _Seen()
    for when, event in sorted(events, key=lambda pair: pair[0]):
        seen.take(when, event)
    evaluations = _evaluations(seen)
    held_out = {one.version: one.score for one in evaluations}
    updates = tuple(_row(seen, number, held_out) for number in sorted(seen.committed))
    scored = {family for one in evaluations for family in one.families}
    families = tuple(family for family in dict.fromkeys(seen.families.values()) if family in scored)
    return RunFacts(run=run, updates=updates, evaluations=evaluations, families=families)


def _evaluations(seen: _Seen) -> tuple[Evaluated, ...]:
    by_version: dict[int, list[tuple[float, GroupScored]]] = defaultdict(list)
    for group, found in seen.scored.items():
        when, event = found[0]
        # A group that evaluates and could not be scored is dropped, and looks like one that trains.
        if event.outcome == "evaluated" and group in seen.admitted:
            by_version[seen.admitted[group][1]].append((when, event))
    result: list[Evaluated] = []
    for version, scored in sorted(by_version.items()):
        means = [(event.task, _mean(event.scores.values())) for _, event in scored if event.scores]
        by_family: dict[str, list[float]] = defaultdict(list)
        for task, mean in means:
            if (family := seen.families.get(task)) is not None:
                by_family[family].append(mean)
        after = min((when for later, when in seen.published.items() if later > version), default=float("inf"))
        result.append(
            Evaluated(
                version=version,
                score=_mean([mean for _, mean in means]) if means else None,
                tasks=len(means),
                # A mean of ones may be off by rounding.
                solved=sum(all(score >= 1 for score in event.scores.values()) for _, event in scored if event.scores),
                families={
                    family: FamilyScore(score=_mean(found), tasks=len(found))
                    for family, found in sorted(by_family.items())
                },
                unscored=len(scored) - len(means),
                overtaken=sum(when > after for when, _ in scored),
            )
        )
    return tuple(result)


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _row(seen: _Seen, number: int, held_out: dict[int, float | None]) -> Row:
    at, event = seen.committed[number]
    stats = event.stats
    began = min((seen.admitted[group][0] for group in event.groups if group in seen.admitted), default=None)
    served = seen.applied.get(event.version)
    end = served if served is not None else at
    return Row(
        update=number,
        version=event.version,
        score=event.score,
        held_out=held_out.get(event.version),
        gap=stats.logprob_gap_sum / stats.logprob_gap_tokens if stats.logprob_gap_tokens else None,
        tokens=stats.tokens,
        unique_tokens=stats.unique_tokens,
        path_tokens=stats.path_tokens,
        staleness=sum(event.staleness) / len(event.staleness) if event.staleness else 0.0,
        executions=len(event.executions),
        phases=_phases(seen, began, at, event),
        seconds=None if began is None else end - began,
        gradient_norm=event.gradient_norm,
        skipped=event.skipped,
        alarm=event.alarm,
    )


def _phases(seen: _Seen, began: float | None, at: float, event: Committed) -> Phases:
    parts = seen.contributed.get((event.update, event.attempt), {})
    training = event.stats.busy_s / max(1, len({one.host for _, one in parts.values()}))
    handed = max((when for when, _ in parts.values()), default=None)
    # Of a group with late members those that this update took are told apart by nothing cheaper than the commit.
    scored = max((when for group in event.groups for when, _ in seen.scored.get(group, ()) if when <= at), default=None)
    served = seen.applied.get(event.version)
    return Phases(
        rollout=None if began is None or scored is None else scored - began,
        training=training,
        wait=None if began is None or handed is None else max(0.0, handed - began - training),
        commit=None if handed is None else at - handed,
        weights=None if served is None else max(0.0, served - at),
    )
