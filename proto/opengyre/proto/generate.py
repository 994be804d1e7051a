"""`python -m opengyre.proto.generate`: write the JSON Schemas, the AsyncAPI document and the first golden payloads.

`proto/schema/<type>.json`, `proto/asyncapi.json`, `proto/golden/<type>.json`. A golden payload is written once, when
its type is new, and never again: it is what was released. `--check` writes nothing and fails on drift.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from opengyre.proto import subjects
from opengyre.proto.base import tag_of
from opengyre.proto.codec import encode
from opengyre.proto.examples import examples

ROOT = Path(__file__).resolve().parents[2]

ADDRESSES: dict[str, str] = {
    subjects.TASKS: "gyre.v1.task.{run}.{task}.{event}",
    subjects.EPISODES: "gyre.v1.episode.{run}.dispatch",
    subjects.TRAJ: "gyre.v1.traj.{run}.{group}.{execution}.{event}",
    subjects.GROUPS: "gyre.v1.group.{run}.ready",
    subjects.UPDATES: "gyre.v1.update.{run}.{event}",
    subjects.WEIGHTS: "gyre.v1.weights.{run}.{event}",
    subjects.DECISIONS: "gyre.v1.decision.{run}",
    subjects.HOSTS: "gyre.v1.host.{host}.{event}",
    subjects.DLQ: "gyre.v1.dlq.{stream}.{consumer}",
}
"""Stream -> the form of its subjects."""


def documents() -> dict[str, str]:
    """Path below `proto/` -> content, of everything that is generated from the structs."""
    events = {tag_of(event): event for event in examples()}
    kinds = [type(event) for event in events.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    files = {f"schema/{tag}.json": _json(msgspec.json.schema(type(event))) for tag, event in events.items()}
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for stream, address in ADDRESSES.items():
        members = {tag: event for tag, event in events.items() if event.stream == stream}
        channels[stream] = {
            "address": address,
            "description": f"JetStream stream {stream}",
            "parameters": {
                name: {} for name in (part.strip("{}") for part in address.split(".") if part.startswith("{"))
            },
            "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in members},
        }
        operations[f"receive-{stream.lower()}"] = {"action": "receive", "channel": {"$ref": f"#/channels/{stream}"}}
    messages = {
        tag: {
            "name": tag,
            "contentType": "application/json",
            "summary": (type(event).__doc__ or type(event).__name__).strip().splitlines()[0],
            "headers": {
                "type": "object",
                "required": ["Nats-Msg-Id", "Gyre-Type"],
                "properties": {
                    "Nats-Msg-Id": {"type": "string", "description": "identity of the event"},
                    "Gyre-Type": {"type": "string", "const": tag},
                    "traceparent": {"type": "string"},
                },
            },
            "payload": {"$ref": f"#/components/schemas/{type(event).__name__}"},
            "examples": [{"payload": msgspec.json.decode(encode(event))}],
        }
        for tag, event in events.items()
    }
    files["asyncapi.json"] = _json(
        {
            "asyncapi": "3.0.0",
            "info": {"title": "OpenGyre events", "version": "1.0.0"},
            "defaultContentType": "application/json",
            "channels": channels,
            "operations": operations,
            "components": {"messages": messages, "schemas": components},
        }
    )
    return files


def golden() -> dict[str, str]:
    """Path below `proto/` -> first golden payload of every type."""
    return {f"golden/{tag_of(event)}.json": encode(event).decode() + "\n" for event in examples()}


def drift() -> list[str]:
    """What in `proto/` is not what the structs say."""
    wrong = [
        name
        for name, content in documents().items()
        if not (path := ROOT / name).exists() or path.read_text(encoding="utf-8") != content
    ]
    return wrong + [name for name in golden() if not (ROOT / name).exists()]


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode() + "\n"


def main() -> None:
    if "--check" in sys.argv[1:]:
        wrong = drift()
        sys.exit(f"not up to date, run make schemas: {', '.join(wrong)}" if wrong else None)
    for name, content in documents().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(content, encoding="utf-8")
    for name, content in golden().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
