"""Events of a log that cannot be used, as dead letters. Pure."""

from dataclasses import dataclass

from opengyre.proto import subjects
from opengyre.proto.dlq import DeadLetter
from opengyre.shared.bus import Stored

KEPT_BYTES = 256 << 10
_EXECUTION = 5
"""Where the execution stands in `gyre.v1.traj.<run>.<group>.<execution>.<event>`."""


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
