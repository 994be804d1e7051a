"""What the allocator knows of the run it leads, from its log: tasks, ledger, published version, work that waits. Pure.

`apply` takes every event of the run, in any order and any number of times, and returns the ledger entry that changed.
Demand is measured: an execution is live until its log says that it ended, not until its group is scored. Work that
waits is what is ready and in no contribution to the update under way; a new attempt at an update forgets the
contributions to the old one.
"""

from collections.abc import Iterable

from opengyre.elastic.admission import TaskQueue, made_of, room
from opengyre.elastic.ledger import Ledger, consumed, scored
from opengyre.proto.base import Event
from opengyre.proto.decision import CellView, GroupEntry, PolicyInput
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSubmitted
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed, Contributed, Opened, RunFinished
from opengyre.proto.weights import WeightsPublished


class Progress:
    """One run's state. `spec` may be replaced while it goes on."""

    def __init__(self, spec: RunSpec, entries: Iterable[GroupEntry] = ()) -> None:
        self.spec = spec
        self.ledger = Ledger(entries)
        self.queue = TaskQueue(made_of(self.ledger))
        self.published = -1
        self.run_finished = False
        self._ended: dict[str, set[str]] = {}
        self._contributed: set[str] = set()
        self._committed: set[str] = set()
        """Of which the consumption was not heard of yet: that is told in another stream."""
        self._attempt: tuple[int, str] | None = None

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
            case Ended():
                entry = self.ledger.get(event.group)
                if entry is None or entry.state == "live":
                    self._ended.setdefault(event.group, set()).add(event.execution)
            case Opened() | Contributed() | Committed():
                self._take_update(event)
            case RunFinished():
                self.run_finished = True
            case _:
                pass
        return None

    def adopt(self, entry: GroupEntry) -> None:
        """A group that another leader made, or one that was just made or marked."""
        self.ledger.put(entry)

    def _entry(self, group: str) -> GroupEntry:
        entry = self.ledger.get(group)
        if entry is None:
            raise LookupError(group)
        return entry

    def _rise(self, group: str, after: GroupEntry) -> GroupEntry | None:
        if after == self.ledger.get(group):
            return None
        self.ledger.put(after)
        if after.state != "live":
            self._ended.pop(group, None)
        if after.consumed_version is not None:
            self._committed.discard(group)
        return after

    def _take_update(self, event: Opened | Contributed | Committed) -> None:
        attempt = (event.update, event.attempt)
        if isinstance(event, Committed):
            self._committed.update(event.groups)
            self._committed &= self.ledger.ready()
        elif isinstance(event, Opened):
            if attempt != self._attempt:
                self._attempt = attempt
                self._contributed.clear()
        elif attempt == self._attempt:
            self._contributed.update(event.groups)

    @property
    def live_executions(self) -> int:
        """Executions that were dispatched and have not ended, of both purposes."""
        return sum(len(entry.executions) - len(self._ended.get(entry.group, ())) for entry in self.ledger.live())

    @property
    def waiting_groups(self) -> int:
        """Ready groups that no contribution to the update under way holds."""
        return len(self.ledger.ready() - self._contributed - self._committed)

    @property
    def room(self) -> int:
        """Train groups that may be admitted now."""
        if self.run_finished:
            return 0
        return room(self.spec, published=self.published, kept=self.ledger.kept, unconsumed=self.ledger.unconsumed)

    def policy_input(self, cells: tuple[CellView, ...]) -> PolicyInput:
        return PolicyInput(
            cells=cells,
            live_executions=self.live_executions,
            ready_groups=self.waiting_groups,
            dispatch=self.spec.dispatch,
            elastic=self.spec.elastic,
            finished=self.finished,
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
        if ledger.unconsumed:
            return f"the next version of run {run} after {self.published}: {ledger.unconsumed} groups are unconsumed"
        return f"the last update of run {run}"
