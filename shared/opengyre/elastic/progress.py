"""What the allocator knows of the run it leads, from its log: tasks, ledger, published version, work that waits. Pure.

`apply` takes every event of the run, in any order and any number of times, and returns the ledger entry that changed.
An execution is live until its log says that it ended, not until it is scored. Work that waits is what is ready and in
no contribution to the update under way; a new attempt at an update forgets the contributions to the old one. Without
streaming it waits only once its burst is complete.
"""

from collections.abc import Iterable

from opengyre.elastic.admission import TaskQueue, made_of, room
from opengyre.elastic.demand import Demand
from opengyre.elastic.entries import consumed, executions, scored
from opengyre.elastic.ledger import Ledger
from opengyre.proto.base import Event
from opengyre.proto.decision import AdmissionInput, CellView, GroupEntry, PolicyInput
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSubmitted
from opengyre.proto.traj import Ended, Started
from opengyre.proto.update import Committed, Contributed, Opened, RunFinished
from opengyre.proto.weights import WeightsPublished

MANY = 1 << 30
"""More groups than are ever admitted at once."""


class Progress:
    """One run's state. `spec` may be replaced while it goes on."""

    def __init__(self, spec: RunSpec, entries: Iterable[GroupEntry] = ()) -> None:
        self.spec = spec
        self.ledger = Ledger(entries)
        self.queue = TaskQueue(made_of(self.ledger))
        self.demand = Demand()
        self.published = -1
        self.run_finished = False
        self._ended: dict[str, set[str]] = {}
        """Group -> its executions that ended and of which the ledger does not know yet."""
        self._ended_live = 0
        """How many of these are of groups that we know."""
        self._begun: set[str] = set()
        """Executions that were started and have not ended."""
        self._contributed: set[str] = set()
        self._contributions: set[str] = set()
        self._committed: set[str] = set()
        """Of which the consumption was not heard of yet: that is told in another stream."""
        self._attempt: tuple[int, str] | None = None
        self._tokens: dict[int, tuple[int, int]] = {}
        """Update -> staleness of its tokens in sum, and how many they are."""

    @property
    def finished(self) -> bool:
        return self.run_finished or self.spec.state != "active"

    def apply(self, event: Event) -> GroupEntry | None:
        """Take an event; return the ledger entry if it changed.

        Raises `LookupError` for a group that is not in the ledger, `LawBrokenError` when a law does not hold.
        """
        match event:
            case TaskSubmitted():
                self.queue.submit(event.spec)
            case GroupScored():
                return self._rise(event.group, scored(self._entry(event.group), event))
            case GroupConsumed():
                return self._rise(event.group, consumed(self._entry(event.group), event))
            case WeightsPublished():
                self.published = max(self.published, event.manifest.version)
            case Started():
                self._begin(event)
            case Ended():
                self._end(event)
            case Opened() | Contributed() | Committed():
                self._take_update(event)
            case RunFinished():
                self.run_finished = True
            case _:
                pass
        return None

    def adopt(self, entry: GroupEntry) -> None:
        """A group that another leader made, or one that was just made or marked."""
        self._put(entry)

    def _entry(self, group: str) -> GroupEntry:
        entry = self.ledger.get(group)
        if entry is None:
            raise LookupError(group)
        return entry

    def _rise(self, group: str, after: GroupEntry) -> GroupEntry | None:
        if after == self.ledger.get(group):
            return None
        self._put(after)
        self._committed -= after.trained.keys() | after.dropped.keys()
        return after

    def _begin(self, event: Started) -> None:
        entry = self.ledger.get(event.group)
        if event.execution in self._ended.get(event.group, ()):
            return
        if entry is None or event.execution in live_of(entry):
            self._begun.add(event.execution)

    def _end(self, event: Ended) -> None:
        self._begun.discard(event.execution)
        entry = self.ledger.get(event.group)
        if entry is not None and event.execution not in live_of(entry):
            return
        ended = self._ended.setdefault(event.group, set())
        if event.execution not in ended:
            ended.add(event.execution)
            self._ended_live += entry is not None

    def _put(self, entry: GroupEntry) -> None:
        """Into the ledger; what it knows of executions that ended is not remembered beside it."""
        ended = self._ended.pop(entry.group, None)
        if ended is not None:
            known = self.ledger.get(entry.group) is not None
            left = ended & live_of(entry)
            self._ended_live += len(left) - len(ended) * known
            if left:
                self._ended[entry.group] = left
        if not self._begun.isdisjoint(entry.executions):
            self._begun -= set(entry.executions) - live_of(entry)
        self.ledger.put(entry)

    def _take_update(self, event: Opened | Contributed | Committed) -> None:
        attempt = (event.update, event.attempt)
        if isinstance(event, Committed):
            self._tokens[event.update] = (event.stats.token_staleness_sum, event.stats.tokens)
            self._committed.update(event.executions or self._executions_of(event.groups))
            self._committed &= self.ledger.ready_executions
        elif isinstance(event, Opened):
            if attempt != self._attempt:
                self._attempt = attempt
                self._contributed.clear()
                self._contributions.clear()
        elif attempt == self._attempt and event.contribution not in self._contributions:
            self._contributions.add(event.contribution)
            self._contributed.update(event.executions or self._executions_of(event.groups))
            self.demand.trained(event.stats)

    def _executions_of(self, groups: Iterable[str]) -> list[str]:
        entries = (self.ledger.get(group) for group in groups)
        return [name for entry in entries if entry is not None for name in entry.executions]

    @property
    def live_executions(self) -> int:
        """Executions that were dispatched and have not ended, of both purposes."""
        return self.ledger.live_executions - self._ended_live

    @property
    def begun_executions(self) -> int:
        """Of the live executions, those that were started: the others will need the engines as soon as they are."""
        return min(len(self._begun), self.live_executions)

    @property
    def waiting_groups(self) -> float:
        """What the trainer may take now and no contribution to the update under way holds, in groups."""
        ready, size = self.ledger.ready_executions, self.spec.dispatch.group_size
        held = sum(name in ready for name in self._contributed) + sum(
            name in ready for name in self._committed - self._contributed
        )
        waiting = len(ready) - held
        if not self.spec.elastic.stream and waiting > 0:
            # Places of executions without a score are no work, and make a burst complete all the same.
            lacking = self._burst_left
            waiting = lacking - held if len(ready) + self.ledger.ready_unscored >= lacking else 0
        return max(0, waiting) / size

    @property
    def _burst_left(self) -> int:
        """Executions that the updates up to the next publication take yet."""
        last = max(self.published, 0) + self.spec.dispatch.mu
        if self.spec.updates is not None:
            last = min(last, self.spec.updates)
        return max(0, last * self.spec.dispatch.update_executions - self.ledger.taken)

    @property
    def by_token_mean(self) -> float | None:
        """Mean staleness of the tokens that were trained since the run's log begins."""
        tokens = sum(count for _, count in self._tokens.values())
        return sum(stale for stale, _ in self._tokens.values()) / tokens if tokens else None

    @property
    def room(self) -> int:
        """Train groups that may be admitted now."""
        return room(self.admission(MANY))

    def admission(self, most: int) -> AdmissionInput:
        """What an admission of `most` train groups at most is decided on."""
        spec, ledger = self.spec, self.ledger
        return AdmissionInput(
            dispatch=spec.dispatch,
            updates=spec.updates,
            state=spec.state,
            finished=self.run_finished,
            published=self.published,
            kept_executions=ledger.kept_executions,
            unconsumed_executions=ledger.unconsumed_executions,
            live_groups=ledger.live_groups,
            oldest_version=ledger.oldest_version,
            stream=spec.elastic.stream,
            waiting=MANY,
            most=most,
        )

    def policy_input(self, cells: tuple[CellView, ...], switch_s: float | None = None) -> PolicyInput:
        """`switch_s`: as it was measured; without it, as it is set."""
        live, elastic = self.live_executions, self.spec.elastic
        return PolicyInput(
            cells=cells,
            live_executions=live,
            ready_groups=self.waiting_groups,
            dispatch=self.spec.dispatch,
            elastic=elastic,
            finished=self.finished,
            demand_calls=self.demand.calls(live, self.begun_executions),
            switch_s=elastic.switch_s if switch_s is None else switch_s,
            train_s=self.demand.train_s(self.spec.dispatch.group_size),
        )

    def waits_for(self) -> str | None:
        """What has to happen before anything is admitted again, as a sentence; None when nothing is awaited."""
        run, ledger = self.spec.run, self.ledger
        if self.finished:
            return None
        if self.published < 0:
            return f"the first weights of run {run}"
        if self.room > 0:
            return f"tasks for run {run}: {self.room} groups could be admitted"
        if self.spec.dispatch.continuous is not None and ledger.live_groups >= self.spec.dispatch.continuous:
            return f"one of {ledger.live_groups} open groups of run {run} to close"
        if ledger.unconsumed:
            return f"the next version of run {run} after {self.published}: {ledger.unconsumed} groups are unconsumed"
        return f"the last update of run {run}"


def live_of(entry: GroupEntry) -> set[str]:
    """Executions of which the entry says nothing."""
    if entry.purpose == "evaluate":
        return set(entry.executions) if entry.state == "live" else set()
    return {execution.name for execution in executions(entry) if execution.state == "live"}
