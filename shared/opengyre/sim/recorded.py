"""A workload from what a run has recorded: its episodes' durations, its training and its switches. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opengyre.proto.host import HostState, HostStateChanged, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed
from opengyre.sim.gyre import HOUR_S
from opengyre.sim.workload import Workload

LEAST_GROUPS = 4
"""Fewer whole groups than this say too little of how durations vary."""


class TooLittleRecordedError(ValueError):
    """The run has not recorded enough; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """`notes`: what was assumed, a sentence each."""

    workload: Workload
    groups: int
    notes: tuple[str, ...]


def recorded(
    spec: RunSpec,
    ended: Iterable[Ended],
    commits: Iterable[Committed],
    changes: Iterable[HostStateChanged],
    hosts: Sequence[HostStatus],
) -> Recorded:
    """The run's workload on its own cells. Raises `TooLittleRecordedError`."""
    if not hosts:
        raise TooLittleRecordedError("no host is known, so its capacity is not either; start the stack of the run")
    notes = ["durations are as measured; where engines were overloaded they are longer than at full speed"]
    groups = _groups(ended, spec.dispatch.group_size)
    if len(groups) < LEAST_GROUPS:
        raise TooLittleRecordedError(
            f"run {spec.run} has {len(groups)} groups whose members all ended by themselves; at least {LEAST_GROUPS} "
            "are needed"
        )
    busy_s, trained = 0.0, 0
    for commit in commits:
        busy_s += commit.stats.busy_s
        trained += commit.stats.executions
    if not trained or busy_s <= 0:
        raise TooLittleRecordedError(f"run {spec.run} has no committed update that says how long its training took")
    cells = len({host.cell for host in hosts})
    capacity = sum(host.capacity for host in hosts) / cells
    durations = [duration for group in groups for duration in group]
    mean_h = sum(durations) / len(durations)
    executions = spec.dispatch.update_executions
    switch_s, note = _switch_s(changes, spec)
    notes += [note] if note else []
    workload = Workload(
        nodes=cells,
        batch_groups=spec.dispatch.batch_groups,
        group_size=spec.dispatch.group_size,
        mean_h=mean_h,
        rollout_node_h=executions * mean_h / max(capacity, 1e-6),
        train_node_h=executions * busy_s / trained / HOUR_S,
        switch_h=switch_s / HOUR_S,
        episodes=tuple(map(tuple, groups)),
    )
    return Recorded(workload, len(groups), tuple(notes))


def _groups(ended: Iterable[Ended], size: int) -> list[list[float]]:
    """Hours of the members of each group that is whole; an execution that the infrastructure ended says nothing."""
    members: dict[str, dict[str, float]] = {}
    for event in ended:
        if event.reason != "infra" and event.duration_s > 0:
            members.setdefault(event.group, {})[event.execution] = event.duration_s / HOUR_S
    return [list(group.values()) for _, group in sorted(members.items()) if len(group) == size]


def _switch_s(changes: Iterable[HostStateChanged], spec: RunSpec) -> tuple[float, str]:
    """Mean of how long a host was on its way, one way."""
    on_the_way = (HostState.DRAINING, HostState.LEAVING_TRAIN, HostState.JOINING)
    arrived = (HostState.ROLLOUT, HostState.TRAIN)
    spent = 0.0
    switches = 0
    for change in changes:
        if change.before in on_the_way:
            spent += change.duration_s
            switches += change.after in arrived
    if switches:
        return spent / switches, ""
    if spec.elastic.switch_s is not None:
        return spec.elastic.switch_s, "no switch was recorded; elastic.switch_s is taken"
    return 0.0, "no switch was recorded; switches count as free"
