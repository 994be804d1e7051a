"""One update as a state machine. Pure: no I/O, no clock.

A unit is an execution; an update is `size` of them. They arrive by messages, each the whole or a part of a group, and
are given out some of one message at a time: a part, of a plan by which cells finish together (`placing`). The plan is
of what waits; it is made again when that grows (an arrival, a cell that is gone) and when the number of cells changes.
An idle unit has no score: it takes its place and is no work.

States: COLLECTING (units arrive, cells pull and hand over) -> COMMITTING (every unit is idle or in a contribution that
we hold) -> COMMITTED. A unit is idle, waiting, leased to one cell, or in one contribution.

Invariants: a unit is in at most one contribution, and in exactly one, or idle, when the update commits; a contribution
is taken whole or refused whole, because a sum cannot be taken apart; repeating a request changes nothing and is
answered the same; what belongs to another update or attempt is refused.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opengyre.proto.ids import group_of
from opengyre.proto.update import UpdateStats
from opengyre.trainer.placing import loads_of, plan


class Phase(enum.Enum):
    COLLECTING = "collecting"
    COMMITTING = "committing"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A process of a host that trains."""

    host: str
    boot: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """An accumulated gradient (blob reference) and the units that it is the sum of."""

    cell: Cell
    units: tuple[str, ...]
    gradient: str
    stats: UpdateStats


@dataclass(frozen=True, slots=True)
class Update:
    """The state. `units`: in order of arrival; `seen`: cell -> when it last gave a sign of life; `grain`: units that a
    cell is given at a time at most; `cells`: how many are expected at least."""

    number: int
    attempt: str
    size: int
    grain: int
    cells: int = 1
    phase: Phase = Phase.COLLECTING
    units: tuple[str, ...] = ()
    source: Mapping[str, str] = field(default_factory=dict)
    """Unit -> the message that it came by."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Unit -> what it costs alone, in tokens."""
    shared: Mapping[str, float] = field(default_factory=dict)
    """Message -> what each of its units' cost has in common with the others'."""
    parts: tuple[tuple[str, ...], ...] | None = None
    """What waits, as it will be given out; None: to be planned."""
    planned_for: int = 0
    """Cells that `parts` is for."""
    idle: frozenset[str] = frozenset()
    leased: Mapping[str, Cell] = field(default_factory=dict)
    contributed: Mapping[str, str] = field(default_factory=dict)
    """Unit -> contribution."""
    contributions: Mapping[str, Contribution] = field(default_factory=dict)
    seen: Mapping[Cell, float] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Units that are work for the next cell."""
        return tuple(
            unit
            for unit in self.units
            if unit not in self.leased and unit not in self.contributed and unit not in self.idle
        )

    @property
    def whole(self) -> bool:
        return len(self.contributed) + len(self.idle) == self.size

    def leases_of(self, cell: Cell) -> tuple[str, ...]:
        return tuple(unit for unit in self.units if self.leased.get(unit) == cell)

    def together(self, units: tuple[str, ...]) -> tuple[str, ...]:
        """The first of `units`, and what else of them came by the same message, `grain` at most."""
        source = self.source[units[0]]
        return tuple(unit for unit in units if self.source[unit] == source)[: self.grain]


# Events.


@dataclass(frozen=True, slots=True)
class Arrived:
    """Units that came by the message `source`; those in `idle` are no work. `costs`, `shared`: see `placing.Load`."""

    source: str
    units: tuple[str, ...]
    idle: frozenset[str] = frozenset()
    costs: Mapping[str, float] = field(default_factory=dict)
    shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A cell asks for work; `update`, `attempt`, `holding`: what its accumulator belongs to and consists of."""

    cell: Cell
    now: float
    update: int | None = None
    attempt: str | None = None
    holding: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HandedOver:
    cell: Cell
    now: float
    update: int
    attempt: str
    contribution: str
    units: tuple[str, ...]
    gradient: str
    stats: UpdateStats
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """What a cell handed over cannot be read: its units are to be computed again."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Worked:
    """A cell's heartbeat says that it works on units of this group."""

    cell: Cell
    group: str
    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; cells that were silent for longer than `timeout_s` are given up."""

    now: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The commit is durable."""


Event = Arrived | Pulled | HandedOver | Unusable | Worked | Ticked | Stored

# Effects. A Pulled is answered by one of the first four, a HandedOver by Accept or Refuse.


@dataclass(frozen=True, slots=True)
class Give:
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Discard:
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    what: str


@dataclass(frozen=True, slots=True)
class Accept:
    pass


@dataclass(frozen=True, slots=True)
class Refuse:
    reason: str


@dataclass(frozen=True, slots=True)
class CellJoined:
    cell: Cell


@dataclass(frozen=True, slots=True)
class CellLeft:
    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A contribution is ours: record it."""

    contribution: str


@dataclass(frozen=True, slots=True)
class Commit:
    pass


Effect = Give | Flush | Discard | Wait | Accept | Refuse | CellJoined | CellLeft | Taken | Commit
Step = tuple[Update, tuple[Effect, ...]]


def _release(update: Update, cell: Cell, reason: str) -> Step:
    """The cell is gone from the update and what it was working on waits again."""
    if cell not in update.seen:
        return update, ()
    left = replace(
        update,
        leased={unit: owner for unit, owner in update.leased.items() if owner != cell},
        seen={other: when for other, when in update.seen.items() if other != cell},
        parts=None,
    )
    return left, (CellLeft(cell, reason),)


def _arrive(update: Update, event: Arrived) -> Step:
    new = tuple(unit for unit in event.units if unit not in update.source)
    if len(update.units) + len(new) > update.size:
        raise ValueError(f"update {update.number} holds {update.size} units; {new[-1]} belongs to a later one")
    update = replace(
        update,
        units=(*update.units, *new),
        source={**update.source, **dict.fromkeys(new, event.source)},
        idle=update.idle | event.idle.intersection(new),
        costs={**update.costs, **{unit: event.costs.get(unit, 0.0) for unit in new}},
        shared={**update.shared, event.source: event.shared},
        parts=None,
    )
    if update.whole:
        return replace(update, phase=Phase.COMMITTING), (Commit(),)
    return update, ()


def _planned(update: Update, cell: Cell) -> tuple[Update, tuple[tuple[str, ...], ...]]:
    """With what waits in parts, for as many cells as there are with this one."""
    cells = max(update.cells, len({*update.seen, cell}))
    if update.parts is not None and update.planned_for == cells:
        return update, update.parts
    loads = loads_of(update.waiting, update.source, update.costs, update.shared)
    parts = plan(loads, cells, update.grain)
    return replace(update, parts=parts, planned_for=cells), parts


def _pull(update: Update, event: Pulled) -> Step:
    effects: tuple[Effect, ...] = ()
    for other in [c for c in update.seen if c.host == event.cell.host and c.boot != event.cell.boot]:
        update, gone = _release(update, other, "its process was started again")
        effects += gone
    if event.holding and (event.update, event.attempt) != (update.number, update.attempt):
        return update, (*effects, Discard(f"it belongs to update {event.update}, attempt {event.attempt}"))
    mine = update.leases_of(event.cell)
    strange = [unit for unit in event.holding if unit not in mine]
    if strange:
        update, gone = _release(update, event.cell, f"it holds {strange[0]}, which is not leased to it")
        return update, (*effects, *gone, Discard(f"{strange[0]} is not leased to it"))
    # A lease that the cell does not hold is one whose answer it did not get.
    lost = tuple(unit for unit in mine if unit not in event.holding)
    if lost:
        chosen = update.together(lost)
    else:
        update, parts = _planned(update, event.cell)
        chosen, left = (parts[0], parts[1:]) if parts else ((), parts)
        update = replace(update, parts=left)
    if chosen or event.cell in update.seen:
        effects += () if event.cell in update.seen else (CellJoined(event.cell),)
        update = replace(update, seen={**update.seen, event.cell: event.now})
    if chosen:
        leased = {**update.leased, **dict.fromkeys(chosen, event.cell)}
        return replace(update, leased=leased), (*effects, Give(chosen))
    if len(update.units) < update.size:
        return update, (*effects, Wait(f"executions: {len(update.units)} of {update.size} of update {update.number}"))
    if event.holding:
        return update, (*effects, Flush())
    return update, (
        *effects,
        Wait(f"other cells: {len(update.contributed)} of {update.size} executions are handed over"),
    )


def _repeated(update: Update, event: HandedOver) -> Step | None:
    """The answer to a contribution that we have, or that is of another update."""
    if (event.update, event.attempt) != (update.number, update.attempt):
        return update, (Refuse(f"update {update.number}, attempt {update.attempt} is open, not {event.update}"),)
    known = update.contributions.get(event.contribution)
    if known is None:
        return None
    if (known.units, known.gradient) != (event.units, event.gradient):
        return update, (Refuse(f"contribution {event.contribution} was handed over with other content"),)
    return update, (Accept(),)


def _hand_over(update: Update, event: HandedOver) -> Step:
    if (answer := _repeated(update, event)) is not None:
        return answer
    mine = update.leases_of(event.cell)
    if len(set(event.units)) != len(event.units) or not set(event.units) <= set(mine):
        strange = next((unit for unit in event.units if unit not in mine), event.units[0])
        update, gone = _release(update, event.cell, f"it handed over {strange}, which is not leased to it")
        return update, (*gone, Refuse(f"{strange} is not leased to it once"))
    effects: tuple[Effect, ...] = ()
    if event.units:
        taken = Contribution(event.cell, event.units, event.gradient, event.stats)
        update = replace(
            update,
            leased={unit: owner for unit, owner in update.leased.items() if unit not in event.units},
            contributed={**update.contributed, **dict.fromkeys(event.units, event.contribution)},
            contributions={**update.contributions, event.contribution: taken},
            seen={**update.seen, event.cell: event.now},
        )
        effects = (Taken(event.contribution),)
    if event.leaving:
        update, gone = _release(update, event.cell, "another role")
        effects += gone
    if update.whole:
        return replace(update, phase=Phase.COMMITTING), (*effects, Accept(), Commit())
    return update, (*effects, Accept())


def _drop_cell(update: Update, event: Unusable) -> Step:
    return _release(update, event.cell, event.reason)


def _work(update: Update, event: Worked) -> Step:
    if not any(cell == event.cell and group_of(unit) == event.group for unit, cell in update.leased.items()):
        return update, ()
    return replace(update, seen={**update.seen, event.cell: event.now}), ()


def _tick(update: Update, event: Ticked) -> Step:
    effects: tuple[Effect, ...] = ()
    for cell in sorted(c for c, when in update.seen.items() if event.now - when > event.timeout_s):
        update, gone = _release(update, cell, f"silent for {event.timeout_s:g} s")
        effects += gone
    return update, effects


def _pull_late(update: Update, event: Pulled) -> Step:
    if event.holding:
        return update, (Discard(f"update {update.number} has all its contributions"),)
    return update, (Wait(f"the commit of update {update.number}"),)


def _hand_over_late(update: Update, event: HandedOver) -> Step:
    if (answer := _repeated(update, event)) is not None:
        return answer
    if not event.units:
        return update, (Accept(),)
    return update, (Refuse(f"update {update.number} has all its contributions"),)


def _finish(update: Update, _event: Stored) -> Step:
    return replace(update, phase=Phase.COMMITTED), ()


def _ignore(update: Update, _event: Event) -> Step:
    return update, ()


_LATE: dict[type[Any], Callable[..., Step]] = {
    Pulled: _pull_late,
    HandedOver: _hand_over_late,
    Unusable: _ignore,
    Worked: _ignore,
    Ticked: _ignore,
}
TABLE: dict[Phase, dict[type[Any], Callable[..., Step]]] = {
    Phase.COLLECTING: {
        Arrived: _arrive,
        Pulled: _pull,
        HandedOver: _hand_over,
        Unusable: _drop_cell,
        Worked: _work,
        Ticked: _tick,
    },
    Phase.COMMITTING: {**_LATE, Stored: _finish},
    Phase.COMMITTED: _LATE,
}
"""Phase -> event -> what it does. What is not here cannot happen, and is an error."""


def advance(update: Update, event: Event) -> Step:
    """The next state and what is to be done. Raises `ValueError` for an event that the phase does not have."""
    rule = TABLE[update.phase].get(type(event))
    if rule is None:
        raise ValueError(f"update {update.number} is {update.phase.value}: {type(event).__name__} cannot happen")
    return rule(update, event)
