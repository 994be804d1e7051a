"""Which cell serves and which trains: a pure function, fed by the allocator from the bus, by the simulator from its
clock.

`fine` (elastic cells): rollout keeps the fewest cells that serve the demand at full speed, every other cell trains
while finished groups wait, and one at least trains once half a batch waits. `global` and `coarse` turn a pool of cells
together, once a burst is complete. `static` keeps a split.

Invariants:
- An operator's wish is obeyed at once; all else moves only cells that have settled and dwelt in their role, but for
  `static`, which sends cells that have not begun yet.
- While executions are live, no cell leaves the rollout role unless another one serves. The exceptions are a lone cell,
  which must alternate, and `global`: then the episodes are SUSPENDED (`suspends`).
- A cell that trains goes on until no group waits or, with work left in name only (all of it is in accumulators that
  wait for groups still to be made), until every trainer has been idle for the dwell time. So a lone cell alternates
  and never waits for groups that only it could make.
- Nothing ready and nothing missing: every cell stays where it is. A plan moves the fewest cells.
- A cell goes to train only where its share of the waiting work is worth `gate` switches; one that has to train does.
- A cell on its way (STARTING, JOINING, LEAVING_TRAIN) counts as serving, until it is late; then it is not counted.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from opengyre.proto.decision import CellView, PolicyInput, RoleChange
from opengyre.proto.host import HostState, Role

LATE_S = 60.0
LATE_SWITCHES = 4
"""A cell that has not arrived where it was sent after `LATE_S`, or so many switch times, is not counted on."""

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
    late_s = max(LATE_S, LATE_SWITCHES * (given.switch_s or 0))
    free = [c for c in given.cells if c.wish is None and target(c) != "cordoned" and not _late(c, late_s)]
    # Under `static` too, a lone cell has to alternate.
    rule = _RULES[given.elastic.policy] if len(free) > 1 else _fine
    return (*wished, *released, *rule(given, free))


def suspends(given: PolicyInput, changes: Iterable[RoleChange]) -> bool:
    """Whether no cell is left in the rollout role, or on its way to it, though executions are live."""
    if given.live_executions <= 0:
        return False
    after = {change.cell: change.role for change in changes}
    return all(after.get(cell.cell, target(cell)) != "rollout" for cell in given.cells)


def _late(cell: CellView, late_s: float) -> bool:
    return cell.since_s > late_s and _in_transit(cell)


def _in_transit(cell: CellView) -> bool:
    return not cell.settled or cell.state in (HostState.STARTING, HostState.JOINING)


def _serves(cell: CellView) -> bool:
    return cell.settled and cell.state is HostState.ROLLOUT


def _idle(cell: CellView, dwell_s: float) -> bool:
    # Above 0: a cell that has just come to TRAIN has not asked for work yet, whatever the dwell time.
    return cell.settled and cell.state is HostState.TRAIN and cell.idle_s > 0 and cell.idle_s >= dwell_s


def _split(free: Sequence[CellView]) -> tuple[list[CellView], list[CellView]]:
    """Those in the rollout role or on their way to it, and those in the train role or on their way."""
    return [c for c in free if target(c) == "rollout"], [c for c in free if target(c) == "train"]


def needed(demand: float, floor: int, cells: Sequence[CellView]) -> int:
    """How many of `cells`, taken in order, serve `demand` calls at full speed; all of them where that is too few."""
    if demand <= 0:
        return 0
    count = 0
    room = 0
    for cell in cells:
        if room >= demand:
            break
        count += 1
        room += max(1, cell.capacity)
    return min(len(cells), max(count, floor))


def useful(given: PolicyInput, ready: float) -> int:
    """How many cells the waiting work is worth: one for each share of it that a cell takes at a time, and each with
    `gate` switches of work at least."""
    if ready <= 0:
        return 0
    size, elastic = given.dispatch.group_size, given.elastic
    shares = math.ceil(ready * size / (elastic.grain or size) - 1e-9)
    if not given.train_s or not given.switch_s or not elastic.gate:
        return shares
    work, least = ready * given.train_s, elastic.gate * given.switch_s
    if work >= shares * least:  # also where switches take so little that the quotient is no number
        return shares
    return max(1, math.ceil(work / least - 1e-9))


def _ready(given: PolicyInput, training: Sequence[CellView]) -> float:
    """Groups that wait for a cell: none where the run is over, or where every trainer has found nothing to do."""
    if given.finished:
        return 0
    at_work = (*training, *(cell for cell in given.cells if cell.wish == "train"))
    if training and all(_idle(cell, given.elastic.dwell_s) for cell in at_work):
        return 0
    return given.ready_groups


def _fine(given: PolicyInput, free: Sequence[CellView]) -> list[RoleChange]:
    elastic = given.elastic
    total = len(free)
    serving, training = _split(free)
    wished_train = any(cell.wish == "train" for cell in given.cells)
    wished_room = sum(cell.capacity for cell in given.cells if cell.wish == "rollout" and _serves(cell))
    ready = _ready(given, training)
    demand = given.live_executions if given.demand_calls is None else given.demand_calls
    need = needed(demand - wished_room, elastic.min_rollout_cells, [*serving, *training])
    spare = total - need
    least, ceiling = _bounds(given, total, ready, bool(training), wished_train)
    most = min(max(spare, least), ceiling)
    fewest = min(max(min(spare, useful(given, ready)), least), ceiling)
    needs = f"{demand:.4g} calls of {given.live_executions} live executions need {need} of {total} cells"
    if len(training) > most:
        return _bring_back(given, training, len(training) - most, f"{needs}; {_wait(ready)}")
    if len(training) < fewest:
        return _send(given, serving, total, fewest - len(training), f"{_wait(ready)}; {needs}")
    return []


def _bounds(given: PolicyInput, total: int, ready: float, begun: bool, wished_train: bool) -> tuple[int, int]:
    """The least and the most cells in the train role, whatever the demand is."""
    elastic = given.elastic
    half = (given.dispatch.batch_groups + 1) // 2
    # Hysteresis: it takes half a batch to begin, and any group that waits to go on.
    one_at_least = not wished_train and (ready >= half or (ready > 0 and begun))
    floor = min(elastic.min_train_cells, max(0, total - max(1, elastic.min_rollout_cells)))
    if elastic.max_rollout_cells is not None:
        floor = max(floor, total - elastic.max_rollout_cells)
    least = min(max(floor, int(one_at_least)), total)
    return least, total if elastic.max_train_cells is None else max(elastic.max_train_cells, least)


def _wait(ready: float) -> str:
    return f"{ready:.4g} groups wait"


def _static(given: PolicyInput, free: Sequence[CellView]) -> list[RoleChange]:
    wished = sum(cell.wish == "train" for cell in given.cells)
    wanted = min(max(0, given.elastic.train_cells - wished), len(free) - 1)
    serving, training = _split(free)
    reason = f"static: {given.elastic.train_cells} cells train"
    lacking = wanted - len(training)
    if lacking < 0:
        return _bring_back(given, training, -lacking, reason)
    # It has no engine yet and would start one only to end it. Others are left to serve: `wanted` is below `free`.
    starting = [cell for cell in serving if cell.state is HostState.STARTING][:lacking]
    begun = [cell for cell in serving if cell not in starting]
    return [
        *(RoleChange(cell=cell.cell, role="train", reason=reason) for cell in starting),
        *_send(given, begun, len(free), lacking - len(starting), reason),
    ]


def _together(given: PolicyInput, free: Sequence[CellView], standalone: int) -> list[RoleChange]:
    """The pool turns once: to train when a burst is complete (or nothing else is to come), back when it is trained."""
    fixed = {cell.cell for cell in sorted(free, key=lambda cell: cell.cell)[: min(standalone, len(free) - 1)]}
    serving, training = _split([cell for cell in free if cell.cell not in fixed])
    astray = [cell for cell in free if cell.cell in fixed and target(cell) == "train"]
    ready = _ready(given, training)
    burst = given.dispatch.mu * given.dispatch.batch_groups
    moves = _bring_back(given, astray, len(astray), "it stands alone and serves")
    if training and ready <= 0:
        return [*moves, *_bring_back(given, training, len(training), "the burst is trained")]
    if serving and (training or ready >= burst or (ready > 0 and given.live_executions <= 0)):
        reason = f"{_wait(ready)}: the burst of {burst} is complete"
        return [*moves, *(RoleChange(cell=c.cell, role="train", reason=reason) for c in _movable(given, serving))]
    return moves


def _movable(given: PolicyInput, cells: Iterable[CellView]) -> list[CellView]:
    return [cell for cell in cells if cell.settled and cell.since_s >= given.elastic.dwell_s]


def _bring_back(given: PolicyInput, training: Iterable[CellView], count: int, reason: str) -> list[RoleChange]:
    """The longest idle first."""
    chosen = heapq.nsmallest(count, _movable(given, training), key=lambda cell: (-cell.idle_s, cell.cell))
    return [RoleChange(cell=cell.cell, role="rollout", reason=reason) for cell in chosen]


def _send(given: PolicyInput, serving: Sequence[CellView], free: int, count: int, reason: str) -> list[RoleChange]:
    """The least loaded first, of these the one whose calls are the cheapest to move; and never the last one that
    serves, unless it is the only cell."""
    others = any(cell.wish == "rollout" and _serves(cell) for cell in given.cells)
    if given.live_executions > 0 and free > 1 and not others:
        count = min(count, sum(map(_serves, serving)) - 1)
    movable = _movable(given, serving)
    chosen = heapq.nsmallest(max(0, count), movable, key=lambda cell: (cell.running, cell.held_tokens, cell.cell))
    return [RoleChange(cell=cell.cell, role="train", reason=reason) for cell in chosen]


_RULES: dict[str, Callable[[PolicyInput, Sequence[CellView]], list[RoleChange]]] = {
    "fine": _fine,
    "static": _static,
    "global": lambda given, free: _together(given, free, 0),
    "coarse": lambda given, free: _together(given, free, given.elastic.standalone_cells),
}
