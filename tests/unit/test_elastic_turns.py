"""The gyre in miniature, without clocks or I/O: admission, ledger, cells and policy together never come to a stop.

Hosts serve, drain, train and join as real ones do. Executions end one by one, groups close at `close_at`, late members
train late; the trainer fills updates with executions in order of arrival and gives them out `grain` at a time; a cell
hands over when the update is full or when it leaves; heartbeats come every other tick.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opengyre.allocator.cells import Clocks, gather
from opengyre.elastic.admission import new_entry
from opengyre.elastic.policy import decide, suspends
from opengyre.elastic.progress import Progress
from opengyre.proto.host import DesiredRole, HostState, HostStatus
from opengyre.proto.ids import group_of
from opengyre.proto.run import Dispatch, Elastic, RunSpec, validate
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSpec, TaskSubmitted
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed, Contributed, Opened, RunFinished, UpdateStats
from opengyre.proto.weights import Manifest, WeightsPublished

S = HostState
TICK_S = 0.25


@dataclass
class Host:
    name: str
    capacity: int
    switch: int
    state: HostState = S.ROLLOUT
    role: str = "rollout"
    epoch: int = 0
    left: int = 0
    """Ticks until the switch or the work at hand is done."""
    work: tuple[str, ...] = ()
    held: list[str] = field(default_factory=list)
    heard: HostStatus | None = None
    last_switch_s: float | None = None
    down: int = 0
    """Ticks until a killed process is there again."""


@dataclass
class Group:
    version: int
    open: bool = True
    dropped: bool = False
    ended: list[str] = field(default_factory=list)


@dataclass
class World:
    progress: Progress
    hosts: list[Host]
    work: int
    train: int
    infra: int = 0
    """Every so manyth execution has no score; 0: each has one."""
    change: tuple[int, float, int] | None = None
    """At this version phi and mu become these."""
    operations: list[tuple[int, int, str]] = field(default_factory=list)
    """Tick, host and what an operator, or a `kill -9`, does to it; in order."""
    now: int = 0
    version: int = 0
    published: int = 0
    unserved: int = 0
    """How often the last cell that served was sent away from live episodes."""
    suspended: bool = False
    """As the last decision says."""
    stale: int = 0
    todo: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    stock: deque[tuple[str, ...]] = field(default_factory=deque)
    """Messages that the trainer has, with what no update took of them yet."""
    update: list[tuple[str, ...]] = field(default_factory=list)
    """What the update under way holds, by message."""
    leased: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    places: Counter[str] = field(default_factory=Counter)
    """Execution -> updates that took it."""
    worst: int = 0
    levels: dict[str, DesiredRole] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def dispatch(self) -> Dispatch:
        return self.progress.spec.dispatch

    def tick(self) -> None:
        self.now += 1
        self.admit()
        self.serve()
        self.fill()
        while self.operations and self.operations[0][0] <= self.now:
            _, number, what = self.operations.pop(0)
            self.operate(self.hosts[number % len(self.hosts)], what)
        for host in self.hosts:
            self.turn(host)
        self.commit()
        self.command()
        ledger = self.progress.ledger
        for book in (ledger.groups_book(), ledger.executions_book()):
            assert book.balances
        assert self.progress.live_executions == len(self.todo)

    def scored(self, execution: str) -> bool:
        return not self.infra or sum(map(ord, execution)) % self.infra != 0

    def admit(self) -> None:
        for spec in self.progress.queue.take("train", self.progress.room):
            sequence = self.progress.ledger.next_sequence
            entry = new_entry(self.progress.spec, spec, sequence, self.progress.published)
            self.progress.adopt(entry)
            self.groups[entry.group] = Group(entry.admitted_version)
            # Members of a group take different times, as they do.
            self.todo |= {name: self.work * (1 + (sequence + n) % 3) for n, name in enumerate(entry.executions)}

    def serve(self) -> None:
        room = sum(host.capacity for host in self.hosts if host.state is S.ROLLOUT)
        for execution in list(self.todo)[:room]:
            self.todo[execution] -= 1
            if self.todo[execution] == 0:
                del self.todo[execution]
                self.end(execution)

    def end(self, execution: str) -> None:
        name = group_of(execution)
        self.progress.apply(
            Ended(
                run="r", group=name, execution=execution, index=0, attempt=0, reason="done", turns=1,
                sampled_tokens=1, duration_s=1, members=(),
            )
        )  # fmt: skip
        group = self.groups[name]
        group.ended.append(execution)
        scored = sum(map(self.scored, group.ended))
        whole = len(group.ended) == self.dispatch.group_size
        if not group.open:
            self.close(name, (execution,), late=True)
        elif scored >= self.dispatch.closes_at or whole:
            group.open, group.dropped = False, scored == 0
            self.close(name, tuple(group.ended), late=False)

    def close(self, group: str, executions: tuple[str, ...], *, late: bool) -> None:
        dropped = self.groups[group].dropped
        unscored = {name: "infra" for name in executions if not self.scored(name)}
        self.progress.apply(
            GroupScored(
                run="r", task="t", group=group, outcome="dropped" if dropped else "ready", reason=None, scores={},
                unscored=unscored, sampled_version_min=0, sampled_version_max=0, tokens=1, executions=executions,
                late=late, tokens_by=dict.fromkeys(executions, 3),
            )
        )  # fmt: skip
        if not dropped:
            self.stock.append(executions)

    def taken(self) -> int:
        return sum(map(len, self.update))

    def fill(self) -> None:
        """The trainer takes what is ready: in order, and without streaming only of a burst that is complete."""
        size = self.dispatch.update_executions
        if self.progress.finished:
            return
        self.drop_stale()
        updates = self.progress.spec.updates
        assert updates is not None
        burst = min(self.published + self.dispatch.mu, updates) - self.version
        there = self.taken() + sum(map(len, self.stock))
        if not self.progress.spec.elastic.stream and not self.update and there < burst * size:
            return
        while self.stock and self.taken() < size:
            first = self.stock.popleft()
            free = size - self.taken()
            self.update.append(first[:free])
            if first[free:]:
                self.stock.appendleft(first[free:])

    def drop_stale(self) -> None:
        if self.dispatch.d_max is None:
            return
        for message in list(self.stock):
            group = group_of(message[0])
            if self.version - self.groups[group].version > self.dispatch.d_max:
                self.stock.remove(message)
                self.stale += 1
                self.consume(group, message, "dropped", "stale")

    def consume(self, group: str, executions: tuple[str, ...], outcome: Any, reason: str | None = None) -> None:
        self.places.update(executions)
        self.progress.apply(
            GroupConsumed(
                run="r", task="t", group=group, outcome=outcome, reason=reason, version=self.version,
                executions=executions,
            )
        )  # fmt: skip

    def operate(self, host: Host, what: str) -> None:
        """What a person or a fault does to a host."""
        if what == "kill":
            # What it held is leased again; its episodes' calls go on elsewhere.
            self.leased -= {*host.held, *host.work}
            host.held, host.work, host.heard, host.down = [], (), None, 4
            there = {"train": S.TRAIN, "cordoned": S.CORDONED, "rollout": S.JOINING}
            host.state, host.left = there[host.role], host.switch
            return
        wishes: dict[str, tuple[Any, Any]] = {
            "drain": ("train", "train"), "cordon": ("cordoned", "cordoned"), "resume": ("rollout", None),
        }  # fmt: skip
        host.role, wish = wishes[what]
        host.epoch += 1
        self.levels[host.name] = DesiredRole(
            host=host.name, role=wishes[what][0], epoch=host.epoch, cell=host.name, wish=wish
        )

    def turn(self, host: Host) -> None:
        if host.down:
            host.down -= 1
            return
        host.left = max(0, host.left - 1)
        before = host.state
        if host.state in (S.ROLLOUT, S.JOINING) and host.role != "rollout":
            host.state, host.left = S.DRAINING, host.switch
        elif host.state is S.DRAINING and host.left == 0:
            host.state = S.CORDONED if host.role == "cordoned" else S.TRAIN
            host.last_switch_s = host.switch * TICK_S
        elif host.state is S.CORDONED and host.role != "cordoned":
            host.state, host.left = (S.JOINING, host.switch) if host.role == "rollout" else (S.TRAIN, 0)
        elif host.state is S.TRAIN and host.left == 0:
            host.held += host.work
            host.work = ()
            if host.role == "rollout":
                self.hand_over(host)
                host.state, host.left = S.JOINING, host.switch
            elif host.role == "cordoned":
                self.hand_over(host)
                host.state = S.CORDONED
            else:
                self.pull(host)
        elif host.state is S.JOINING and host.left == 0:
            host.state, host.last_switch_s = S.ROLLOUT, host.switch * TICK_S
        if host.state is not before or self.now % 2 == 0 or host.heard is None:
            running = min(host.capacity, len(self.todo)) if host.state is S.ROLLOUT else 0
            host.heard = HostStatus(
                host=host.name, cell=host.name, boot="b", state=host.state, epoch=host.epoch, url="u", engine="tiny",
                capacity=host.capacity, training_group=host.work[0] if host.work else None, since_s=self.now * TICK_S,
                running=running, last_switch_s=host.last_switch_s,
            )  # fmt: skip

    def pull(self, host: Host) -> None:
        grain = self.progress.spec.elastic.grain or self.dispatch.group_size
        for message in self.update:
            free = tuple(name for name in message if name not in self.leased and self.scored(name))[:grain]
            if free:
                host.work = free
                host.left = max(1, round(self.train * len(free) / self.dispatch.group_size))
                self.leased |= set(free)
                return
        if self.taken() == self.dispatch.update_executions:
            self.hand_over(host)

    def hand_over(self, host: Host) -> None:
        if host.held:
            self.handed |= set(host.held)
            groups = tuple(sorted({group_of(name) for name in host.held}))
            self.progress.apply(
                Contributed(
                    run="r", update=self.version + 1, attempt="a", host=host.name, contribution=host.held[0],
                    groups=groups, gradient="g", executions=tuple(host.held),
                    stats=UpdateStats(executions=len(host.held), busy_s=self.train * TICK_S),
                )
            )  # fmt: skip
            host.held = []

    def commit(self) -> None:
        spec = self.progress.spec
        inside = [name for message in self.update for name in message]
        if len(inside) < self.dispatch.update_executions or not {n for n in inside if self.scored(n)} <= self.handed:
            return
        self.progress.apply(
            Committed(
                run="r", update=self.version + 1, attempt="a", version=self.version + 1, published=False,
                groups=tuple({group_of(name): None for name in inside}), staleness=(), score=0, gradient_norm=0,
                executions=tuple(filter(self.scored, inside)), stats=UpdateStats(),
            )
        )  # fmt: skip
        for message in self.update:
            group = group_of(message[0])
            self.worst = max(self.worst, self.version - self.groups[group].version)
            self.consume(group, message, "trained")
        self.version += 1
        self.update, self.handed, self.leased = [], set(), set()
        if self.change is not None and self.version == self.change[0]:
            self.alter(*self.change[1:])
        if self.version == spec.updates:
            self.progress.apply(RunFinished(run="r", update=self.version, version=self.version))
            return
        self.progress.apply(Opened(run="r", update=self.version + 1, attempt="a", groups=spec.dispatch.batch_groups))
        if self.version - self.published >= self.dispatch.mu:
            self.published = self.version
            self.progress.apply(published(self.version))

    def alter(self, phi: float, mu: int) -> None:
        """A person changes the setting of the live run."""
        spec = self.progress.spec
        changed = msgspec.structs.replace(spec, dispatch=msgspec.structs.replace(spec.dispatch, phi=phi, mu=mu))
        self.progress.spec = validate(changed)

    def command(self) -> None:
        cells = gather({host.name: host.heard for host in self.hosts if host.heard}, self.levels)
        views = self.clocks.views(cells, self.now * TICK_S)
        self.progress.demand.observe(views, self.progress.live_executions, self.now * TICK_S)
        switches = [host.last_switch_s for host in self.hosts if host.last_switch_s is not None]
        given = self.progress.policy_input(views, sum(switches) / len(switches) if switches else None)
        changes = decide(given)
        self.suspended = suspends(given, changes)
        for change in changes:
            host = next(host for host in self.hosts if host.name == change.cell)
            host.epoch += 1
            host.role = change.role
            self.levels[host.name] = DesiredRole(host=host.name, role=change.role, epoch=host.epoch, cell=host.name)
        left = any(host.state is S.ROLLOUT and host.role == "rollout" for host in self.hosts)
        if given.live_executions and not left and any(change.role == "train" for change in changes):
            self.unserved += 1


def published(version: int) -> WeightsPublished:
    manifest = Manifest(run="r", version=version, parent=None, step=version, directory="d", files=())
    return WeightsPublished(run="r", manifest=manifest)


def world(hosts: int, capacity: int, dispatch: Dispatch, elastic: Elastic, **costs: Any) -> World:
    updates = 3 * dispatch.mu
    spec = validate(RunSpec(run="r", model="m", updates=updates, elastic=elastic, dispatch=dispatch))
    progress = Progress(spec)
    task = TaskSpec(task="t", instruction="x", repeat=1000 * updates)
    progress.apply(TaskSubmitted(run="r", task="t", spec=task))
    progress.apply(published(0))
    progress.apply(Opened(run="r", update=1, attempt="a", groups=dispatch.batch_groups))
    switch = costs.pop("switch")
    return World(progress, [Host(f"h{n}", capacity, switch) for n in range(hosts)], **costs)


@st.composite
def dispatches(draw: st.DrawFn) -> Dispatch:
    size, mu = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bound = draw(st.one_of(st.none(), st.integers(mu - 1, mu + 2)))
    return Dispatch(
        phi=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        mu=mu,
        batch_groups=draw(st.sampled_from([2, 4, 6])),
        group_size=size,
        min_members=1,
        close_at=draw(st.one_of(st.none(), st.integers(1, size))),
        continuous=draw(st.one_of(st.none(), st.none(), st.integers(1, 8))),
        d_max=bound,
        on_stale=draw(st.sampled_from(["wait", "drop"])),
    )


def _fitting(elastic: Elastic) -> Elastic:
    """What a gateway takes: those that stand alone are at least the floor of the rollout role."""
    return msgspec.structs.replace(elastic, standalone_cells=max(elastic.standalone_cells, elastic.min_rollout_cells))


ELASTIC = st.builds(
    Elastic,
    policy=st.sampled_from(["fine", "static", "global", "coarse"]),
    stream=st.booleans(),
    train_cells=st.integers(1, 4),
    standalone_cells=st.integers(1, 2),
    min_rollout_cells=st.integers(0, 4),
    dwell_s=st.sampled_from([0.0, 0.5, 1.0]),
    gate=st.sampled_from([0.0, 2.0]),
).map(_fitting)


def small(phi: float, mu: int, batch: int, size: int, **fields: Any) -> Dispatch:
    return Dispatch(phi=phi, mu=mu, batch_groups=batch, group_size=size, min_members=1, **fields)


@given(
    hosts=st.integers(1, 4),
    capacity=st.integers(1, 8),
    dispatch=dispatches(),
    elastic=ELASTIC,
    grain=st.one_of(st.none(), st.integers(1, 4)),
    work=st.integers(1, 5),
    train=st.integers(1, 6),
    switch=st.integers(0, 8),
    infra=st.sampled_from([0, 0, 3, 5]),
    change=st.one_of(st.none(), st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.5, 2.0]), st.integers(1, 4))),
)
@settings(max_examples=200, deadline=None)
@example(1, 2, small(0.0, 1, 6, 2), Elastic(), None, 2, 1, 1, 0, None)
@example(2, 2, small(0.5, 2, 4, 2), Elastic(), None, 2, 1, 1, 0, None)
@example(2, 2, small(0.0, 2, 2, 2), Elastic(dwell_s=0.0), None, 2, 6, 6, 0, None)
# Was called back before it asked for work, for ever.
@example(1, 1, small(0.0, 2, 2, 2), Elastic(dwell_s=0.0), None, 2, 1, 8, 0, None)
def test_every_run_comes_to_its_end(
    hosts: int, capacity: int, dispatch: Dispatch, elastic: Elastic, grain: int | None, work: int, train: int,
    switch: int, infra: int, change: tuple[int, float, int] | None,
) -> None:  # fmt: skip
    if grain is not None:
        elastic = msgspec.structs.replace(elastic, grain=min(grain, dispatch.group_size))
    if change is not None and dispatch.d_max is not None and dispatch.d_max < change[2] - 1:
        change = None  # The gateway refuses it.
    gyre = world(
        hosts, capacity, dispatch, elastic, work=work, train=train, switch=switch, infra=infra, change=change
    )  # fmt: skip
    updates, batch, size = gyre.progress.spec.updates, dispatch.batch_groups, dispatch.group_size
    assert updates is not None
    serial = updates * batch * (size * work * 2 / min(capacity, size) + train + size)
    bound = int(20 * serial + 400 + updates * batch * size * (4 * switch + 20))
    while not gyre.progress.finished:
        gyre.tick()
        assert gyre.now < bound, f"it stopped at update {gyre.version}: {gyre.hosts}, {len(gyre.todo)} live"
    ledger = gyre.progress.ledger
    assert ledger.taken == updates * batch * size
    assert set(gyre.places.values()) == {1}, "each execution is consumed once"
    assert all(d >= 0 for d in ledger.by_execution)
    if dispatch.d_max is not None:
        assert gyre.worst <= dispatch.d_max
        assert dispatch.on_stale == "drop" or not elastic.stream or gyre.stale == 0, "who waits needs not drop"
    if not gyre.stale and not infra:
        assert not ledger.unconsumed_executions, "no more was admitted than was trained"
    assert ledger.unconsumed_executions < size + size * batch
    turns_together = elastic.policy == "global"
    if hosts > 1 and not turns_together:
        assert gyre.unserved == 0, "with two cells or more, live episodes always have one"


@given(
    hosts=st.integers(1, 4),
    capacity=st.integers(1, 8),
    dispatch=dispatches(),
    elastic=ELASTIC,
    work=st.integers(1, 5),
    train=st.integers(1, 6),
    switch=st.integers(0, 6),
    operations=st.lists(
        st.tuples(
            st.integers(0, 150), st.integers(0, 3), st.sampled_from(["drain", "resume", "cordon", "kill", "kill"])
        ),
        max_size=12,
    ),
)
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_commands_and_kills_loses_or_doubles_anything(
    hosts: int, capacity: int, dispatch: Dispatch, elastic: Elastic, work: int, train: int, switch: int,
    operations: list[tuple[int, int, str]],
) -> None:  # fmt: skip
    last = max((tick for tick, _, _ in operations), default=0) + 1
    again = [(last, number, "resume") for number in range(hosts)]
    gyre = world(
        hosts, capacity, dispatch, elastic, work=work, train=train, switch=switch,
        operations=[*sorted(operations), *again],
    )  # fmt: skip
    updates, batch, size = gyre.progress.spec.updates, dispatch.batch_groups, dispatch.group_size
    assert updates is not None
    serial = updates * batch * (size * work * 2 / min(capacity, size) + train + size)
    bound = int(last + 20 * serial + 400 + updates * batch * size * (4 * switch + 20))
    while not gyre.progress.finished:
        gyre.tick()  # the books balance at each of them
        assert gyre.now < bound, f"it stopped at update {gyre.version}: {gyre.hosts}, {len(gyre.todo)} live"
        serves = any(host.role == "rollout" for host in gyre.hosts)
        # A killed cell may leave a lone one, which alternates.
        assert serves or gyre.suspended or not gyre.todo, "nobody serves, and no decision says so"
    assert gyre.progress.ledger.taken == updates * batch * size
    assert set(gyre.places.values()) == {1}, "each execution is consumed once"
    assert all(d >= 0 for d in gyre.progress.ledger.by_execution)
