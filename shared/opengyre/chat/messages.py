"""OpenAI's messages as chat templates take them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opengyre.chat import hermes

Message = Mapping[str, Any]

_ROLES: Final = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


class ChatError(ValueError):
    """Messages that cannot be rendered; one sentence."""


def text_of(message: Message, where: str) -> str:
    """The message's text; raises `ChatError` for content that is not text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise ChatError(f"{where}: the content is {kind}; allowed are a string or a list of text parts")
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        raise ChatError(f"{where}: the content has a part that is not text; allowed are text parts")
    return "".join(texts)


def _calls(message: Message, where: str) -> list[dict[str, Any]]:
    given = message.get("tool_calls") or []
    if not isinstance(given, Sequence):
        raise ChatError(f"{where}: tool_calls must be a list of tool calls")
    calls: list[dict[str, Any]] = []
    for call in given:
        function = call.get("function") if isinstance(call, Mapping) else None
        match function:
            case {"name": str(), "arguments": str()}:
                calls.append({**call, "function": dict(function)})
            case _:
                raise ChatError(
                    f"{where}: a tool call must have function.name and function.arguments, which are strings"
                )
    return calls


def plain(messages: Sequence[Message], *, calls: bool) -> list[dict[str, Any]]:
    """The messages with a text as content each. `calls`: the template writes tool calls; else they become text.

    An assistant's message with `token_ids` has these in place of content. Raises `ChatError` naming the message.
    """
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in _ROLES:
            raise ChatError(f"{where}: the role is {role!r}; allowed are {', '.join(_ROLES)}")
        if role == "assistant" and message.get("token_ids") is not None:
            result.append({"role": role, "token_ids": tuple(message["token_ids"])})
            continue
        found: dict[str, Any] = {"role": _ROLES[role], "content": text_of(message, where)}
        found.update({name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None})
        made = _calls(message, where) if role == "assistant" else []
        if made and calls:
            for call in made:
                call["function"]["arguments"] = hermes.arguments_of(call["function"]["arguments"])
            found["tool_calls"] = made
        elif made:
            found["content"] = hermes.written(found["content"], made)
        result.append(found)
    return result


def with_system(messages: Sequence[dict[str, Any]], told: str, *, allowed: bool) -> list[dict[str, Any]]:
    """The messages with `told` at the end of the system prompt; where the template has no system prompt (not
    `allowed`), before the first message."""
    if not told:
        return list(messages)
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}".strip()}, *messages[1:]]
    if not allowed and first is not None and "content" in first:
        return [{**first, "content": f"{told}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
