"""Logs of Inspect: `.json`, or `.eval` (a zip with one JSON file a sample), or a bare list of events. Pure.

A sample's epoch is an execution. A `model` event is a call: its `input` is the whole prompt. Spans of type agent name
the agent that asked. Long texts stand once among a sample's attachments and are put back; messages that are kept in a
pool are looked up. An event without an input is refused, since nothing tells what was asked.
"""

import io
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import msgspec

from opengyre.formats.messages import chat_message, preamble
from opengyre.formats.model import LogCall, Message, Notes, Source
from opengyre.formats.values import FormatError, decode, mended, number, obj, seq, string

ATTACHMENT = re.compile(r"attachment://([0-9a-zA-Z_-]+)")
MAX_SAMPLE = 2**30
"""Bytes of one sample of an archive, unpacked."""


class _Log(msgspec.Struct):
    samples: list[msgspec.Raw] | None = None
    events: list[msgspec.Raw] | None = None


def inspect_log(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of all samples of a log."""
    if bytes(source.data[:2]) == b"PK":
        yield from _archive(source, notes)
        return
    try:
        document = msgspec.json.decode(source.data, type=_Log)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"it is no log of Inspect: {error}") from error
    if document.samples is None and document.events is None:
        raise FormatError("samples is missing; a log of Inspect has samples or events")
    if document.events is not None:
        yield from _sample({"events": [decode(raw) for raw in document.events]}, "", None, notes)
    for place, raw in enumerate(document.samples or ()):
        yield from _named(obj(decode(raw)), place, notes)


def _archive(source: Source, notes: Notes) -> Iterator[LogCall]:
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            names = sorted(name for name in archive.namelist() if re.fullmatch(r"samples/[^/]+\.json", name))
            if not names:
                raise FormatError("samples/ is missing; an .eval archive has a file for each sample")
            for place, name in enumerate(names):
                if archive.getinfo(name).file_size > MAX_SAMPLE:
                    raise FormatError(f"{name} is larger than {MAX_SAMPLE} bytes")
                yield from _named(obj(decode(mended(archive.read(name)))), place, notes)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise FormatError(f"its archive cannot be read: {error}; `inspect log dump` makes JSON of it") from error


def _named(sample: dict[str, Any], place: int, notes: Notes) -> Iterator[LogCall]:
    name = sample.get("id")
    task = str(name) if isinstance(name, str | int) else f"sample-{place}"
    yield from _sample(sample, f"{task}/{number(sample.get('epoch')) or 1}", task, notes)


def _sample(sample: dict[str, Any], execution: str, task: str | None, notes: Notes) -> Iterator[LogCall]:
    attachments = {name: string(text) for name, text in obj(sample.get("attachments")).items()}
    pool = seq(obj(sample.get("events_data")).get("messages"))
    spans: dict[str, tuple[str, str | None]] = {}
    compacted: set[str] = set()
    for place, entry in enumerate(seq(sample.get("events"))):
        event = obj(entry)
        kind = string(event.get("event"))
        if kind == "span_begin":
            named = string(event.get("name")) if event.get("type") == "agent" else ""
            spans[string(event.get("id"))] = (named, string(event.get("parent_id")) or None)
            continue
        agent = _agent(spans, string(event.get("span_id")))
        if kind == "compaction":
            compacted.add(agent)
        if kind != "model":
            notes.ignored[kind or "untyped"] += 1
            continue
        answered = [obj(choice).get("message") for choice in seq(obj(event.get("output")).get("choices"))]
        prompt = _prompt(event, pool, attachments)
        refused = "no_prompt" if not prompt else "no_answer" if not answered else None
        if event.get("error"):
            refused = "failed_request"
        yield LogCall(
            call=string(event.get("uuid")) or f"event-{place}",
            execution=execution,
            group=task,
            prompt=tuple(prompt),
            answer=tuple(chat_message(restored(one, attachments)) for one in answered[:1]),
            agent=agent,
            after_compaction=agent in compacted,
            refused=refused,
        )
        compacted.discard(agent)


def _prompt(event: dict[str, Any], pool: list[Any], attachments: dict[str, str]) -> list[Message]:
    given = seq(event.get("input"))
    for reference in seq(event.get("input_refs")):
        if isinstance(reference, list) and len(reference) == 2 and all(type(place) is int for place in reference):
            given = [*given, *pool[reference[0] : reference[1]]]
    if not given:
        return []
    return [*preamble(None, event.get("tools")), *(chat_message(restored(one, attachments)) for one in given)]


def _agent(spans: dict[str, tuple[str, str | None]], span: str) -> str:
    """The nearest span of type agent around it."""
    at: str | None = span
    for _ in range(len(spans)):
        if at is None or at not in spans:
            break
        name, at = spans[at]
        if name:
            return name
    return "main"


def restored(value: Any, attachments: dict[str, str]) -> Any:
    """The value with its attachments put back."""
    if not attachments:
        return value
    if isinstance(value, str):
        return ATTACHMENT.sub(lambda found: attachments.get(found[1], found[0]), value)
    if isinstance(value, list):
        return [restored(one, attachments) for one in value]
    if isinstance(value, dict):
        return {name: restored(one, attachments) for name, one in value.items()}
    return value
