"""Dead letters (stream DLQ): messages that failed `max_deliver` times or cannot be understood."""

from typing import ClassVar

from opengyre.proto import subjects
from opengyre.proto.base import Event


class DeadLetter(Event, frozen=True, kw_only=True, tag="dlq.v1"):
    stream: ClassVar[str] = subjects.DLQ
    origin_stream: str
    consumer: str
    origin_subject: str
    origin_sequence: int
    deliveries: int
    error: str
    payload: str
    """The message's body as text; undecodable bytes are replaced, and it is cut at 256 KiB."""

    def event_id(self) -> str:
        return f"dlq-{self.origin_stream}-{self.origin_sequence}-{self.consumer}"
