"""What enters the update under way, of what is ready. Pure.

Executions enter in the order in which their messages came, `B * G` of them; a message may straddle two updates.
Without streaming nothing enters before all that the burst takes is there. What would be staler than `d_max` in this
update does not enter: it leaves training.
"""

from collections.abc import Mapping

from opengyre.proto.run import RunSpec
from opengyre.trainer.store import Record
from opengyre.trainer.update import Update

Pending = Mapping[str, tuple[str, ...]]
"""Message -> its executions that no committed update took, messages in order of arrival."""


def burst_left(spec: RunSpec, record: Record) -> int:
    """Executions that the updates up to the next publication, or to the end of the run, take yet."""
    last = record.published + spec.dispatch.mu
    if spec.updates is not None:
        last = min(last, spec.updates)
    # At least this update: mu may have been lowered under way.
    return max(1, last - record.version) * spec.dispatch.update_executions


def open_for(spec: RunSpec, record: Record, pending: Pending, update: Update) -> bool:
    """Whether executions may enter `update` now."""
    if spec.elastic.stream or update.units:
        return True
    return sum(map(len, pending.values())) >= burst_left(spec, record)


def stale(spec: RunSpec, record: Record, admitted: int) -> bool:
    """Whether an execution that was admitted at this version is too old for the next update."""
    bound = spec.dispatch.d_max
    return bound is not None and record.version - admitted > bound


def arrivals(pending: Pending, update: Update) -> list[tuple[str, tuple[str, ...]]]:
    """The next executions of `update`, by message, as many as it has places for."""
    free = update.size - len(update.units)
    found: list[tuple[str, tuple[str, ...]]] = []
    for message, executions in pending.items():
        chosen = tuple(execution for execution in executions if execution not in update.source)[:free]
        if chosen:
            found.append((message, chosen))
            free -= len(chosen)
        if free == 0:
            break
    return found
