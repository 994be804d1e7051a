"""Cells as the policy sees them, made of the hosts' heartbeats and levels. Pure, but for the clocks it remembers.

A cell is the hosts that say so. Its state is that of its slowest host on the way to its role. A cell of which a host
is missing (its heartbeat expired: LOST) holds no whole replica: it is reported, and the policy does not see it. So is a
cell that the run refuses, since its engine does not sample as the run trains (`opengyre.proto.handshake`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opengyre.proto.decision import CellReport, CellView
from opengyre.proto.handshake import refusal
from opengyre.proto.host import DesiredRole, HostState, HostStatus, Role
from opengyre.proto.run import RunSpec

_S = HostState
_ORDER: dict[Role | None, tuple[HostState, ...]] = {
    "rollout": (_S.CORDONED, _S.DRAINING, _S.TRAIN, _S.LEAVING_TRAIN, _S.STARTING, _S.JOINING, _S.ROLLOUT),
    "train": (_S.CORDONED, _S.STARTING, _S.LEAVING_TRAIN, _S.JOINING, _S.ROLLOUT, _S.DRAINING, _S.TRAIN),
    "cordoned": (_S.STARTING, _S.JOINING, _S.ROLLOUT, _S.DRAINING, _S.TRAIN, _S.LEAVING_TRAIN, _S.CORDONED),
}
"""Farthest from the role first, the state of one that has arrived last."""


@dataclass(frozen=True)
class Cell:
    """A cell: `present` hosts have a heartbeat; `lost` ones have none, though a level or a place in `seen`."""

    name: str
    present: tuple[HostStatus, ...]
    lost: tuple[str, ...]
    role: Role | None
    wish: Role | None
    settled: bool
    torn: bool
    """Its hosts were not all told the same: the last command has to be given again."""
    refused: str | None = None
    """Why the run takes no token from it, in a sentence that begins with the host."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted((*(status.host for status in self.present), *self.lost)))

    @property
    def whole(self) -> bool:
        return bool(self.present) and not self.lost

    @property
    def usable(self) -> bool:
        """Whether the policy may decide on it."""
        return self.whole and self.refused is None

    @property
    def standing(self) -> str:
        """Its state's value, `lost` or `refused`."""
        if not self.whole:
            return "lost"
        return self.state.value if self.refused is None else "refused"

    @property
    def state(self) -> HostState:
        """Of the slowest host that is present."""
        order = _ORDER[self.role or "rollout"]
        return min((status.state for status in self.present), key=order.index)

    def report(self) -> CellReport:
        return CellReport(
            cell=self.name,
            hosts=self.hosts,
            state=self.standing,
            role=self.role,
            wish=self.wish,
            refused=self.refused if self.whole else None,
        )


def gather(
    statuses: Mapping[str, HostStatus],
    levels: Mapping[str, DesiredRole],
    seen: Mapping[str, str] | None = None,
    spec: RunSpec | None = None,
) -> dict[str, Cell]:
    """All cells that are known, by name. `seen`: host -> cell, of hosts that had a heartbeat, told anything or not.
    `spec`: the run that takes or refuses them."""
    members: dict[str, tuple[list[HostStatus], list[str]]] = {}
    for status in statuses.values():
        members.setdefault(status.cell, ([], []))[0].append(status)
    away = {**(seen or {}), **{host: level.cell or host for host, level in levels.items()}}
    for host, cell in away.items():
        if host not in statuses:
            members.setdefault(cell, ([], []))[1].append(host)
    return {name: _cell(name, present, lost, levels, spec) for name, (present, lost) in sorted(members.items())}


def _cell(
    name: str,
    present: Sequence[HostStatus],
    lost: Sequence[str],
    levels: Mapping[str, DesiredRole],
    spec: RunSpec | None,
) -> Cell:
    hosts = (*(status.host for status in present), *lost)
    told = [levels[host] for host in hosts if host in levels]
    latest = max(told, key=lambda level: level.epoch, default=None)
    role = latest.role if latest else None
    return Cell(
        name=name,
        present=tuple(sorted(present, key=lambda status: status.host)),
        lost=tuple(sorted(lost)),
        role=role,
        wish=latest.wish if latest else None,
        settled=all(_obeyed(status, levels.get(status.host), role) for status in present),
        torn=latest is not None
        and (len(told) < len(hosts) or any((t.role, t.wish) != (latest.role, latest.wish) for t in told)),
        refused=_refused(present, spec) if spec is not None else None,
    )


def _refused(present: Sequence[HostStatus], spec: RunSpec) -> str | None:
    for status in sorted(present, key=lambda status: status.host):
        if (why := refusal(spec, status)) is not None:
            return f"{status.host} does not serve run {spec.run}: {why}"
    return None


def _obeyed(status: HostStatus, level: DesiredRole | None, role: Role | None) -> bool:
    if role is not None and (level is None or level.role != role):
        return False
    arrived = status.state is _ORDER[role or "rollout"][-1]
    return arrived and (level is None or status.epoch >= level.epoch)


TIGHT_S = 15.0
"""A host whose engine had no memory for more calls is taken to serve as few for so long after it said so last: were it
believed at once, the cell that relieves it would be sent away again."""


class Clocks:
    """How long each cell has been as it is, on the clock whose readings it is given (seconds, monotonic)."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[tuple[object, ...], float]] = {}
        self._idle: dict[str, tuple[float, float, tuple[HostStatus, ...]]] = {}
        """Cell -> when it was first and last heard to be idle, and the heartbeats that said so last."""
        self._tight: dict[str, tuple[float, float]] = {}
        """Host -> the calls that it had memory for, and when it said so last."""

    def views(self, cells: Mapping[str, Cell], now: float) -> tuple[CellView, ...]:
        """What the policy sees of the cells that it may use."""
        for name in self._since.keys() - cells.keys():
            del self._since[name]
            self._idle.pop(name, None)
        hosts = {host for cell in cells.values() for host in cell.hosts}
        self._tight = {host: tight for host, tight in self._tight.items() if host in hosts}
        return tuple(self._view(cell, now) for cell in cells.values() if cell.usable)

    def _view(self, cell: Cell, now: float) -> CellView:
        marks = (cell.state, cell.role, cell.settled)
        seen = self._since.get(cell.name)
        if seen is None:
            self._since[cell.name] = (marks, now - min(status.since_s for status in cell.present))
        elif seen[0] != marks:
            self._since[cell.name] = (marks, now)
        return CellView(
            cell=cell.name,
            hosts=cell.hosts,
            state=cell.state,
            settled=cell.settled,
            since_s=round(now - self._since[cell.name][1], 3),
            capacity=sum(self._capacity(status, now) for status in cell.present),
            running=sum(status.running for status in cell.present),
            wish=cell.wish,
            role=cell.role,
            idle_s=round(self._idle_s(cell, now), 3),
        )

    def _capacity(self, status: HostStatus, now: float) -> float:
        """Calls that a host serves at full speed, measured: by its settings, or by its memory where that is full."""
        if status.serves < status.capacity:
            self._tight[status.host] = (status.serves, now)
        least, said = self._tight.get(status.host, (status.capacity, now))
        if now - said > TIGHT_S:
            del self._tight[status.host]
            return status.capacity
        return min(status.capacity, least)

    def _idle_s(self, cell: Cell, now: float) -> float:
        """Between the first and the last heartbeat that said so: one alone may have met the gap between two groups."""
        if cell.state is not HostState.TRAIN or any(status.training_group is not None for status in cell.present):
            self._idle.pop(cell.name, None)
            return 0.0
        first, last, heard = self._idle.get(cell.name, (now, now, cell.present))
        if heard != cell.present:
            last = now
        self._idle[cell.name] = (first, last, cell.present)
        return last - first
