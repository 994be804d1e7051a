"""What was said of one group, as its ledger entry, and the states that follow from it. Pure.

What is said of an execution, by fields of the entry: `closed` (scored, or why not: `unscored`), `trained` (it took a
place in the update at this version), `dropped` (it left training). Each only grows, so events may come twice and in any
order; an execution that was trained was trained, whatever else was said of it.

A group is trained if one of its executions was; else what scoring said if it was dropped or evaluated; else dropped if
all executions were; else ready if it closed; else live. Its `consumed_version` is that of the first update that took
one of its executions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from opengyre.proto.decision import GroupEntry
from opengyre.proto.task import GroupConsumed, GroupScored

LOST = "lost"
"""Reason of an execution of a group that was dropped for no reason of its own."""
SKIPPED = "non_finite_gradient"
"""Reason of executions whose update did not step: they were its batch, so nothing takes their place."""


class LawBrokenError(Exception):
    """A law of the design does not hold; the message says which, for which group. Fatal."""


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """`version`: of the update that it took a place in. `scored`: nothing was said against it."""

    name: str
    state: Literal["live", "ready", "trained", "dropped"]
    reason: str | None = None
    version: int | None = None
    took_place: bool = False
    scored: bool = True


def executions(entry: GroupEntry) -> Iterator[ExecutionState]:
    """The states of the entry's executions, in order."""
    plain = not (entry.closed or entry.trained or entry.dropped)
    for name in entry.executions:
        unscored = entry.unscored.get(name)
        if plain and entry.state in ("ready", "trained"):
            # An entry from before executions were kept: they are all as their group is.
            yield _in_group(entry, name, unscored)
        elif name in entry.trained:
            state = "trained" if unscored is None else "dropped"
            yield ExecutionState(name, state, unscored, entry.trained[name], took_place=True, scored=unscored is None)
        elif name in entry.dropped or entry.state == "dropped":
            reason = entry.dropped.get(name, entry.reason)
            yield ExecutionState(name, "dropped", unscored or reason or LOST, took_place=reason == SKIPPED)
        elif name in entry.closed:
            yield ExecutionState(name, "ready", scored=unscored is None)
        else:
            yield ExecutionState(name, "live")


def _in_group(entry: GroupEntry, name: str, unscored: str | None) -> ExecutionState:
    if entry.state == "ready":
        return ExecutionState(name, "ready", scored=unscored is None)
    state = "trained" if unscored is None else "dropped"
    return ExecutionState(name, state, unscored, entry.consumed_version, took_place=True, scored=unscored is None)


def last_version(entry: GroupEntry) -> int:
    """The greatest version at which an update took one of its executions; `consumed_version` where none did."""
    return max(entry.trained.values(), default=entry.consumed_version or 0)


def scored(entry: GroupEntry, event: GroupScored) -> GroupEntry:
    """The entry after scores of executions are known. What consumption said stands."""
    about = event.executions or entry.executions
    entry = msgspec.structs.replace(
        entry,
        unscored={**entry.unscored, **event.unscored},
        closed=_with(entry, entry.closed, about),
        tokens={**entry.tokens, **event.tokens_by},
    )
    if event.outcome != "ready" and entry.state in ("live", "ready"):
        reason = (event.reason or LOST) if event.outcome == "dropped" else None
        return msgspec.structs.replace(entry, state=event.outcome, reason=reason)
    return _settled(entry)


def consumed(entry: GroupEntry, event: GroupConsumed) -> GroupEntry:
    """The entry after an update took executions of the group, or they were dropped. Raises `LawBrokenError`."""
    if event.version < entry.admitted_version:
        raise LawBrokenError(
            f"staleness of group {entry.group} is negative: admitted at version {entry.admitted_version}, "
            f"consumed at version {event.version} (law 4)"
        )
    about = event.executions or entry.executions
    if event.outcome == "trained":
        for name in about:
            before = entry.trained.get(name, event.version)
            if before != event.version:
                raise LawBrokenError(
                    f"execution {name} of group {entry.group} was trained twice, at versions {before} and "
                    f"{event.version} (law 3)"
                )
        entry = msgspec.structs.replace(entry, trained={**entry.trained, **dict.fromkeys(about, event.version)})
    else:
        reason = event.reason or LOST
        # Two reasons come of two tellings; whichever came first, the same one is kept.
        gone = {name: min(reason, entry.dropped.get(name, reason)) for name in about}
        first = event.version if entry.consumed_version is None else min(entry.consumed_version, event.version)
        entry = msgspec.structs.replace(
            entry,
            dropped={**entry.dropped, **gone},
            consumed_version=entry.consumed_version if entry.trained else first,
        )
    return _settled(entry)


def _with(entry: GroupEntry, known: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Both, in the order of the group."""
    both = {*known, *more}
    return tuple(name for name in entry.executions if name in both)


def _settled(entry: GroupEntry) -> GroupEntry:
    """The entry with the group's state that follows from what was said of its executions."""
    if entry.trained:
        first = min(entry.trained.values())
        return msgspec.structs.replace(entry, state="trained", reason=None, consumed_version=first)
    if entry.state in ("dropped", "evaluated") and not entry.dropped:
        return entry
    if len(entry.dropped) == len(entry.executions):
        return msgspec.structs.replace(entry, state="dropped", reason=min(entry.dropped.values()))
    if entry.state == "live" and entry.closed:
        return msgspec.structs.replace(entry, state="ready")
    return entry
