"""Which format a file is in, told from its first objects, and the reader of each. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from opengyre.formats.atif import atif
from opengyre.formats.claude import TALK, claude_code
from opengyre.formats.codex import codex
from opengyre.formats.inspect import inspect_log
from opengyre.formats.model import Reader, Source
from opengyre.formats.nemo import nemo_gym
from opengyre.formats.recorded import recorded
from opengyre.formats.requests import chat_history, har, request_log
from opengyre.formats.swe import swe_agent
from opengyre.formats.values import FormatError, compact, decode, decoded, seq, string

READERS: dict[str, Reader] = {
    "requests": request_log,
    "har": har,
    "nemo-gym": nemo_gym,
    "atif": atif,
    "claude-code": claude_code,
    "codex": codex,
    "swe-agent": swe_agent,
    "inspect": inspect_log,
    "gyre": recorded,
    "messages": chat_history,
}
HEAD = 24
"""Lines that are looked at."""
CODEX = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})
CLAUDE_MARKS = frozenset({"summary", "queue-operation", "file-history-snapshot"})


def detect(source: Source) -> str:
    """The format's name; raises `FormatError` where it is none that is known."""
    if not len(source.data):
        raise FormatError("it is empty")
    if bytes(source.data[:2]) == b"PK":
        return "inspect"
    first = bytes(source.data[:4096]).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first not in (b"{", b"["):
        raise FormatError(f"it is no JSON; formats are {', '.join(READERS)}")
    for row in _first_objects(source):
        if found := _format_of(row):
            return found
    raise FormatError(f"its format is not known; name it with --format: {', '.join(READERS)}")


Row = dict[str, msgspec.Raw]
"""An object of which nothing is decoded yet: a first line may hold a whole execution."""
_row = msgspec.json.Decoder(Row)


def _row_of(data: Any) -> Row | None:
    try:
        return _row.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _first_objects(source: Source) -> Iterator[Row]:
    whole = True
    for number, line in source.lines():
        row = _row_of(line)
        if row is None and whole:
            break  # A document over many lines, or none at all: what is wrong is said by what follows.
        whole = False
        yield row or {}
        if number >= HEAD:
            break
    if whole:
        row = _row_of(source.data)
        if row is not None:
            yield row
            return
        document = decode(source.data)
        yield from (_row_of(compact(one)) or {} for one in seq(document)[:HEAD])


def _begin(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:64])


def _text(row: Row, name: str) -> str:
    raw = row.get(name)
    return string(decoded(raw)) if raw is not None and _begin(raw)[:1] == b'"' else ""


def _within(row: Row, name: str) -> Row:
    raw = row.get(name)
    return (_row_of(raw) if raw is not None else None) or {}


def _list(row: Row, name: str, *, filled: bool = False) -> bool:
    raw = row.get(name)
    begin = _begin(raw) if raw is not None else b""
    return begin[:1] == b"[" and not (filled and begin[1:].lstrip()[:1] == b"]")


def _format_of(row: Row) -> str | None:
    kind = _text(row, "type")
    if _list(_within(row, "log"), "entries"):
        return "har"
    if _text(row, "schema_version").startswith("ATIF"):
        return "atif"
    if kind.startswith("traj.") or _text(_within(row, "event"), "type").startswith("traj."):
        return "gyre"
    if (kind in CODEX and "payload" in row) or ("instructions" in row and "id" in row and not kind):
        return "codex"
    if kind in CLAUDE_MARKS or (kind in TALK and "uuid" in row and "parentUuid" in row):
        return "claude-code"
    return _document(row)


def _document(row: Row) -> str | None:
    if _list(row, "trajectory"):
        return "swe-agent"
    if ("eval" in row and "samples" in row) or (_list(row, "events") and b'"event"' in bytes(row["events"])):
        return "inspect"
    answered = _list(row, "output") or any(_list(_within(row, name), "output") for name in ("response", "input"))
    if "responses_create_params" in row or (answered and "request" not in row):
        return "nemo-gym"
    if "request" in row or ("response" in row and {"messages", "prompt", "input"} & set(row)):
        return "requests"
    return "messages" if _list(row, "messages", filled=True) else None
