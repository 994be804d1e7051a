"""A group's log out of stored messages, and what of it cannot be used, as dead letters. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.proto import codec, subjects
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.traj import Call, Overdue, Started, TrajEvent
from opengyre.shared.bus import Stored
from opengyre.trajectory.assemble import Assembled, LogEvent
from opengyre.trajectory.tree import fault_of

KEPT_BYTES = 256 << 10
_EXECUTION = 5
"""Where the execution stands in `gyre.v1.traj.<run>.<group>.<execution>.<event>`."""
_IDS = slice(3, 6)


@dataclass(frozen=True, slots=True)
class Fault:
    execution: str
    letter: DeadLetter


def fault(message: Stored, reason: str) -> Fault:
    """`message` of the stream TRAJ, with why it cannot be used."""
    stream, consumer = subjects.TRAJECTORY_ENDED
    parts = message.subject.split(".")
    return Fault(
        parts[_EXECUTION] if len(parts) > _EXECUTION else "",
        DeadLetter(
            origin_stream=stream,
            consumer=consumer,
            origin_subject=message.subject,
            origin_sequence=message.sequence,
            deliveries=1,
            error=reason,
            payload=message.payload[:KEPT_BYTES].decode("utf-8", "replace"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Log:
    """`messages` and `events` in the stream's order, one for one; `faults`: what is no event."""

    messages: tuple[Stored, ...]
    events: tuple[LogEvent, ...]
    faults: tuple[Fault, ...]


def decoded(stored: Sequence[Stored]) -> Log:
    """What can be decoded and is of the execution whose subject it is under (a message without a subject is of the one
    that it names). The place of an event that is not stays empty, which makes its execution a broken log, not the
    group."""
    messages: list[Stored] = []
    events: list[LogEvent] = []
    faults: list[Fault] = []
    for message in stored:
        try:
            event = message.event()
        except codec.UndecodableError as error:
            faults.append(fault(message, str(error)))
            continue
        if isinstance(event, TrajEvent | Overdue):
            if (why := misplaced(event, message.subject)) is not None:
                faults.append(fault(message, why))
                continue
            messages.append(message)
            events.append(event)
    return Log(tuple(messages), tuple(events), tuple(faults))


def misplaced(event: LogEvent, subject: str) -> str | None:
    """Why `event` cannot be under `subject`; None where it can, and where there is no subject."""
    ids = (event.run, event.group, event.execution if isinstance(event, TrajEvent) else subjects.ALL)
    if not subject or tuple(subject.split(".")[_IDS]) == ids:
        return None
    return f"its ids ({'.'.join(ids)}) contradict its subject"


def due(faults: Sequence[Fault], assembled: Assembled) -> list[Fault]:
    """Those to be told of with this part of the group: of its executions, and with the closing part also of those that
    are no members, which no later part will have."""
    mine = set(assembled.scored.executions)
    later = set(assembled.members) - mine
    return [
        one for one in faults if one.execution in mine or (not assembled.scored.late and one.execution not in later)
    ]


def unfit(log_of: Log, events: Sequence[LogEvent]) -> list[Fault]:
    """Calls that cannot be trained, of the log's events, their ids in place."""
    vocabularies = {event.execution: event.vocabulary for event in events if isinstance(event, Started)}
    found: list[Fault] = []
    for message, event in zip(log_of.messages, events, strict=True):
        if isinstance(event, Call) and (why := fault_of(event, vocabularies.get(event.execution))) is not None:
            found.append(fault(message, f"call {event.call} cannot be trained: {why}"))
    return found
