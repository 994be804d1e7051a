"""From the events of a group to its scores and its training data. Pure and deterministic (law 9).

States of a group: open -> closed. It closes when `close_at` of its members have a score, or when all have ended; after
the mark `Overdue`, as soon as `min_members` have a score. Baseline and scale are frozen from the members that have one
then. A member that ends after that is a part of its own, judged by the frozen baseline.

The result is a function of the log: of what the events of each execution are, and of the order in which executions
ended (their `Ended`, and `Overdue`, in stream order). Where a group closes with its last member, that order is of no
importance, and shuffled and duplicated input gives the same bytes. An execution whose log has a gap or two events at
one place is `broken_log`; an evaluation that failed is no zero, so that execution has no score and enters no baseline
(law 6).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from opengyre.learn.advantage import advantage, baseline
from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.task import GroupScored
from opengyre.proto.traj import Call, Ended, Overdue, Started, TrajEvent, Verified
from opengyre.trajectory.lanes import UNSCORED, Lanes, lanes_of
from opengyre.trajectory.progress import Credit, Scored, freeze, potentials
from opengyre.trajectory.score import score_of
from opengyre.trajectory.tree import paths

Outcome = Literal["ready", "evaluated", "dropped"]
LogEvent = TrajEvent | Overdue
"""What a group's log consists of."""


class NotWholeError(ValueError):
    """No event of the group tells its members."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """What one event of the log made of its group. `ready` is None unless there is something for the trainer."""

    cause: str | None
    """The execution whose end it was; None: the mark `Overdue`."""
    scored: GroupScored
    ready: GroupReady | None
    members: tuple[str, ...]
    """All executions of the group."""


@dataclass(frozen=True, slots=True)
class _Execution:
    execution: str
    start: Started | None
    score: float | None
    reason: str
    """Why it has no score."""
    calls: tuple[Call, ...]
    potentials: dict[str, float | None] = field(default_factory=dict)
    """Call -> the potential before it, where progress is credit."""
    lanes: Lanes | None = None
    """Where it was verified lane by lane."""


def assemble(events: Iterable[LogEvent]) -> list[Assembled]:
    """The parts of the group that `events` are the log of, so far, in the order in which they came about: the closing
    part, then one for each member that ended later. Empty while the group is open.

    Raises `NotWholeError` where no execution has a start.
    """
    logs, causes = _logs(events)
    dispatch = _dispatch(logs)
    ended: list[_Execution] = []
    parts: list[Assembled] = []
    frozen: Credit | None = None
    overdue = False
    for cause in causes:
        if cause is None:
            overdue = True
        elif cause in dispatch.members:
            ended.append(_execution(cause, logs[cause]))
        else:
            continue
        if not parts:
            if _closes(dispatch, ended, overdue=overdue):
                place = {name: number for number, name in enumerate(dispatch.members)}
                closing = sorted(ended, key=lambda execution: place[execution.execution])
                made, frozen = _close(dispatch, closing, cause)
                parts.append(made)
        elif cause is not None and frozen is not None:
            parts.append(_late(dispatch, ended[-1], frozen))
    return parts


def _closes(dispatch: EpisodeDispatch, ended: Sequence[_Execution], *, overdue: bool) -> bool:
    whole = len(dispatch.members)
    if len(ended) == whole:
        return True
    if dispatch.task.purpose == "evaluate":
        return False
    scored = sum(execution.score is not None for execution in ended)
    wanted = whole if dispatch.close_at is None else dispatch.close_at
    return scored >= (min(wanted, dispatch.min_members) if overdue else wanted)


def _logs(events: Iterable[LogEvent]) -> tuple[dict[str, tuple[TrajEvent, ...]], list[str | None]]:
    """Execution -> its distinct events, by place, those at one place in a fixed order; and what may have closed the
    group, each once, in the order of the log: executions that ended, or None for `Overdue`."""
    logs: dict[str, dict[int, list[TrajEvent]]] = {}
    causes: dict[str | None, None] = {}
    for event in events:
        if isinstance(event, Overdue):
            causes[None] = None
            continue
        if isinstance(event, Ended):
            causes[event.execution] = None
        there = logs.setdefault(event.execution, {}).setdefault(event.index, [])
        if event not in there:
            there.append(event)
    ordered = {
        name: tuple(event for place in sorted(log) for event in _in_order(log[place])) for name, log in logs.items()
    }
    return ordered, list(causes)


def _in_order(rivals: list[TrajEvent]) -> list[TrajEvent]:
    """Events at one place; more than one are rare, and encoding a call is not cheap."""
    return sorted(rivals, key=codec.encode) if len(rivals) > 1 else rivals


def _dispatch(logs: dict[str, tuple[TrajEvent, ...]]) -> EpisodeDispatch:
    for name in sorted(logs):
        for event in logs[name]:
            if isinstance(event, Started):
                return event.dispatch
    raise NotWholeError("no execution of the group has a start in its log")


def _execution(name: str, log: tuple[TrajEvent, ...]) -> _Execution:
    calls = tuple(event for event in log if isinstance(event, Call))
    start = next((event for event in log if isinstance(event, Started)), None)
    if start is None or any(event.index != place for place, event in enumerate(log)):
        return _Execution(name, None, None, "broken_log", ())
    ended = next(event for event in log if isinstance(event, Ended))
    verdict = next((event for event in reversed(log) if isinstance(event, Verified)), None)
    if ended.reason == "infra":
        return _Execution(name, start, None, "infra", calls)
    if verdict is None:
        return _Execution(name, start, None, "not_verified", calls)
    lanes = lanes_of(log)
    if lanes is not None:
        return _Execution(name, start, lanes.score, lanes.fault or "", calls, lanes=lanes)
    if verdict.infra_error is not None:
        return _Execution(name, start, None, "infra", calls)
    score = score_of(verdict.parts)
    credited = score is not None and start.dispatch.scoring.credit == "progress"
    reason = "" if score is not None else "no_valid_parts"
    return _Execution(name, start, score, reason, calls, potentials(log) if credited else {})


def _member(execution: _Execution) -> Scored | None:
    if execution.score is None:
        return None
    lanes = execution.lanes.scored(execution.calls) if execution.lanes is not None else {}
    return Scored(execution.execution, execution.score, execution.potentials, lanes)


def _close(
    dispatch: EpisodeDispatch, ended: Sequence[_Execution], cause: str | None
) -> tuple[Assembled, Credit | None]:
    """The closing part, and what it froze: nothing where the group is not to be trained."""
    scores = [execution.score for execution in ended if execution.score is not None]
    evaluated = dispatch.task.purpose == "evaluate"
    reason = None
    if not scores:
        reason = "infra"
    elif not evaluated and len(scores) < dispatch.min_members:
        reason = "too_few_members"
    outcome: Outcome = "dropped" if reason else "evaluated" if evaluated else "ready"
    members = [member for execution in ended if (member := _member(execution)) is not None]
    frozen = freeze(baseline(scores, dispatch.advantage), members) if outcome == "ready" else None
    ready = _ready(dispatch, ended, frozen, late=False) if frozen is not None else None
    return Assembled(cause, _scored(dispatch, ended, outcome, reason, late=False), ready, dispatch.members), frozen


def _late(dispatch: EpisodeDispatch, execution: _Execution, frozen: Credit) -> Assembled:
    """A member that ended after the group closed; without a score it has no members, and takes its place all the same,
    so that updates fill up."""
    alone = (execution,)
    scored = _scored(dispatch, alone, "ready", None, late=True)
    return Assembled(execution.execution, scored, _ready(dispatch, alone, frozen, late=True), dispatch.members)


def _scored(
    dispatch: EpisodeDispatch, executions: Sequence[_Execution], outcome: Outcome, reason: str | None, *, late: bool
) -> GroupScored:
    versions = [span.version for e in executions for call in e.calls for span in call.versions]
    tokens = {e.execution: sum(len(call.sampled_ids) for call in e.calls) for e in executions}
    return GroupScored(
        run=dispatch.run,
        task=dispatch.task.task,
        group=dispatch.group,
        outcome=outcome,
        reason=reason,
        scores={e.execution: e.score for e in executions if e.score is not None},
        unscored={e.execution: e.reason for e in executions if e.score is None},
        sampled_version_min=min(versions, default=dispatch.version),
        sampled_version_max=max(versions, default=dispatch.version),
        tokens=sum(tokens.values()),
        executions=tuple(e.execution for e in executions),
        late=late,
        tokens_by=tokens,
    )


def _ready(dispatch: EpisodeDispatch, executions: Sequence[_Execution], frozen: Credit, *, late: bool) -> GroupReady:
    refused: Counter[str] = Counter()
    members: list[Member] = []
    for execution in executions:
        member, start = _member(execution), execution.start
        if member is None or start is None:
            continue
        calls, lanes = execution.calls, execution.lanes
        weights = None
        if lanes is not None:
            calls, weights = lanes.kept(calls), lanes.weights(calls)
            if unscored := len(execution.calls) - len(calls):
                refused[UNSCORED] += unscored
        found = paths(
            calls, dispatch.sampling, start.dispatch.seed, start.vocabulary, frozen.advantages(member), weights
        )
        refused.update(found.refused)
        members.append(
            Member(
                execution=execution.execution,
                score=member.score,
                advantage=advantage(member.score, frozen.baseline),
                sequences=found.sequences,
                trained_tokens=found.trained_tokens,
                path_tokens=found.path_tokens,
                unique_tokens=found.unique_tokens,
                left_out=found.left_out,
                transitions=found.transitions,
            )
        )
    return GroupReady(
        run=dispatch.run,
        group=dispatch.group,
        task=dispatch.task.task,
        version=dispatch.version,
        members=tuple(members),
        refused=dict(sorted(refused.items())),
        executions=tuple(execution.execution for execution in executions),
        late=late,
        baseline=frozen.baseline.center,
        scale=frozen.baseline.scale,
        group_size=len(dispatch.members),
    )


def by_group(events: Iterable[LogEvent]) -> dict[str, list[LogEvent]]:
    """Group -> its events, groups in the order of their ids."""
    ordered = sorted(events, key=lambda event: event.group)
    return {name: list(found) for name, found in itertools.groupby(ordered, key=lambda event: event.group)}
