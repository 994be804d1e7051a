"""What holds things back, in sentences for an operator: admission, floors of cells, suspended episodes. Pure.

They are made of what decides: the inputs of an admission, and the cells as the allocator reports them.
"""

from collections.abc import Sequence

import msgspec

from opengyre.elastic.admission import room
from opengyre.proto.decision import AdmissionInput, CellReport
from opengyre.proto.host import HostState
from opengyre.proto.run import Elastic

ENDLESS = 1 << 30
AWAY = ("lost", "refused")
"""Standings of a cell in which it takes no role."""


def held_by(given: AdmissionInput) -> str | None:
    """Which bound holds admission back; None while groups are being admitted, or when the run is over."""
    if given.state != "active" or given.finished:
        return None
    if given.published < 0:
        return "admission waits for the first weights to be published"
    free = room(msgspec.structs.replace(given, waiting=ENDLESS, most=ENDLESS))
    if free > 0:
        if given.waiting:
            return None
        return f"admission waits for tasks: {free} groups could be admitted, and no task waits that trains"
    return min(_bounds(given), key=lambda bound: bound[0])[1]


def _bounds(given: AdmissionInput) -> list[tuple[int, str]]:
    """Each bound: executions until it is reached, and its sentence. Of two that are equal the first is the reason."""
    dispatch, size = given.dispatch, given.dispatch.group_size
    batch = dispatch.update_executions
    bounds: list[tuple[int, str]] = []
    if given.updates is not None:
        last = f"all groups of the run's {given.updates} updates are admitted"
        bounds.append((given.updates * batch - given.kept_executions, last))
    if dispatch.continuous is not None:
        unfinished = f"dispatch.continuous keeps {dispatch.continuous} groups unfinished: {given.live_groups} are"
        bounds.append(((dispatch.continuous - given.live_groups) * size, unfinished))
    else:
        depth = round((dispatch.phi + dispatch.mu) * batch)
        left = min(depth - given.unconsumed_executions, given.published * batch + depth - given.kept_executions)
        level, unconsumed = _groups(depth, size), _groups(given.unconsumed_executions, size)
        full = (
            f"the depth (phi + mu) * batch_groups of {level} groups is full: {unconsumed} are unconsumed; "
            f"the version after {given.published} makes room"
        )
        bounds.append((left, full))
    if dispatch.d_max is not None and dispatch.on_stale == "wait":
        oldest = given.published if given.oldest_version is None else min(given.oldest_version, given.published)
        until = max(oldest + dispatch.d_max + 1, 0 if given.stream else given.published + dispatch.mu)
        held = (
            f"dispatch.d_max {dispatch.d_max} holds admission: the oldest unconsumed group is of version {oldest}, "
            f"so no more is admitted than {until} updates take"
        )
        bounds.append((until * batch - given.kept_executions, held))
    return bounds


def _groups(executions: int, size: int) -> str:
    return f"{executions / size:g}"


def unfit(elastic: Elastic, cells: int) -> str | None:
    """Why `cells` cells cannot be divided as `elastic` says, in a sentence that begins with the field; else None.

    A lone cell alternates, whatever the split.
    """
    rollout, train = elastic.min_rollout_cells, elastic.min_train_cells
    serving = f"elastic.min_rollout_cells is {rollout}" if rollout else "one at least has to serve"
    if elastic.policy == "static" and cells > 1:
        named = f"elastic.train_cells is {elastic.train_cells}"
        rollout, train = max(1, rollout), elastic.train_cells
    elif elastic.policy == "coarse" and cells > 1:
        named = f"elastic.standalone_cells is {elastic.standalone_cells}"
        rollout, train = elastic.standalone_cells, max(1, train)
        if rollout + train > cells:
            return f"{named}, but there are {cells} cells and {train} must be able to train; allowed is at most " + str(
                max(0, cells - train)
            )
        return None
    else:
        named = f"elastic.min_train_cells is {train}"
    if rollout + train <= cells:
        return None
    return (
        f"{named} and {serving}, {rollout + train} together, but there are {cells} cells; allowed is a sum of at most "
        f"{cells}"
    )


def refused(cells: Sequence[CellReport]) -> list[str]:
    """Which cells the run takes no token from, and why."""
    return [f"cell {cell.cell} is refused: {cell.refused}" for cell in cells if cell.refused is not None]


def unmet_floors(elastic: Elastic, cells: Sequence[CellReport]) -> list[str]:
    """Floors that the present cells cannot meet; lost and refused cells and those under another wish do not count."""
    there = [cell for cell in cells if cell.state not in AWAY]
    free = [cell for cell in there if cell.wish is None]
    found: list[str] = []
    for role, floor in (("rollout", elastic.min_rollout_cells), ("train", elastic.min_train_cells)):
        able = len(free) + sum(cell.wish == role for cell in there)
        if floor > able:
            found.append(f"elastic.min_{role}_cells is {floor}, and {_count(able)} can be in that role{_why(cells)}")
    both = elastic.min_rollout_cells + elastic.min_train_cells
    if not found and both > (able := sum(cell.wish != "cordoned" for cell in there)):
        found.append(
            f"elastic.min_rollout_cells and elastic.min_train_cells are {both} together, and {_count(able)} can be in "
            f"these roles{_why(cells)}"
        )
    return found


def _count(cells: int) -> str:
    return f"{cells} cell" if cells == 1 else f"{cells} cells"


def _why(cells: Sequence[CellReport]) -> str:
    reasons = [f"{cell.cell} {_standing(cell)}" for cell in cells if cell.state in AWAY or cell.wish is not None]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _standing(cell: CellReport) -> str:
    if cell.state in AWAY:
        return f"is {cell.state}"
    if cell.wish is not None:
        return f"is held in the role {cell.wish} by an operator's wish"
    if cell.role in (None, "rollout"):
        return f"is {cell.state}, on its way to the rollout"
    return f"is {cell.state}, told to be in the role {cell.role}"


def suspended(live_executions: int, cells: Sequence[CellReport]) -> str | None:
    """Why the calls of live executions are parked; None while a cell serves or nothing is live."""
    if live_executions <= 0 or any(cell.state == HostState.ROLLOUT.value for cell in cells):
        return None
    why = "; ".join(f"{cell.cell} {_standing(cell)}" for cell in cells) or "there are no cells"
    return f"the episodes of {live_executions} live executions are suspended: no cell serves ({why})"
