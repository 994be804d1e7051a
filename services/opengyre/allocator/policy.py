"""Which cell serves and which trains: a pure function, fed by the service from the bus, by a simulator from its clock.

The elastic rule (`fine`): rollout keeps the fewest cells that serve all live executions at full speed, every other
cell trains while finished groups wait, and one at least trains once half a batch waits.

Invariants:
- An operator's wish is obeyed at once; all else moves only cells that have settled and dwelt in their role.
- While executions are live, no cell leaves the rollout role unless another one serves. The exception is a lone cell:
  it must alternate, and the episodes are SUSPENDED meanwhile.
- A cell that trains goes on until no group waits or, with work left in name only (all of it is in accumulators that
  wait for groups still to be made), until every trainer has been idle for the dwell time. So a lone cell alternates
  and never waits for groups that only it could make.
- Nothing ready and nothing missing: every cell stays where it is.
- A cell on its way (STARTING, JOINING, LEAVING_TRAIN) counts as serving, for `LATE_S` at most; then it is late, and
  not counted.
"""

from collections.abc import Iterable, Sequence

from opengyre.proto.decision import CellView, PolicyInput, RoleChange
from opengyre.proto.host import HostState, Role

LATE_S = 60.0
"""A cell that has not arrived where it was sent after so long is not counted on."""

_ROLE_OF: dict[HostState, Role] = {
    HostState.STARTING: "rollout",
    HostState.JOINING: "rollout",
    HostState.ROLLOUT: "rollout",
    HostState.LEAVING_TRAIN: "rollout",
    HostState.DRAINING: "train",
    HostState.TRAIN: "train",
    HostState.CORDONED: "cordoned",
}


def target(cell: CellView) -> Role:
    """Where the cell is or is going."""
    return cell.role or _ROLE_OF[cell.state]


def decide(given: PolicyInput) -> tuple[RoleChange, ...]:
    """The changes to make now, each of a different cell; none when all is well."""
    wished = [
        RoleChange(cell=cell.cell, role=cell.wish, reason="an operator's wish")
        for cell in given.cells
        if cell.wish is not None and cell.wish != target(cell)
    ]
    released = [
        RoleChange(cell=cell.cell, role="rollout", reason="no longer cordoned")
        for cell in given.cells
        if cell.wish is None and target(cell) == "cordoned"
    ]
    free = [cell for cell in given.cells if cell.wish is None and target(cell) != "cordoned" and not _late(cell)]
    # Under `static` too, a lone cell has to alternate.
    rule = _static if given.elastic.policy == "static" and len(free) > 1 else _fine
    moves = rule(given, free)
    return (*wished, *released, *moves)


def _late(cell: CellView) -> bool:
    return cell.since_s > LATE_S and _in_transit(cell)


def _in_transit(cell: CellView) -> bool:
    return not cell.settled or cell.state in (HostState.STARTING, HostState.JOINING)


def _serves(cell: CellView) -> bool:
    return cell.settled and cell.state is HostState.ROLLOUT


def _idle(cell: CellView, dwell_s: float) -> bool:
    # Above 0: a cell that has just come to TRAIN has not asked for work yet, whatever the dwell time.
    return cell.settled and cell.state is HostState.TRAIN and cell.idle_s > 0 and cell.idle_s >= dwell_s


def needed(live: int, floor: int, cells: Sequence[CellView]) -> int:
    """How many of `cells`, taken in order, serve `live` executions at full speed; all of them where that is too few."""
    if live <= 0:
        return 0
    count = 0
    room = 0
    for cell in cells:
        if room >= live:
            break
        count += 1
        room += max(1, cell.capacity)
    return min(len(cells), max(count, floor))


def _fine(given: PolicyInput, free: Sequence[CellView]) -> list[RoleChange]:
    dwell = given.elastic.dwell_s
    ready = 0 if given.finished else given.ready_groups
    wished_train = [cell for cell in given.cells if cell.wish == "train"]
    wished_room = sum(cell.capacity for cell in given.cells if cell.wish == "rollout" and _serves(cell))
    serving = [cell for cell in free if target(cell) == "rollout"]
    training = [cell for cell in free if target(cell) == "train"]
    if training and all(_idle(cell, dwell) for cell in (*training, *wished_train)):
        ready = 0
    live = max(0, given.live_executions - wished_room)
    need = needed(live, given.elastic.min_rollout_cells, [*serving, *training])
    spare = len(free) - need
    half = (given.dispatch.batch_groups + 1) // 2
    # Hysteresis: it takes half a batch to begin, and any group that waits to go on.
    one_at_least = not wished_train and (ready >= half or (ready > 0 and bool(training)))
    least = min(1, len(free)) if one_at_least else 0
    most = max(spare, least)
    fewest = max(min(spare, ready), least)
    if len(training) > most:
        reason = f"{given.live_executions} live executions need {need} of {len(free)} cells; {ready} groups wait"
        return _bring_back(given, training, len(training) - most, reason)
    if len(training) < fewest:
        reason = f"{ready} groups wait; {given.live_executions} live executions need {need} of {len(free)} cells"
        return _send(given, serving, len(free), fewest - len(training), reason)
    return []


def _static(given: PolicyInput, free: Sequence[CellView]) -> list[RoleChange]:
    wished = sum(cell.wish == "train" for cell in given.cells)
    wanted = min(max(0, given.elastic.train_cells - wished), len(free) - 1)
    serving = [cell for cell in free if target(cell) == "rollout"]
    training = [cell for cell in free if target(cell) == "train"]
    reason = f"static: {given.elastic.train_cells} cells train"
    if len(training) > wanted:
        return _bring_back(given, training, len(training) - wanted, reason)
    return _send(given, serving, len(free), wanted - len(training), reason)


def _movable(given: PolicyInput, cells: Iterable[CellView]) -> list[CellView]:
    return [cell for cell in cells if cell.settled and cell.since_s >= given.elastic.dwell_s]


def _bring_back(given: PolicyInput, training: Iterable[CellView], count: int, reason: str) -> list[RoleChange]:
    """The longest idle first."""
    movable = sorted(_movable(given, training), key=lambda cell: (-cell.idle_s, cell.cell))
    return [RoleChange(cell=cell.cell, role="rollout", reason=reason) for cell in movable[:count]]


def _send(given: PolicyInput, serving: Sequence[CellView], free: int, count: int, reason: str) -> list[RoleChange]:
    """The least loaded first, and never the last one that serves, unless it is the only cell."""
    movable = sorted(_movable(given, serving), key=lambda cell: (cell.running, cell.cell))
    others = any(cell.wish == "rollout" and _serves(cell) for cell in given.cells)
    if given.live_executions > 0 and free > 1 and not others:
        count = min(count, sum(map(_serves, serving)) - 1)
    return [RoleChange(cell=cell.cell, role="train", reason=reason) for cell in movable[: max(0, count)]]
