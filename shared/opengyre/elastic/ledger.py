"""The staleness ledger of one run: its groups, their transitions, the books of law 2 and the staleness of law 5. Pure.

A group's entry goes live -> ready -> trained, or to dropped or evaluated. Events may come twice and in any order: an
entry only ever rises (live < what scoring said < what consumption said), so every order gives the same entry.

Invariants: sequences are 0, 1, 2, ... without gaps (the next group is `next_sequence`); `d = v_t - v_d >= 0`; a
group is trained at one version only. The books are counted as entries come and change, `dispatched` apart from the
others, so that `balances` is a check and not a definition.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from opengyre.proto.decision import Book, GroupEntry, StalenessReport
from opengyre.proto.run import Dispatch
from opengyre.proto.task import GroupConsumed, GroupScored

LOST = "lost"
"""Reason of an execution of a group that was dropped for no reason of its own."""
SKIPPED = "non_finite_gradient"
"""Reason of groups whose update did not step: they were its batch, so nothing takes their place."""


class LawBrokenError(Exception):
    """A law of the design does not hold; the message says which, for which group. Fatal."""


def scored(entry: GroupEntry, event: GroupScored) -> GroupEntry:
    """The entry after its scores are known. What consumption said stands."""
    unscored = event.unscored or entry.unscored
    if entry.consumed_version is not None or entry.state not in ("live", "ready"):
        return msgspec.structs.replace(entry, unscored=unscored)
    reason = (event.reason or LOST) if event.outcome == "dropped" else None
    return msgspec.structs.replace(entry, state=event.outcome, reason=reason, unscored=unscored)


def consumed(entry: GroupEntry, event: GroupConsumed) -> GroupEntry:
    """The entry after an update took the group, or dropped it. Raises `LawBrokenError`."""
    if event.version < entry.admitted_version:
        raise LawBrokenError(
            f"staleness of group {entry.group} is negative: admitted at version {entry.admitted_version}, "
            f"consumed at version {event.version} (law 4)"
        )
    if entry.consumed_version is not None:
        if entry.state == event.outcome == "trained" and entry.consumed_version != event.version:
            raise LawBrokenError(
                f"group {entry.group} was trained twice, at versions {entry.consumed_version} and "
                f"{event.version} (law 3)"
            )
        return entry
    reason = (event.reason or LOST) if event.outcome == "dropped" else None
    return msgspec.structs.replace(entry, state=event.outcome, consumed_version=event.version, reason=reason)


class _Tally:
    """One side of the books: groups, or executions."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.states: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def book(self) -> Book:
        trained, ready, live = (self.states[state] for state in ("trained", "ready", "live"))
        return Book(
            dispatched=self.dispatched,
            trained=trained,
            dropped={reason: count for reason, count in sorted(self.dropped.items()) if count},
            ready=ready,
            live=live,
            balances=self.dispatched == trained + self.dropped.total() + ready + live,
        )


class Ledger:
    """All groups of one run."""

    def __init__(self, entries: Iterable[GroupEntry] = ()) -> None:
        self._entries: dict[str, GroupEntry] = {}
        self._groups = _Tally()
        self._executions = _Tally()
        self._live: dict[str, GroupEntry] = {}
        self._ready: set[str] = set()
        self.distribution: Counter[int] = Counter()
        self.next_sequence = 0
        self.evaluated = 0
        self.replaceable = 0
        """Train groups that were dropped and were in no update: others may be admitted in their place."""
        self.trainer_version = 0
        """The greatest version that a consumption implies."""
        for entry in entries:
            self.put(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[GroupEntry]:
        return iter(self._entries.values())

    def get(self, group: str) -> GroupEntry | None:
        return self._entries.get(group)

    def put(self, entry: GroupEntry) -> None:
        """Add a group or replace its entry."""
        before = self._entries.get(entry.group)
        if before is not None:
            self._count(before, -1)
        else:
            self.next_sequence = max(self.next_sequence, entry.sequence + 1)
            if entry.purpose == "train":
                self._groups.dispatched += 1
                self._executions.dispatched += len(entry.executions)
        self._entries[entry.group] = entry
        self._count(entry, 1)
        if entry.state == "live":
            self._live[entry.group] = entry
        else:
            self._live.pop(entry.group, None)

    def _count(self, entry: GroupEntry, by: int) -> None:
        if entry.purpose == "evaluate":
            self.evaluated += by * (entry.state == "evaluated")
            return
        if entry.state == "ready":
            (self._ready.add if by > 0 else self._ready.discard)(entry.group)
        if entry.state == "dropped":
            self._groups.dropped[entry.reason or LOST] += by
            self.replaceable += by * (entry.reason != SKIPPED)
        else:
            self._groups.states[entry.state] += by
        for execution in entry.executions:
            reason = entry.unscored.get(execution)
            if entry.state == "dropped":
                self._executions.dropped[reason or entry.reason or LOST] += by
            elif entry.state == "trained" and reason is not None:
                self._executions.dropped[reason] += by
            else:
                self._executions.states[entry.state] += by
        if entry.consumed_version is not None:
            self.trainer_version = max(self.trainer_version, entry.consumed_version + 1)
            if entry.state == "trained":
                self.distribution[entry.consumed_version - entry.admitted_version] += by

    def live(self) -> Iterable[GroupEntry]:
        """Groups that have not been scored, of both purposes."""
        return self._live.values()

    def ready(self) -> frozenset[str]:
        """Groups that wait for an update or are in the one under way."""
        return frozenset(self._ready)

    @property
    def unconsumed(self) -> int:
        """Train groups that are live or ready."""
        return self._groups.states["live"] + self._groups.states["ready"]

    @property
    def kept(self) -> int:
        """Train groups that updates have taken or will take."""
        return self._groups.dispatched - self.replaceable

    def groups_book(self) -> Book:
        return self._groups.book()

    def executions_book(self) -> Book:
        return self._executions.book()

    def recent_staleness(self, window: int) -> list[int]:
        """`d` of the `window` groups that were trained last, the last first."""
        trained = (
            (entry.consumed_version, entry.sequence, entry.consumed_version - entry.admitted_version)
            for entry in self._entries.values()
            if entry.state == "trained" and entry.consumed_version is not None
        )
        return [d for _, _, d in heapq.nlargest(window, trained)]


def predicted(dispatch: Dispatch) -> float:
    """`E[d] = phi + (mu - 1) / 2` in updates: equation 2 of the paper."""
    return dispatch.phi + (dispatch.mu - 1) / 2


def report(run: str, dispatch: Dispatch, ledger: Ledger, published: int) -> StalenessReport:
    """Predicted and measured staleness, and the books. The window is two bursts long."""
    window = 2 * dispatch.mu * dispatch.batch_groups
    recent = ledger.recent_staleness(window)
    spread = {d: count for d, count in sorted(ledger.distribution.items()) if count}
    total = sum(spread.values())
    return StalenessReport(
        run=run,
        phi=dispatch.phi,
        mu=dispatch.mu,
        predicted=predicted(dispatch),
        mean=sum(d * count for d, count in spread.items()) / total if total else None,
        maximum=max(spread, default=None),
        distribution=spread,
        window_mean=sum(recent) / len(recent) if recent else None,
        window=window,
        published_version=published,
        trainer_version=max(published, ledger.trainer_version, 0),
        groups=ledger.groups_book(),
        executions=ledger.executions_book(),
        evaluated_groups=ledger.evaluated,
    )
