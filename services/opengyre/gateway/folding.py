"""From events to what a person asks for: the state of a task, of its groups, of an execution's log. Pure.

Events may come twice and in any order; the result is the same.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from opengyre.proto.base import Event
from opengyre.proto.decision import GroupState
from opengyre.proto.task import GroupConsumed, GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.traj import Part

TaskState = Literal["submitted", "live", "done"]
REPORTED = 200
"""Groups of one task that a report shows, the last ones."""
_RANK: dict[GroupState, int] = {"live": 0, "ready": 1, "dropped": 2, "evaluated": 2, "trained": 3}
"""A group of which executions were trained stays so, whatever becomes of a member that ends late."""


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one group of a task."""

    group: str
    state: GroupState
    executions: tuple[str, ...] = ()
    admitted_version: int | None = None
    """`v_d`."""
    consumed_version: int | None = None
    """`v_t`, of the first of its executions that were consumed."""
    scores: dict[str, float] = {}
    unscored: dict[str, str] = {}
    reason: str | None = None


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task and what became of it."""

    run: str
    task: str
    sequence: int
    """Place in the stream TASKS, for paging."""
    state: TaskState
    """`submitted`: no group was made of it; `live`: groups are under way or still to come; `done`."""
    purpose: str
    family: str | None
    repeat: int
    groups: dict[str, int]
    """State of a group -> how many."""
    mean_score: float | None


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    summary: TaskSummary
    spec: TaskSpec
    groups: tuple[GroupSummary, ...]


def fold_group(before: GroupSummary | None, event: Event) -> GroupSummary | None:
    """The group after `event`; None if the event is about no group."""
    if isinstance(event, TaskAdmitted):
        known = before or GroupSummary(group=event.group, state="live")
        return msgspec.structs.replace(known, executions=event.executions, admitted_version=event.version)
    if isinstance(event, GroupScored):
        known = before or GroupSummary(group=event.group, state="live")
        # A group that closed early is told of again for each member that ends late.
        scores, unscored = {**known.scores, **event.scores}, {**known.unscored, **event.unscored}
        known = msgspec.structs.replace(known, scores=scores, unscored=unscored)
        return _later(known, event.outcome, event.reason)
    if isinstance(event, GroupConsumed):
        known = before or GroupSummary(group=event.group, state="live")
        first = event.version if known.consumed_version is None else min(known.consumed_version, event.version)
        return _later(msgspec.structs.replace(known, consumed_version=first), event.outcome, event.reason)
    return before


def _later(known: GroupSummary, state: GroupState, reason: str | None) -> GroupSummary:
    if _RANK[state] < _RANK[known.state]:
        return known
    if reason is None and _RANK[state] == _RANK[known.state]:
        reason = known.reason
    return msgspec.structs.replace(known, state=state, reason=reason)


class TaskFold:
    """Gathers the events of one task."""

    def __init__(self, submitted: TaskSubmitted, sequence: int) -> None:
        self.submitted = submitted
        self.sequence = sequence
        self.groups: dict[str, GroupSummary] = {}

    def take(self, event: Event) -> None:
        group = getattr(event, "group", None)
        if isinstance(group, str):
            folded = fold_group(self.groups.get(group), event)
            if folded is not None:
                self.groups[group] = folded

    def summary(self) -> TaskSummary:
        spec = self.submitted.spec
        counts: dict[str, int] = {}
        for group in self.groups.values():
            counts[group.state] = counts.get(group.state, 0) + 1
        scores = [score for group in self.groups.values() for score in group.scores.values()]
        finished = sum(counts.get(state, 0) for state in ("trained", "dropped", "evaluated"))
        state: TaskState = "submitted" if not counts else "done" if finished >= spec.repeat else "live"
        return TaskSummary(
            run=self.submitted.run,
            task=self.submitted.task,
            sequence=self.sequence,
            state=state,
            purpose=spec.purpose,
            family=spec.family,
            repeat=spec.repeat,
            groups=counts,
            mean_score=sum(scores) / len(scores) if scores else None,
        )

    def report(self) -> TaskReport:
        groups = tuple(self.groups[name] for name in sorted(self.groups)[-REPORTED:])
        return TaskReport(summary=self.summary(), spec=self.submitted.spec, groups=groups)


def score_of(parts: Iterable[Part]) -> float | None:
    """The weighted mean of a verifier's parts; None where nothing was verified."""
    known = list(parts)
    total = sum(part.weight for part in known)
    return sum(part.weight * part.value for part in known) / total if total > 0 else None


BULK = ("prompt_ids", "sampled_ids", "logprobs")


def shown(event: Event, *, tokens: bool) -> dict[str, Any]:
    """An event as JSON values; without `tokens` its long arrays are replaced by their lengths."""
    document: dict[str, Any] = msgspec.to_builtins(event)
    if not tokens:
        for name in BULK:
            if name in document:
                document[name] = len(document[name])
        # Ids that were too large for the event are elsewhere.
        for name, count in (document.get("bulk") or {}).items():
            if name in document:
                document[name] = count
    return document
