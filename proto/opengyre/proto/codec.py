"""Encoding and decoding of events, and the upcasters that keep old payloads readable.

Every version of every type that was released has a golden payload (`golden/<type>.json`) that must still decode.
When `traj.call.v2` comes, its struct replaces `Call` in the union and `UPCASTERS["traj.call.v1"]` turns the old JSON
object into the new one.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from opengyre.proto.base import Event
from opengyre.proto.decision import Decision
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady
from opengyre.proto.host import HostCommand, HostStateChanged
from opengyre.proto.task import GroupConsumed, GroupOverdue, GroupScored, TaskAdmitted, TaskSubmitted
from opengyre.proto.traj import (
    Call,
    Ended,
    Forked,
    Overdue,
    Progressed,
    Resumed,
    SandboxOpened,
    Started,
    Stepped,
    Suspended,
    TakenOver,
    ToolResult,
    Verified,
)
from opengyre.proto.update import Committed, Contributed, Joined, Left, Opened, RunFinished
from opengyre.proto.weights import WeightsApplied, WeightsPublished, WeightsRefused

AnyEvent = (
    TaskSubmitted | TaskAdmitted | GroupOverdue | GroupScored | GroupConsumed
    | EpisodeDispatch
    | Started | TakenOver | SandboxOpened | Forked | Stepped | Call | ToolResult | Suspended | Resumed | Progressed
    | Verified | Ended | Overdue
    | GroupReady
    | Opened | Joined | Contributed | Left | Committed | RunFinished
    | WeightsPublished | WeightsApplied | WeightsRefused
    | HostCommand | HostStateChanged
    | Decision
    | DeadLetter
)  # fmt: skip

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: dict[str, Upcaster] = {}
"""Type of a former version -> what turns its JSON object into that of the next version (with the next `type`)."""


class UndecodableError(ValueError):
    """A payload that is no event of ours; the message says where it is wrong."""


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(AnyEvent)  # type: ignore[arg-type] - a union


def encode(event: Event) -> bytes:
    """One line of JSON whose first field is `type`."""
    return _encoder.encode(event)


def upcast(document: dict[str, Any]) -> dict[str, Any]:
    """Bring a JSON object of any released version to today's."""
    seen: set[str] = set()
    while (kind := document.get("type")) in UPCASTERS:
        if kind in seen:
            raise UndecodableError(f"the upcasters of {kind} go in a circle")
        seen.add(str(kind))
        document = UPCASTERS[str(kind)](document)
    return document


def decode(payload: bytes, kind: str | None = None) -> Event:
    """The event in `payload`; `kind` is the `Gyre-Type` header, which spares a look into the payload."""
    try:
        if UPCASTERS and (kind is None or kind in UPCASTERS):
            return msgspec.convert(upcast(msgspec.json.decode(payload, type=dict[str, Any])), AnyEvent)
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise UndecodableError(str(error)) from error
    except RecursionError as error:
        raise UndecodableError("JSON is nested too deeply") from error
