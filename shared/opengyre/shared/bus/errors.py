"""What can go wrong on the bus, in terms of our own."""


class BusError(Exception):
    """Base of everything the bus raises."""


class BusUnavailableError(BusError):
    """The broker did not answer within the allowed attempts. The effect is in doubt; ids make it safe to repeat."""


class FencedError(BusError):
    """Another writer appended first: stop, do not retry."""


class ConflictError(BusError):
    """A compare-and-set found another revision."""


class TooLargeError(BusError):
    """A message above the broker's limit; large content belongs in the blob store."""


class QueueFullError(BusError):
    """A bounded stream refuses new messages: back-pressure."""


class DriftError(BusError):
    """A stream, consumer or bucket exists with another definition than ours."""


class NotBootstrappedError(BusError):
    """A stream, consumer or bucket is missing: the bootstrap step has not run."""


class RpcFailedError(BusError):
    """The other side answered with an error. `kind` is for programs, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RpcUnavailableError(BusError):
    """Nobody answered within the patience that was allowed."""


class RetryLater(Exception):  # noqa: N818 - a verdict of a handler, not a fault
    """Raised by a handler: deliver the message again after `delay_s`."""

    def __init__(self, reason: str, delay_s: float = 1.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class Rejected(Exception):  # noqa: N818 - a verdict of a handler, not a fault
    """Raised by a handler: the message can never be handled; it becomes a dead letter with this reason."""


class Abandoned(Exception):  # noqa: N818 - a verdict of a handler, not a fault
    """Raised by a handler: the message is another's by now. Nothing is answered: our answer would count for them."""
