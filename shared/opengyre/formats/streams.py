"""Streamed answers (server-sent events) put together into the whole response. Pure."""

from collections.abc import Iterable
from typing import Any

from opengyre.formats.values import decoded, obj, seq, string

ENDS = ("response.completed", "response.incomplete", "response.failed")


def is_stream(text: str) -> bool:
    """Whether a body is a stream of server-sent events."""
    return text.lstrip()[:6] in ("data: ", "event:") or text.lstrip().startswith(("data:", "event:"))


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream's data lines, in order."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        name, _, data = line.partition(":")
        if name == "data" and data.strip() not in ("", "[DONE]"):
            value = decoded(data.strip())
            if isinstance(value, dict):
                found.append(value)
    return found


def whole(chunks: Iterable[Any]) -> dict[str, Any] | None:
    """The response that the chunks make, in the form that the API gives without streaming; None where the stream ended
    before its answer did, or is of no API that is known."""
    parts = [obj(chunk) for chunk in chunks]
    kinds = {string(part.get("type")) for part in parts}
    if "message_start" in kinds:
        return _anthropic(parts)
    if any(kind.startswith("response.") for kind in kinds):
        return next((obj(part.get("response")) for part in parts if part.get("type") in ENDS), None)
    return _chat(parts)


def _anthropic(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    response: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    ended = False
    for part in parts:
        kind, place = part.get("type"), part.get("index")
        if not isinstance(place, int | None):
            continue
        if kind == "message_start":
            response = dict(obj(part.get("message")))
        elif kind == "content_block_start":
            blocks[place] = dict(obj(part.get("content_block")))
        elif kind == "content_block_delta":
            _grow(blocks.setdefault(place, {"type": "text"}), obj(part.get("delta")))
        elif kind == "message_delta":
            response.update(obj(part.get("delta")))
            response["usage"] = {**obj(response.get("usage")), **obj(part.get("usage"))}
        ended = ended or kind == "message_stop"
    for block in blocks.values():
        if "partial" in block:
            block["input"] = decoded(block.pop("partial") or "{}")
    response["content"] = [blocks[place] for place in sorted(blocks, key=lambda place: place or 0)]
    return {"type": "message", **response} if ended else None


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for field, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "partial")):
        if isinstance(delta.get(field), str):
            block[target] = string(block.get(target)) + delta[field]


def _chat(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    choices: dict[int, dict[str, Any]] = {}
    response: dict[str, Any] = {}
    for part in parts:
        for name in ("id", "model", "usage", "prompt_token_ids"):
            if part.get(name) is not None:
                response[name] = part[name]
        for one in seq(part.get("choices")):
            piece = obj(one)
            place = piece.get("index", 0)
            if isinstance(place, int):
                _add(choices.setdefault(place, {"index": place, "message": {"role": "assistant"}}), piece)
    if not choices or any(choice.get("finish_reason") is None for choice in choices.values()):
        return None
    for choice in choices.values():
        calls = choice["message"].pop("calls", {})
        if calls:
            choice["message"]["tool_calls"] = [calls[place] for place in sorted(calls)]
    response["choices"] = [choices[place] for place in sorted(choices)]
    return response


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta, into = obj(piece.get("delta")), choice["message"]
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if isinstance(delta.get(name), str):
            into[name] = string(into.get(name)) + delta[name]
    for call in seq(delta.get("tool_calls")):
        part = obj(call)
        place = part.get("index", 0)
        if isinstance(place, int):
            known = into.setdefault("calls", {}).setdefault(place, {"function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                known["function"][name] += string(obj(part.get("function")).get(name))
    if isinstance(piece.get("text"), str):
        choice["text"] = string(choice.get("text")) + piece["text"]
    if piece.get("token_ids"):
        choice["token_ids"] = [*seq(choice.get("token_ids")), *seq(piece["token_ids"])]
    logprobs = seq(obj(piece.get("logprobs")).get("content"))
    if logprobs:
        choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs)
    for name in ("finish_reason", "prompt_token_ids"):
        if piece.get(name) is not None:
            choice[name] = piece[name]
