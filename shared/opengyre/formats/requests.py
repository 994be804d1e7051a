"""Request logs (JSON lines of requests and responses) and HAR files. Pure.

A line has `request` and `response`, or the request's own fields beside `response`. A call's name is the response's
`id`, else the number of its line; a line that came twice is one call.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

from opengyre.formats.exchange import body_of, calls_of
from opengyre.formats.messages import chat_message
from opengyre.formats.model import LogCall, Message, Notes, Source
from opengyre.formats.values import FormatError, decode, decoded, obj, seq, string

PATHS = ("/completions", "/messages", "/responses")


def request_log(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of a request log, line by line."""
    for number, line in source.lines():
        row = decoded(line)
        if not isinstance(row, dict):
            notes.unreadable(line)
            continue
        request = row["request"] if "request" in row else {k: v for k, v in row.items() if k != "response"}
        response = row.get("response")
        name = string(obj(body_of(response)).get("id")) or f"line-{number}"
        execution = next((string(row.get(key)) for key in ("execution", "session_id", "trace_id") if row.get(key)), "")
        yield from calls_of(request, response, name, notes, execution)


class _Har(msgspec.Struct):
    log: "_HarLog"


class _HarLog(msgspec.Struct):
    entries: list[msgspec.Raw] = []


def har(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of a HAR file; entries that are no model calls are counted."""
    try:
        document = msgspec.json.decode(source.data, type=_Har)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"it is no HAR file: {error}") from error
    for number, raw in enumerate(document.log.entries, 1):
        entry = obj(decode(raw))
        request, response = obj(entry.get("request")), obj(entry.get("response"))
        path = string(request.get("url")).partition("?")[0].rstrip("/")
        if not path.endswith(PATHS) or request.get("method") != "POST":
            notes.ignored["other_request"] += 1
            continue
        given: dict[str, Any] = {"status": response.get("status"), "body": _content(obj(response.get("content")))}
        asked = {"body": string(obj(request.get("postData")).get("text")), "headers": request.get("headers")}
        name = string(obj(body_of(given)).get("id")) or f"entry-{number}"
        yield from calls_of(asked, given, name, notes)


def _content(content: dict[str, Any]) -> str:
    text = string(content.get("text"))
    if content.get("encoding") != "base64":
        return text
    try:
        return base64.b64decode(text, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


def chat_history(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of one finished conversation (`messages` of the OpenAI form): each answer with all that stands before."""
    history: list[Message] = []
    for number, entry in enumerate(seq(obj(decode(source.data)).get("messages"))):
        one = chat_message(entry)
        if one.role == "assistant":
            yield LogCall(call=f"message-{number}", prompt=tuple(history), answer=(one,))
        elif one.role == "exit":
            notes.ignored["exit"] += 1
            continue
        history.append(one)
