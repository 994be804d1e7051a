"""The base of every event, and the error that a request can be answered with."""

from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An immutable fact. The class's tag is its type and version, and the first field of its JSON."""

    stream: ClassVar[str]

    def event_id(self) -> str:
        """The identity that makes a retried publish one message (`Nats-Msg-Id`)."""
        raise NotImplementedError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A value inside an event, a request or a bucket."""


class RpcError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused. `kind` is for programs, `message` is one sentence for people."""

    kind: str
    message: str


def tag_of(event: Event) -> str:
    """`traj.call.v1` for a `Call`."""
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
