"""Identity of chat messages: a chain of digests, so that a request finds the recorded call that it extends. Pure.

`chain(messages)[i]` is a digest of the first `i + 1` messages. What clients add or drop when they send a message back
(empty fields, the form of text parts) does not change it; role, text and tool calls do.
"""

import hashlib
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


def extend(digest: str, message: Message) -> str:
    """The chain's next digest."""
    tools = [
        (call.get("id"), call.get("function")) for call in message.get("tool_calls") or () if isinstance(call, Mapping)
    ]
    # White space around a text is no part of it: the template strips it, and clients do too.
    canonical = _encoder.encode((digest, message.get("role"), text_of(message).strip(), tools))
    return hashlib.sha256(canonical).hexdigest()


def chain(messages: Iterable[Message]) -> list[str]:
    """One digest a message."""
    digest, digests = "", []
    for message in messages:
        digest = extend(digest, message)
        digests.append(digest)
    return digests


def answer(text: str) -> dict[str, Any]:
    """The assistant's message that a call's completion becomes."""
    return {"role": "assistant", "content": text}


def digest_of(body: bytes) -> str:
    """Identity of a client's request body."""
    return hashlib.sha256(body).hexdigest()
