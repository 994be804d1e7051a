"""How a message of a stream is shown: a line for people, a record for programs. Pure."""

import datetime
from typing import Any

import msgspec

from opengyre.shared.bus import Stored

BULK = 16
"""Lists longer than this are shown as their length."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""No JSON, or JSON that is nested too deeply to be read or written."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A message as JSON, the line of `--json` and of `--out`."""

    stream: str
    sequence: int
    subject: str
    time: float
    """When the broker stored it, seconds since the epoch."""
    id: str | None
    event: msgspec.Raw
    """The payload as it is, on one line; a JSON string where it is no JSON."""


def record(stream: str, stored: Stored) -> Record:
    """The message with its payload untouched, but for line breaks between its values, so that it is one line."""
    try:
        msgspec.json.decode(stored.payload)
        event = msgspec.Raw(stored.payload.replace(b"\n", b" "))
    except UNREADABLE:
        event = msgspec.Raw(msgspec.json.encode(stored.payload.decode("utf-8", "replace")))
    return Record(
        stream=stream,
        sequence=stored.sequence,
        subject=stored.subject,
        time=stored.timestamp,
        id=stored.message_id,
        event=event,
    )


def line(stored: Stored, width: int | None = None) -> str:
    """Sequence, time, subject and the event in short; cut at `width` characters."""
    when = datetime.datetime.fromtimestamp(stored.timestamp, datetime.UTC).strftime("%H:%M:%S.%f")[:-3]
    text = f"{stored.sequence:>7} {when} {stored.subject.removeprefix('gyre.v1.')} {digest(stored.payload)}"
    text = "".join(char if char.isprintable() else "·" for char in text)
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def digest(payload: bytes) -> str:
    """The payload as one line: type first, long lists as their length."""
    try:
        return _digest(msgspec.json.decode(payload))
    except UNREADABLE:
        return payload[:200].decode("utf-8", "replace")


def _digest(document: Any) -> str:
    if not isinstance(document, dict):
        return str(document)
    kind = document.pop("type", "")
    rest = " ".join(f"{name}={_short(value)}" for name, value in document.items())
    return f"{kind} {rest}".strip()


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > BULK:
        return f"[{len(value)}]"
    if isinstance(value, str):
        return value if value and " " not in value else repr(value)
    return msgspec.json.encode(value).decode()
