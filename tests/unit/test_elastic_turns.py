"""The gyre in miniature, without clocks or I/O: admission, ledger, cells and policy together never come to a stop.

Hosts serve, drain, train and join as real ones do: a group is trained into the accumulator of a cell, which hands it
over when the update is full or when the cell leaves; heartbeats come every other tick.
"""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from opengyre.allocator.cells import Clocks, gather
from opengyre.elastic.admission import new_entry
from opengyre.elastic.policy import decide
from opengyre.elastic.progress import Progress
from opengyre.proto.host import DesiredRole, HostState, HostStatus
from opengyre.proto.run import Dispatch, Elastic, RunSpec
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
    """Ticks until the switch or the group at hand is done."""
    group: str | None = None
    held: list[str] = field(default_factory=list)
    heard: HostStatus | None = None


@dataclass
class World:
    progress: Progress
    hosts: list[Host]
    work: int
    train: int
    now: int = 0
    version: int = 0
    unserved: int = 0
    """How often the last cell that served was sent away from live episodes."""
    todo: dict[str, int] = field(default_factory=dict)
    leased: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    levels: dict[str, DesiredRole] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)

    def tick(self) -> None:
        self.now += 1
        self.admit()
        self.serve()
        for host in self.hosts:
            self.turn(host)
        self.commit()
        self.command()
        for ledger_book in (self.progress.ledger.groups_book(), self.progress.ledger.executions_book()):
            assert ledger_book.balances

    def admit(self) -> None:
        for spec in self.progress.queue.take("train", self.progress.room):
            sequence = self.progress.ledger.next_sequence
            entry = new_entry(self.progress.spec, spec, sequence, self.progress.published)
            self.progress.adopt(entry)
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
        group = execution.rpartition("-")[0]
        self.progress.apply(
            Ended(
                run="r", group=group, execution=execution, index=0, attempt=0, reason="done", turns=1,
                sampled_tokens=1, duration_s=1, members=(),
            )
        )  # fmt: skip
        if not any(other.startswith(group) for other in self.todo):
            self.progress.apply(
                GroupScored(
                    run="r", task="t", group=group, outcome="ready", scores={}, sampled_version_min=0,
                    sampled_version_max=0, tokens=1,
                )
            )  # fmt: skip

    def turn(self, host: Host) -> None:
        host.left = max(0, host.left - 1)
        before = host.state
        if host.state is S.ROLLOUT and host.role == "train":
            host.state, host.left = S.DRAINING, host.switch
        elif host.state is S.DRAINING and host.left == 0:
            host.state = S.TRAIN
        elif host.state is S.TRAIN and host.left == 0:
            self.trained(host)
            if host.role == "rollout":
                self.hand_over(host)
                host.state, host.left = S.JOINING, host.switch
            else:
                self.pull(host)
        elif host.state is S.JOINING and host.left == 0:
            host.state = S.ROLLOUT
        if host.state is not before or self.now % 2 == 0 or host.heard is None:
            host.heard = HostStatus(
                host=host.name, cell=host.name, boot="b", state=host.state, epoch=host.epoch, url="u", engine="tiny",
                capacity=host.capacity, training_group=host.group, since_s=self.now * TICK_S,
            )  # fmt: skip

    def trained(self, host: Host) -> None:
        if host.group is not None:
            host.held.append(host.group)
            host.group = None

    def pull(self, host: Host) -> None:
        free = sorted(self.progress.ledger.ready() - self.leased)
        if free and len(self.leased) < self.progress.spec.dispatch.batch_groups:
            host.group, host.left = free[0], self.train
            self.leased.add(free[0])
        elif len(self.leased) == self.progress.spec.dispatch.batch_groups:
            self.hand_over(host)

    def hand_over(self, host: Host) -> None:
        if host.held:
            self.handed |= set(host.held)
            self.progress.apply(
                Contributed(
                    run="r", update=self.version + 1, attempt="a", host=host.name, contribution=host.held[0],
                    groups=tuple(host.held), gradient="g", stats=UpdateStats(),
                )
            )  # fmt: skip
            host.held = []

    def commit(self) -> None:
        spec = self.progress.spec
        if len(self.handed) < spec.dispatch.batch_groups:
            return
        groups = tuple(sorted(self.handed))
        self.progress.apply(
            Committed(
                run="r", update=self.version + 1, attempt="a", version=self.version + 1, published=False, groups=groups,
                executions=(), staleness=(), score=0, gradient_norm=0, stats=UpdateStats(),
            )
        )  # fmt: skip
        for group in groups:
            self.progress.apply(GroupConsumed(run="r", task="t", group=group, outcome="trained", version=self.version))
        self.version += 1
        self.handed, self.leased = set(), set()
        if self.version == spec.updates:
            self.progress.apply(RunFinished(run="r", update=self.version, version=self.version))
            return
        self.progress.apply(Opened(run="r", update=self.version + 1, attempt="a", groups=spec.dispatch.batch_groups))
        if self.version % spec.dispatch.mu == 0:
            self.progress.apply(published(self.version))

    def command(self) -> None:
        cells = gather({host.name: host.heard for host in self.hosts if host.heard}, self.levels)
        given = self.progress.policy_input(self.clocks.views(cells, self.now * TICK_S))
        changes = decide(given)
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


def world(hosts: int, phi: float, mu: int, batch: int, size: int, capacity: int, elastic: Elastic, **costs) -> World:
    updates = 3 * mu
    spec = RunSpec(
        run="r", model="m", updates=updates, elastic=elastic,
        dispatch=Dispatch(phi=phi, mu=mu, batch_groups=batch, group_size=size),
    )  # fmt: skip
    progress = Progress(spec)
    task = TaskSpec(task="t", instruction="x", repeat=updates * batch)
    progress.apply(TaskSubmitted(run="r", task="t", spec=task))
    progress.apply(published(0))
    progress.apply(Opened(run="r", update=1, attempt="a", groups=batch))
    switch = costs.pop("switch")
    return World(progress, [Host(f"h{n}", capacity, switch) for n in range(hosts)], **costs)


@given(
    hosts=st.integers(1, 4),
    phi=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    mu=st.integers(1, 3),
    batch=st.sampled_from([2, 4, 6]),
    size=st.integers(1, 3),
    capacity=st.integers(1, 8),
    work=st.integers(1, 5),
    train=st.integers(1, 6),
    switch=st.integers(0, 8),
    elastic=st.builds(
        Elastic,
        policy=st.sampled_from(["fine", "static"]),
        train_cells=st.integers(1, 4),
        min_rollout_cells=st.integers(0, 4),
        dwell_s=st.sampled_from([0.0, 0.5, 1.0]),
    ),
)
@settings(max_examples=80, deadline=None)
@example(1, 0.0, 1, 6, 2, 2, 2, 1, 1, Elastic())
@example(2, 0.5, 2, 4, 2, 2, 2, 1, 1, Elastic())
@example(2, 0.0, 2, 2, 2, 2, 2, 6, 6, Elastic(dwell_s=0.0))
@example(1, 0.0, 2, 2, 2, 1, 2, 1, 8, Elastic(dwell_s=0.0))  # was called back before it asked for work, for ever
def test_every_run_comes_to_its_end(
    hosts: int, phi: float, mu: int, batch: int, size: int, capacity: int, work: int, train: int, switch: int,
    elastic: Elastic,
) -> None:  # fmt: skip
    gyre = world(hosts, phi, mu, batch, size, capacity, elastic, work=work, train=train, switch=switch)
    updates = gyre.progress.spec.updates
    assert updates is not None
    serial = updates * batch * (size * work * 2 / min(capacity, size) + train)
    bound = int(6 * serial + 200 + updates * batch * (2 * switch + 20))
    while not gyre.progress.finished:
        gyre.tick()
        assert gyre.now < bound, f"it stopped at update {gyre.version}: {gyre.hosts}, {len(gyre.todo)} live"
    assert gyre.progress.ledger.groups_book().trained == updates * batch
    assert not gyre.progress.ledger.unconsumed, "no more was admitted than was trained"
    if hosts > 1:
        assert gyre.unserved == 0, "with two cells or more, live episodes always have one"
