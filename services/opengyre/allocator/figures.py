"""The allocator's figures: metrics on /metrics and gauges of its status."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from opengyre.allocator.cells import Cell
from opengyre.elastic.ledger import mean_of, predicted
from opengyre.elastic.progress import Progress
from opengyre.proto.host import HostState
from opengyre.shared.lifecycle import Context

GROUPS = Gauge("gyre_groups", "Groups of the run that is led, by state", ["state"])
UNCONSUMED = Gauge("gyre_unconsumed_groups", "Train groups that are live or ready")
PREDICTED = Gauge("gyre_staleness_predicted", "E[d] = phi + (mu - 1) / 2")
MEASURED = Gauge("gyre_staleness_mean", "Mean d of all groups that were trained")
MEASURED_EXECUTIONS = Gauge("gyre_execution_staleness_mean", "Mean d of all executions that were trained")
WORST = Gauge("gyre_execution_staleness_max", "Greatest d of an execution that was trained")
BALANCED = Gauge("gyre_books_balance", "1 while the accounting identity holds for groups and executions")
CELLS = Gauge("gyre_cells", "Cells by state", ["state"])
LEADER = Gauge("gyre_allocator_leader", "1 while this replica leads")
TERMS = Counter("gyre_allocator_terms", "Terms that this replica began to lead")


def show(context: Context, progress: Progress, cells: Mapping[str, Cell]) -> None:
    """Set all figures of a run."""
    ledger = progress.ledger
    groups, executions = ledger.groups_book(), ledger.executions_book()
    for state, count in (
        ("live", groups.live),
        ("ready", groups.ready),
        ("trained", groups.trained),
        ("dropped", sum(groups.dropped.values())),
        ("evaluated", ledger.evaluated),
    ):
        GROUPS.labels(state).set(count)
    UNCONSUMED.set(ledger.unconsumed)
    PREDICTED.set(predicted(progress.spec.dispatch))
    MEASURED.set(mean_of(ledger.distribution) or 0.0)
    MEASURED_EXECUTIONS.set(mean_of(ledger.by_execution) or 0.0)
    WORST.set(max((d for d, count in ledger.by_execution.items() if count), default=0))
    BALANCED.set(groups.balances and executions.balances)
    states = {state.value: 0 for state in HostState} | {"lost": 0, "refused": 0}
    for cell in cells.values():
        states[cell.standing] += 1
    for state, count in states.items():
        CELLS.labels(state).set(count)
    context.gauges |= {
        "live_groups": groups.live,
        "ready_groups": groups.ready,
        "waiting_groups": progress.waiting_groups,
        "unconsumed_groups": ledger.unconsumed,
        "unconsumed_executions": ledger.unconsumed_executions,
        "live_executions": progress.live_executions,
        "pending_tasks": progress.queue.tasks_waiting,
        "pending_groups": progress.queue.waiting("train"),
        "published_version": progress.published,
        "books_balance": float(groups.balances and executions.balances),
    }


def show_leader(context: Context, leads: bool) -> None:
    LEADER.set(leads)
    context.gauges["leader"] = float(leads)
    if leads:
        TERMS.inc()
    else:
        # What a former leader remembers would stand beside the new one's figures.
        context.gauges.clear()
        context.gauges["leader"] = 0.0
