"""Which format a file is in, told from its first objects, and the reader of each. Pure."""

from typing import Any

from opengyre.formats.atif import atif
from opengyre.formats.claude import TALK, claude_code
from opengyre.formats.codex import codex
from opengyre.formats.inspect import inspect_log
from opengyre.formats.model import Reader, Source
from opengyre.formats.nemo import nemo_gym, response_in
from opengyre.formats.recorded import recorded
from opengyre.formats.requests import chat_history, har, request_log
from opengyre.formats.swe import swe_agent
from opengyre.formats.values import FormatError, decode, decoded, obj, seq, string

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


def _first_objects(source: Source) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in source.lines():
        row = decoded(line)
        if row is None and not rows:
            break  # A document over many lines, or none at all: what is wrong is said by what follows.
        rows.append(obj(row))
        if number >= HEAD:
            break
    if rows and any(rows):
        return rows
    document = decode(source.data)
    return [obj(one) for one in (document[:HEAD] if isinstance(document, list) else [document])]


def _format_of(row: dict[str, Any]) -> str | None:
    kind = string(row.get("type"))
    if isinstance(obj(row.get("log")).get("entries"), list):
        return "har"
    if string(row.get("schema_version")).startswith("ATIF"):
        return "atif"
    if kind.startswith("traj.") or string(obj(row.get("event")).get("type")).startswith("traj."):
        return "gyre"
    if (kind in CODEX and "payload" in row) or ("instructions" in row and "id" in row and not kind):
        return "codex"
    if kind in CLAUDE_MARKS or (kind in TALK and "uuid" in row and "parentUuid" in row):
        return "claude-code"
    return _document(row)


def _document(row: dict[str, Any]) -> str | None:
    if isinstance(row.get("trajectory"), list):
        return "swe-agent"
    events = seq(row.get("events"))
    if any("event" in obj(event) for event in events[:HEAD]) or ("eval" in row and "samples" in row):
        return "inspect"
    if "responses_create_params" in row or (response_in(row) is not None and "request" not in row):
        return "nemo-gym"
    if "response" in row and ("request" in row or "messages" in row or "prompt" in row or "input" in row):
        return "requests"
    if "request" in row:
        return "requests"
    return "messages" if seq(row.get("messages")) else None
