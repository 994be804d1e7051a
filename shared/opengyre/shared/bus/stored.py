"""A message as it lies in a stream."""

import logging
from dataclasses import dataclass, field

from opengyre.proto import codec
from opengyre.proto.base import Event

log = logging.getLogger("gyre.bus")


@dataclass(frozen=True)
class Stored:
    subject: str
    sequence: int
    payload: bytes
    headers: dict[str, str] = field(default_factory=dict)
    timestamp: float = 0.0
    """When the broker stored it, seconds since the epoch."""

    @property
    def message_id(self) -> str | None:
        return self.headers.get("Nats-Msg-Id")

    def event(self) -> Event:
        """Decode it; raises `codec.UndecodableError`."""
        return codec.decode(self.payload, self.headers.get("Gyre-Type"))

    def readable(self) -> Event | None:
        """The event; None, with a warning, where it cannot be decoded: for readers who go on without it."""
        try:
            return self.event()
        except codec.UndecodableError as error:
            log.warning("bus: message %d on %s is passed over: %s", self.sequence, self.subject, error)
            return None
