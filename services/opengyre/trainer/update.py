"""One update as a state machine. Pure: no I/O, no clock.

States: COLLECTING (groups arrive, cells pull and hand over) -> COMMITTING (every group is in a contribution that we
hold) -> COMMITTED. A group is waiting, leased to one cell, or in one contribution.

Invariants: a group is in at most one contribution, and in exactly one when the update commits; a contribution is taken
whole or refused whole, because a sum cannot be taken apart; repeating a request changes nothing and is answered the
same; what belongs to another update or attempt is refused.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opengyre.proto.update import UpdateStats


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
    """An accumulated gradient (blob reference) and the groups that it is the sum of."""

    cell: Cell
    groups: tuple[str, ...]
    gradient: str
    stats: UpdateStats


@dataclass(frozen=True, slots=True)
class Update:
    """The state. `groups`: in order of arrival; `seen`: cell -> when it last gave a sign of life."""

    number: int
    attempt: str
    size: int
    phase: Phase = Phase.COLLECTING
    groups: tuple[str, ...] = ()
    leased: Mapping[str, Cell] = field(default_factory=dict)
    contributed: Mapping[str, str] = field(default_factory=dict)
    """Group -> contribution."""
    contributions: Mapping[str, Contribution] = field(default_factory=dict)
    seen: Mapping[Cell, float] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(group for group in self.groups if group not in self.leased and group not in self.contributed)

    def leases_of(self, cell: Cell) -> tuple[str, ...]:
        return tuple(group for group in self.groups if self.leased.get(group) == cell)


# Events.


@dataclass(frozen=True, slots=True)
class GroupArrived:
    group: str


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
    groups: tuple[str, ...]
    gradient: str
    stats: UpdateStats
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """What a cell handed over cannot be read: its groups are to be computed again."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Worked:
    """A cell's heartbeat says that it works on this group."""

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


Event = GroupArrived | Pulled | HandedOver | Unusable | Worked | Ticked | Stored

# Effects. A Pulled is answered by one of the first four, a HandedOver by Accept or Refuse.


@dataclass(frozen=True, slots=True)
class Give:
    group: str


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
        leased={group: owner for group, owner in update.leased.items() if owner != cell},
        seen={other: when for other, when in update.seen.items() if other != cell},
    )
    return left, (CellLeft(cell, reason),)


def _arrive(update: Update, event: GroupArrived) -> Step:
    if event.group in update.groups:
        return update, ()
    if len(update.groups) == update.size:
        raise ValueError(f"update {update.number} has its {update.size} groups; {event.group} belongs to a later one")
    return replace(update, groups=(*update.groups, event.group)), ()


def _pull(update: Update, event: Pulled) -> Step:
    effects: tuple[Effect, ...] = ()
    for other in [c for c in update.seen if c.host == event.cell.host and c.boot != event.cell.boot]:
        update, gone = _release(update, other, "its process was started again")
        effects += gone
    if event.holding and (event.update, event.attempt) != (update.number, update.attempt):
        return update, (*effects, Discard(f"it belongs to update {event.update}, attempt {event.attempt}"))
    mine = update.leases_of(event.cell)
    strange = [group for group in event.holding if group not in mine]
    if strange:
        update, gone = _release(update, event.cell, f"it holds {strange[0]}, which is not leased to it")
        return update, (*effects, *gone, Discard(f"{strange[0]} is not leased to it"))
    # A lease that the cell does not hold is one whose answer it did not get.
    lost = [group for group in mine if group not in event.holding]
    chosen = lost[0] if lost else next(iter(update.waiting), None)
    if chosen is not None or event.cell in update.seen:
        effects += () if event.cell in update.seen else (CellJoined(event.cell),)
        update = replace(update, seen={**update.seen, event.cell: event.now})
    if chosen is not None:
        return replace(update, leased={**update.leased, chosen: event.cell}), (*effects, Give(chosen))
    if len(update.groups) < update.size:
        return update, (*effects, Wait(f"groups: {len(update.groups)} of {update.size} of update {update.number}"))
    if event.holding:
        return update, (*effects, Flush())
    return update, (*effects, Wait(f"other cells: {len(update.contributed)} of {update.size} groups are handed over"))


def _repeated(update: Update, event: HandedOver) -> Step | None:
    """The answer to a contribution that we have, or that is of another update."""
    if (event.update, event.attempt) != (update.number, update.attempt):
        return update, (Refuse(f"update {update.number}, attempt {update.attempt} is open, not {event.update}"),)
    known = update.contributions.get(event.contribution)
    if known is None:
        return None
    if (known.groups, known.gradient) != (event.groups, event.gradient):
        return update, (Refuse(f"contribution {event.contribution} was handed over with other content"),)
    return update, (Accept(),)


def _hand_over(update: Update, event: HandedOver) -> Step:
    if (answer := _repeated(update, event)) is not None:
        return answer
    mine = update.leases_of(event.cell)
    if len(set(event.groups)) != len(event.groups) or not set(event.groups) <= set(mine):
        strange = next((g for g in event.groups if g not in mine), event.groups[0])
        update, gone = _release(update, event.cell, f"it handed over {strange}, which is not leased to it")
        return update, (*gone, Refuse(f"{strange} is not leased to it once"))
    effects: tuple[Effect, ...] = ()
    if event.groups:
        taken = Contribution(event.cell, event.groups, event.gradient, event.stats)
        update = replace(
            update,
            leased={group: owner for group, owner in update.leased.items() if group not in event.groups},
            contributed={**update.contributed, **dict.fromkeys(event.groups, event.contribution)},
            contributions={**update.contributions, event.contribution: taken},
            seen={**update.seen, event.cell: event.now},
        )
        effects = (Taken(event.contribution),)
    if event.leaving:
        update, gone = _release(update, event.cell, "another role")
        effects += gone
    if len(update.contributed) == update.size:
        return replace(update, phase=Phase.COMMITTING), (*effects, Accept(), Commit())
    return update, (*effects, Accept())


def _drop_cell(update: Update, event: Unusable) -> Step:
    return _release(update, event.cell, event.reason)


def _work(update: Update, event: Worked) -> Step:
    if update.leased.get(event.group) != event.cell:
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
    if not event.groups:
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
        GroupArrived: _arrive,
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
