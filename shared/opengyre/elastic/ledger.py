"""The staleness ledger of one run: its groups and executions, the books of law 2 and the staleness of law 5. Pure.

An execution goes live -> ready -> trained, or to dropped; a group is live until it closes, then ready, and trained once
an update took one of its executions, or dropped or evaluated. What was said of an execution is kept in its group's
entry (`entries`), and all states follow from that; events may come twice and in any order, every order gives the same.

Invariants: sequences are 0, 1, 2, ... without gaps (the next group is `next_sequence`); `d = v_t - v_d >= 0`; an
execution is trained at one version only. The books are counted as entries come and change, `dispatched` apart from the
others, so that `balances` is a check and not a definition.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from opengyre.elastic.entries import LOST, SKIPPED, ExecutionState, LawBrokenError, consumed, last_version, scored
from opengyre.elastic.entries import executions as states_of
from opengyre.proto.decision import Book, Discards, GroupEntry, StalenessReport
from opengyre.proto.run import Dispatch

__all__ = ["LOST", "SKIPPED", "LawBrokenError", "Ledger", "consumed", "predicted", "report", "scored"]


class _Tally:
    """One side of the books: groups, or executions."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.states: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def count(self, state: str, reason: str | None, by: int) -> None:
        if state == "dropped":
            self.dropped[reason or LOST] += by
        else:
            self.states[state] += by

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


class _Lengths:
    """Tokens of executions that were measured."""

    def __init__(self) -> None:
        self.tokens = 0
        self.measured = 0

    def count(self, tokens: int | None, by: int) -> None:
        if tokens is not None:
            self.tokens += by * tokens
            self.measured += by

    @property
    def mean(self) -> float | None:
        return self.tokens / self.measured if self.measured else None


class Ledger:
    """All groups of one run."""

    def __init__(self, entries: Iterable[GroupEntry] = ()) -> None:
        self._entries: dict[str, GroupEntry] = {}
        self._groups = _Tally()
        self._executions = _Tally()
        self._live: dict[str, GroupEntry] = {}
        self._unfinished: dict[str, None] = {}
        self._open: Counter[int] = Counter()
        """Admission version -> executions that no update took and that were not dropped."""
        self._lengths = _Lengths()
        self._discards: dict[str, _Lengths] = {}
        self.ready_executions: set[str] = set()
        """Executions that wait for an update or are in the one under way, and have a score."""
        self.ready_unscored = 0
        """Executions that wait for an update, and are no work."""
        self.distribution: Counter[int] = Counter()
        """d -> groups."""
        self.by_execution: Counter[int] = Counter()
        """d -> trained executions."""
        self.next_sequence = 0
        self.evaluated = 0
        self.live_executions = 0
        """Executions of both purposes of which nothing was said."""
        self.replaceable = 0
        """Executions that were dropped and took no place in an update: others may be admitted for them."""
        self.taken = 0
        """Executions that took a place in a committed update."""
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
        live = self.live_executions
        self._count(entry, 1)
        if self.live_executions > live:
            self._unfinished[entry.group] = None
        else:
            self._unfinished.pop(entry.group, None)
        if entry.state == "live":
            self._live[entry.group] = entry
        else:
            self._live.pop(entry.group, None)

    def _count(self, entry: GroupEntry, by: int) -> None:
        if entry.purpose == "evaluate":
            self.evaluated += by * (entry.state == "evaluated")
            self.live_executions += by * len(entry.executions) * (entry.state == "live")
            return
        self._groups.count(entry.state, entry.reason, by)
        for execution in states_of(entry):
            self._count_execution(entry, execution, by)
        if entry.consumed_version is not None:
            self.trainer_version = max(self.trainer_version, last_version(entry) + 1)
            if entry.state == "trained":
                self.distribution[entry.consumed_version - entry.admitted_version] += by

    def _count_execution(self, entry: GroupEntry, execution: ExecutionState, by: int) -> None:
        name, state = execution.name, execution.state
        self._executions.count(state, execution.reason, by)
        tokens = entry.tokens.get(name)
        if state in ("live", "ready"):
            self._open[entry.admitted_version] += by
            if not self._open[entry.admitted_version]:
                del self._open[entry.admitted_version]
        if state == "live":
            self.live_executions += by
        elif state == "ready" and execution.scored:
            (self.ready_executions.add if by > 0 else self.ready_executions.discard)(name)
        elif state == "ready":
            self.ready_unscored += by
        elif state == "trained":
            assert execution.version is not None
            self.by_execution[execution.version - entry.admitted_version] += by
            self._lengths.count(tokens, by)
        else:
            self._discards.setdefault(execution.reason or LOST, _Lengths()).count(tokens, by)
            self.replaceable += by * (not execution.took_place)
        self.taken += by * execution.took_place

    def live(self) -> Iterable[GroupEntry]:
        """Groups that have not closed, of both purposes."""
        return self._live.values()

    def unfinished(self) -> Iterable[str]:
        """Groups of which an execution is live, of both purposes."""
        return tuple(self._unfinished)

    @property
    def live_groups(self) -> int:
        """Train groups that have not closed."""
        return self._groups.states["live"]

    @property
    def unconsumed(self) -> int:
        """Train groups that are live or ready."""
        return self._groups.states["live"] + self._groups.states["ready"]

    @property
    def unconsumed_executions(self) -> int:
        """Executions of train groups that are live or ready."""
        return self._executions.states["live"] + self._executions.states["ready"]

    @property
    def kept_executions(self) -> int:
        """Executions of train groups that updates have taken or will take."""
        return self._executions.dispatched - self.replaceable

    @property
    def oldest_version(self) -> int | None:
        """`v_d` of the oldest unconsumed execution."""
        return min(self._open, default=None)

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

    def recent_executions(self, window: int) -> list[int]:
        """`d` of the `window` executions that were trained last, the last first."""
        trained = (
            (version, entry.sequence, version - entry.admitted_version)
            for entry in self._entries.values()
            if entry.purpose == "train"
            for name, version in entry.trained.items()
            if name not in entry.unscored
        )
        return [d for _, _, d in heapq.nlargest(window, trained)]

    def discards(self) -> dict[str, Discards]:
        """Reason -> executions that were dropped for it, and how long they were."""
        return {
            reason: Discards(executions=self._executions.dropped[reason], mean_tokens=lengths.mean)
            for reason, lengths in sorted(self._discards.items())
            if self._executions.dropped[reason]
        }

    @property
    def trained_mean_tokens(self) -> float | None:
        return self._lengths.mean


def predicted(dispatch: Dispatch) -> float:
    """`E[d] = phi + (mu - 1) / 2` in updates: equation 2 of the paper."""
    return dispatch.phi + (dispatch.mu - 1) / 2


def mean_of(spread: Counter[int] | dict[int, int]) -> float | None:
    """Mean of a distribution."""
    total = sum(spread.values())
    return sum(d * count for d, count in spread.items()) / total if total else None


def report(
    run: str, dispatch: Dispatch, ledger: Ledger, published: int, by_token_mean: float | None = None
) -> StalenessReport:
    """Predicted and measured staleness, and the books. The window is two bursts long."""
    window = 2 * dispatch.mu * dispatch.batch_groups
    recent = ledger.recent_staleness(window)
    recent_executions = ledger.recent_executions(window * dispatch.group_size)
    spread = {d: count for d, count in sorted(ledger.distribution.items()) if count}
    by_execution = {d: count for d, count in sorted(ledger.by_execution.items()) if count}
    return StalenessReport(
        run=run,
        phi=dispatch.phi,
        mu=dispatch.mu,
        predicted=predicted(dispatch),
        mean=mean_of(spread),
        maximum=max(spread, default=None),
        distribution=spread,
        window_mean=sum(recent) / len(recent) if recent else None,
        window=window,
        published_version=published,
        trainer_version=max(published, ledger.trainer_version, 0),
        groups=ledger.groups_book(),
        executions=ledger.executions_book(),
        evaluated_groups=ledger.evaluated,
        by_execution_mean=mean_of(by_execution),
        by_execution_maximum=max(by_execution, default=None),
        by_execution=by_execution,
        by_execution_window_mean=sum(recent_executions) / len(recent_executions) if recent_executions else None,
        by_token_mean=by_token_mean,
        trained_mean_tokens=ledger.trained_mean_tokens,
        discards=ledger.discards(),
    )
