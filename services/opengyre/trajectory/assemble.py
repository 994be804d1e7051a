"""From the events of a group to its scores and its training data. Pure and deterministic (law 9).

The result depends on the set of events alone: shuffled and duplicated input gives the same bytes. An execution whose
log has a gap or two events at one place is `broken_log`; an evaluation that failed is no zero, so that execution has
no score and enters no baseline (law 6).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opengyre.learn.advantage import advantages
from opengyre.proto import codec
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.task import GroupScored
from opengyre.proto.traj import Call, Ended, Part, Started, TrajEvent, Verified
from opengyre.trajectory.tree import paths


class NotWholeError(ValueError):
    """A member of the group has not ended, or no event of the group tells its members."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """`ready` is None unless the group is to be trained."""

    scored: GroupScored
    ready: GroupReady | None


@dataclass(frozen=True, slots=True)
class _Execution:
    execution: str
    score: float | None
    reason: str
    """Why it has no score."""
    calls: tuple[Call, ...]


def assemble(events: Iterable[TrajEvent]) -> Assembled:
    """Assemble the group that `events` (any order, any repetition) are the logs of.

    Raises `NotWholeError` while a member has not ended.
    """
    logs = _logs(events)
    dispatch = _dispatch(logs)
    missing = [name for name in dispatch.members if not any(isinstance(e, Ended) for e in logs.get(name, ()))]
    if missing:
        raise NotWholeError(f"group {dispatch.group}: {', '.join(missing)} has not ended")
    executions = [_execution(name, logs[name]) for name in dispatch.members]
    scores = {e.execution: e.score for e in executions if e.score is not None}
    unscored = {e.execution: e.reason for e in executions if e.score is None}
    evaluated = dispatch.task.purpose == "evaluate"
    reason = None
    if not scores:
        reason = "infra"
    elif not evaluated and len(scores) < dispatch.min_members:
        reason = "too_few_members"
    versions = [span.version for e in executions for call in e.calls for span in call.versions]
    scored = GroupScored(
        run=dispatch.run,
        task=dispatch.task.task,
        group=dispatch.group,
        outcome="dropped" if reason else "evaluated" if evaluated else "ready",
        reason=reason,
        scores=scores,
        unscored=unscored,
        sampled_version_min=min(versions, default=dispatch.version),
        sampled_version_max=max(versions, default=dispatch.version),
        tokens=sum(len(call.sampled_ids) for e in executions for call in e.calls),
    )
    return Assembled(scored, _ready(dispatch, executions) if scored.outcome == "ready" else None)


def score_of(parts: Sequence[Part]) -> float | None:
    """The weighted mean of the parts' values, in [0, 1]; None where there is nothing to weigh or it is no number."""
    total = math.fsum(part.weight for part in parts)
    if not total > 0 or not all(0 <= part.value <= 1 and part.weight >= 0 for part in parts):
        return None
    return min(1.0, math.fsum(part.weight * part.value for part in parts) / total)


def _logs(events: Iterable[TrajEvent]) -> dict[str, tuple[TrajEvent, ...]]:
    """Execution -> its distinct events, by place; events at one place are in a fixed order."""
    logs: dict[str, dict[int, list[TrajEvent]]] = {}
    for event in events:
        there = logs.setdefault(event.execution, {}).setdefault(event.index, [])
        if event not in there:
            there.append(event)
    return {
        name: tuple(event for place in sorted(log) for event in sorted(log[place], key=codec.encode))
        for name, log in logs.items()
    }


def _dispatch(logs: dict[str, tuple[TrajEvent, ...]]) -> EpisodeDispatch:
    for name in sorted(logs):
        for event in logs[name]:
            if isinstance(event, Started):
                return event.dispatch
    raise NotWholeError("no execution of the group has a start in its log")


def _execution(name: str, log: tuple[TrajEvent, ...]) -> _Execution:
    calls = tuple(event for event in log if isinstance(event, Call))
    if any(event.index != place for place, event in enumerate(log)):
        return _Execution(name, None, "broken_log", ())
    ended = next(event for event in log if isinstance(event, Ended))
    verdict = next((event for event in reversed(log) if isinstance(event, Verified)), None)
    if ended.reason == "infra" or (verdict is not None and verdict.infra_error is not None):
        return _Execution(name, None, "infra", calls)
    if verdict is None:
        return _Execution(name, None, "not_verified", calls)
    score = score_of(verdict.parts)
    return _Execution(name, score, "" if score is not None else "no_valid_parts", calls)


def _ready(dispatch: EpisodeDispatch, executions: Sequence[_Execution]) -> GroupReady:
    scored = [(e, e.score) for e in executions if e.score is not None]
    refused: Counter[str] = Counter()
    members: list[Member] = []
    worth = advantages([score for _, score in scored], dispatch.advantage)
    for (execution, score), advantage in zip(scored, worth, strict=True):
        found = paths(execution.calls)
        refused.update(found.refused)
        members.append(
            Member(
                execution=execution.execution,
                score=score,
                advantage=advantage,
                sequences=found.sequences,
                trained_tokens=found.trained_tokens,
                path_tokens=found.path_tokens,
            )
        )
    return GroupReady(
        run=dispatch.run,
        group=dispatch.group,
        task=dispatch.task.task,
        version=dispatch.version,
        members=tuple(members),
        refused=dict(sorted(refused.items())),
    )


def by_group(events: Iterable[TrajEvent]) -> dict[str, list[TrajEvent]]:
    """Group -> its events, groups in the order of their ids."""
    ordered = sorted(events, key=lambda event: event.group)
    return {name: list(found) for name, found in itertools.groupby(ordered, key=lambda event: event.group)}
