"""Identity of chat messages, so that a request finds the recorded calls that it goes on from. Pure.

`chain(messages)[i]` is a digest of the first `i + 1` messages. What clients add or drop when they send a message back
(empty fields, the form of text parts, the spelling of a tool call's JSON) does not change it; role, text, and the ids
and meaning of tool calls do. `turn_of` is the identity of an assistant's message alone, without the ids.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

Message = Mapping[str, Any]

_encoder = msgspec.json.Encoder(order="sorted")


def text_of(message: Message) -> str:
    """The text of a message whose content is a string, text parts, or absent."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""


def _plain(value: Any) -> Any:
    """JSON as a client that parsed and wrote it again may have left it: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def canonical(arguments: Any) -> Any:
    """The meaning of a tool call's arguments; text that is no JSON stands for itself."""
    if not isinstance(arguments, str):
        return _plain(arguments)
    try:
        return _plain(json.loads(arguments or "{}", parse_constant=str))
    except (ValueError, RecursionError):
        return arguments


def _calls(message: Message) -> list[tuple[Any, Any, Any]]:
    """Id, name and meaning of each tool call."""
    found = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(call, Mapping) and isinstance(function, Mapping):
            found.append((call.get("id"), function.get("name"), canonical(function.get("arguments"))))
    return found


def _digest(*parts: Any) -> str:
    return hashlib.sha256(_encoder.encode(parts)).hexdigest()


def extend(digest: str, message: Message) -> str:
    """The chain's next digest."""
    # White space around a text is no part of it: the template strips it, and clients do too.
    return _digest(digest, message.get("role"), text_of(message).strip(), _calls(message))


def chain(messages: Iterable[Message], begin: str = "") -> list[str]:
    """One digest a message, after `begin`."""
    digest, digests = begin, []
    for message in messages:
        digest = extend(digest, message)
        digests.append(digest)
    return digests


def turn_of(message: Message) -> str:
    """Identity of an assistant's message, wherever it stands and whatever ids its tool calls bear."""
    return _digest(text_of(message).strip(), [call[1:] for call in _calls(message)])


def tools_digest(prompt: str) -> str:
    """Where the chain begins when this is said of tools."""
    return _digest("tools", prompt) if prompt else ""


def answer(text: str, calls: Iterable[tuple[str, str, str]] = ()) -> dict[str, Any]:
    """The assistant's message that a completion becomes; `calls` are ids, names and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    made = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in calls
    ]
    return {**message, "tool_calls": made} if made else message
