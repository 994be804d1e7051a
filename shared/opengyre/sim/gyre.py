"""One run of the gyre on a virtual clock. Pure: no I/O; the same seed gives the same run.

Rollout: all live executions share the cells that serve (`Sharing`). Training: the work of ready executions, taken in
the order in which they became ready, flows over the cells that train. Admission and roles are the allocator's own
functions (`admission.room`, `policy.decide`), fed with what the allocator would see.

Invariants: the books balance at each step; the executions of an update are the next `B * G` in the order of readiness,
so an execution's staleness is known when it becomes ready; a cell that switches does nothing for `switch_h`.

Cost: O(log n) for an event. The policy looks at all cells, so it is asked once in `decide_every_h` at most: the whole
is O(events log events + hours / decide_every_h * cells).
"""

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from opengyre.elastic.admission import room
from opengyre.elastic.policy import decide
from opengyre.proto.decision import AdmissionInput, CellView, PolicyInput
from opengyre.proto.host import HostState
from opengyre.proto.run import Dispatch, Elastic
from opengyre.sim.sharing import Sharing
from opengyre.sim.workload import Workload

HOUR_S = 3600.0
MANY = 1 << 40
"""Tasks never run out."""
SLACK = 1e-9


class LawBrokenError(Exception):
    """A law of the design does not hold; the message says which."""


class StuckError(Exception):
    """Nothing can happen any more though the run is not finished; says what is waited for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated beside the workload; `dispatch` gets B and G from it."""

    dispatch: Dispatch
    elastic: Elastic
    updates: int = 12
    endless: bool = True
    """Groups are admitted beyond the last update, as in the middle of a longer run."""
    redundant: int = 0
    """Members that a group has above G: it closes at G, and those that are left are thrown away."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the timeline: from `hour` on, until the next."""

    hour: float
    serving: int
    training: int
    switching: int
    live: int
    ready: float
    version: int


@dataclass(slots=True)
class Outcome:
    hours: float = 0.0
    floor_h: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    """d -> executions that were trained."""
    stale_sums: list[int] = field(default_factory=list)
    """For each update, the sum of d over its executions."""
    switches: int = 0
    events: int = 0
    decisions: int = 0
    live_most: int = 0
    """The most executions that were live at once."""
    suspended_h: float = 0.0
    """Hours without a cell that serves while executions were live."""
    decide_s: list[float] = field(default_factory=list)
    """Processor seconds of each decision on this machine; only where it was asked for."""
    timeline: list[Moment] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    """Hour of each update."""

    @property
    def efficiency(self) -> float:
        """The floor over the hours that it took."""
        return self.floor_h / self.hours

    @property
    def staleness_mean(self) -> float:
        """Of executions."""
        return sum(d * count for d, count in self.staleness.items()) / self.staleness.total()

    def steady_staleness(self, from_update: int, executions: int) -> float:
        """Mean d of the executions of the updates from `from_update` on; `executions` are those of an update."""
        tail = self.stale_sums[from_update:]
        return sum(tail) / (len(tail) * executions)

    @property
    def staleness_max(self) -> int:
        return max(self.staleness)


@dataclass(slots=True)
class _Group:
    version: int
    left: int
    ended: int = 0


class Gyre:
    """A run under way; `run` is the way through it, `step` one event."""

    def __init__(
        self, workload: Workload, setting: Setting, seed: int, *, decide_every_h: float = 0.0, record: bool = True,
        clock: bool = False,
    ) -> None:  # fmt: skip
        """`record`: keep the timeline. `clock`: time each decision (the only look at a real clock)."""
        self.workload = workload
        self.updates = setting.updates
        self.endless = setting.endless
        self._redundant = setting.redundant
        self.elastic = setting.elastic
        dispatch = setting.dispatch
        self.dispatch = Dispatch(
            phi=dispatch.phi, mu=dispatch.mu, batch_groups=workload.batch_groups, group_size=workload.group_size,
            min_members=1, close_at=dispatch.close_at, continuous=dispatch.continuous, d_max=dispatch.d_max,
        )  # fmt: skip
        self.out = Outcome(floor_h=workload.floor_h(setting.updates), stale_sums=[0] * setting.updates)
        self.hour = 0.0
        self.version = self.published = 0
        self._record, self._clock, self._every = record, clock, decide_every_h
        self._decide_at = 0.0
        self._asked = True
        self._draws: Iterator[list[float]] = workload.groups(seed)
        self._calls = Sharing()
        self._groups: dict[int, _Group] = {}
        self._admitted = 0
        self._live_groups = 0
        self._oldest: deque[int] = deque()
        """Admitted versions, the first of which has executions that are not ready."""
        self._arrived = 0
        """Executions that have become ready since the start."""
        self._trained = 0.0
        """Executions' worth of training done since the start."""
        self._waiting: Counter[int] = Counter()
        """Admitted version -> executions that are not ready."""
        self._timers: list[tuple[float, int]] = []
        """When a cell arrives where it was sent, and its number."""
        self.views = [self._view(n, HostState.ROLLOUT, settled=True) for n in range(workload.cells)]
        self._numbers = {view.cell: number for number, view in enumerate(self.views)}
        self.serving, self.training = workload.cells, 0

    # What is so.

    @property
    def live(self) -> int:
        return len(self._calls)

    @property
    def unconsumed(self) -> int:
        """Executions that were admitted and are in no finished update."""
        return self._admitted * self.workload.group_size - self.version * self.workload.update_executions

    @property
    def ready(self) -> float:
        """Executions that the trainer may take now."""
        if self.elastic.stream:
            return self._arrived - self._trained
        size = self.workload.update_executions
        end = min(self.published + self.dispatch.mu, self.updates if not self.endless else math.inf) * size
        begun = self._trained > self.published * size + SLACK
        return min(self._arrived, end) - self._trained if begun or self._arrived >= end else 0.0

    def _view(self, number: int, state: HostState, *, settled: bool) -> CellView:
        name = f"c{number:05d}"
        role = "train" if state in (HostState.DRAINING, HostState.TRAIN) else "rollout"
        return CellView(
            cell=name, hosts=(name,), state=state, settled=settled, since_s=self.elastic.dwell_s if settled else 0.0,
            capacity=self.workload.capacity, running=0, role=role,
        )  # fmt: skip

    def balances(self) -> bool:
        """Law 2, for executions: every one that was admitted is live, waits for its group, or is ready or trained."""
        size = self.workload.group_size
        open_ = sum(min(group.ended, self.dispatch.closes_at) for group in self._groups.values() if self._open(group))
        return self._admitted * size == self.live + open_ + self._arrived

    def _open(self, group: _Group) -> bool:
        return group.ended < self.dispatch.closes_at

    # What happens.

    def run(self) -> Outcome:
        """To the last update. Raises `StuckError`."""
        self._admit()
        self._mark()
        while self.version < self.updates:
            self.step()
        self.out.hours = self.hour
        return self.out

    def step(self) -> None:
        """Decide if it is time, then go on to the next event."""
        self._decide()
        capacity = self.serving * self.workload.capacity
        ready = self.ready
        rate = self.training * self.workload.train_rate if ready > SLACK else 0.0
        size = self.workload.update_executions
        due = min(ready, (self.version + 1) * size - self._trained)
        hours = min(
            self._calls.next_end(capacity),
            due / rate if rate else math.inf,
            self._timers[0][0] - self.hour if self._timers else math.inf,
            max(0.0, self._decide_at - self.hour) if self._asked else math.inf,
        )
        if hours == math.inf:
            raise StuckError(
                f"hour {self.hour:.2f}, version {self.version}: {self.live} live, {ready:g} ready executions, "
                f"{self.serving} cells serve, {self.training} train"
            )
        self.out.events += 1
        self.hour += hours
        if self.live and not self.serving:
            self.out.suspended_h += hours
        ended = self._calls.advance(hours, capacity)
        if rate:
            self._trained += min(rate * hours, due)
        for group in ended:
            self._end(group)
        self._arrive()
        if self._trained >= (self.version + 1) * size - SLACK:
            self._commit()
        if ended or self.ready <= SLACK:
            self._asked = True
        self._mark()

    def _end(self, number: int) -> None:
        """A member has its score: it closes its group, or is late, or waits for the others."""
        group = self._groups[number]
        group.left -= 1
        group.ended += 1
        close_at = self.dispatch.closes_at
        if group.ended < close_at:
            return
        members = close_at if group.ended == close_at else 1
        if group.ended == close_at:
            self._live_groups -= 1
        size = self.workload.update_executions
        for _ in range(members):
            d = self._arrived // size - group.version
            if d < 0:
                raise LawBrokenError(f"staleness {d} is negative (law 4)")
            if self._arrived < self.updates * size:
                self.out.staleness[d] += 1
                self.out.stale_sums[self._arrived // size] += d
            self._arrived += 1
        self._waiting[group.version] -= members
        if group.ended == self.workload.group_size and group.left:
            self._calls.take_out(number, group.left)
            group.left = 0
        if not group.left:
            del self._groups[number]
        if self.dispatch.continuous is not None:
            self._admit()

    def _commit(self) -> None:
        self.version += 1
        self._trained = float(self.version * self.workload.update_executions)
        self.out.commits.append(self.hour)
        if self.version >= self.published + self.dispatch.mu:
            self.published = self.version
        self._admit()
        self._asked = True

    def _arrive(self) -> None:
        while self._timers and self._timers[0][0] <= self.hour + SLACK:
            number = heapq.heappop(self._timers)[1]
            train = self.views[number].state is HostState.DRAINING
            self.views[number] = self._view(number, HostState.TRAIN if train else HostState.ROLLOUT, settled=True)
            self.serving += not train
            self.training += train
            self._asked = True

    def _admit(self) -> None:
        groups = self._room()
        for _ in range(groups):
            durations = self._members()
            self._groups[self._admitted] = _Group(self.published, len(durations))
            for duration in durations:
                self._calls.add(duration, self._admitted)
            if self.published not in self._waiting:
                self._oldest.append(self.published)
            self._waiting[self.published] += self.workload.group_size
            self._admitted += 1
            self._live_groups += 1
        if groups:
            self._asked = True
            self.out.live_most = max(self.out.live_most, self.live)

    def _members(self) -> list[float]:
        durations = next(self._draws)
        return durations + next(self._draws)[: self._redundant] if self._redundant else durations

    def _room(self) -> int:
        size = self.workload.group_size
        while self._waiting and self._oldest and not self._waiting[self._oldest[0]]:
            del self._waiting[self._oldest.popleft()]
        return room(
            AdmissionInput(
                dispatch=self.dispatch,
                updates=None if self.endless else self.updates,
                state="active",
                finished=False,
                published=self.published,
                kept_executions=self._admitted * size,
                unconsumed_executions=self.unconsumed,
                live_groups=self._live_groups,
                oldest_version=self._oldest[0] if self._oldest else None,
                waiting=MANY,
                most=MANY,
            )
        )

    def _decide(self) -> None:
        if not self._asked or self.hour < self._decide_at - SLACK:
            return
        self._asked = False
        self._decide_at = self.hour + self._every
        size = self.workload.group_size
        given = PolicyInput(
            cells=tuple(self.views),
            live_executions=self.live,
            ready_groups=self.ready / size,
            dispatch=self.dispatch,
            elastic=self.elastic,
            switch_s=self.workload.switch_h * HOUR_S,
            train_s=size / self.workload.train_rate * HOUR_S,
        )
        began = time.thread_time() if self._clock else 0.0
        changes = decide(given)
        if self._clock:
            self.out.decide_s.append(time.thread_time() - began)
        self.out.decisions += 1
        for change in changes:
            self._switch(self._numbers[change.cell], change.role)

    def _switch(self, number: int, role: str) -> None:
        train = role == "train"
        self.serving -= train
        self.training -= not train
        self.out.switches += 1
        self.views[number] = self._view(number, HostState.DRAINING if train else HostState.JOINING, settled=False)
        heapq.heappush(self._timers, (self.hour + self.workload.switch_h, number))

    def _mark(self) -> None:
        if self._record:
            switching = self.workload.cells - self.serving - self.training
            self.out.timeline.append(
                Moment(self.hour, self.serving, self.training, switching, self.live, self.ready, self.version)
            )


def simulate(workload: Workload, setting: Setting, seed: int = 0, **options: float | bool) -> Outcome:
    """One run; `options` are those of `Gyre`."""
    return Gyre(workload, setting, seed, **options).run()  # type: ignore[arg-type]  # keywords of Gyre
