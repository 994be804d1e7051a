"""The chat template, as data: which markers and text a message becomes.

A marker opens a message and no marker closes one, but an assistant's turn, which the end-of-turn token closes (the
policy samples it). So the rendering of a longer history is the rendering of the shorter one, what was sampled, and
`suffix` of the new messages: a prompt extends the previous prompt and completion token by token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opengyre.tiny import tools

BOS: Final = "<|bos|>"
END: Final = "<|end|>"
SYSTEM: Final = "<|system|>"
TASK: Final = "<|task|>"
OBSERVATION: Final = "<|observation|>"
COMMAND: Final = "<|command|>"
SPECIALS: Final = (BOS, END, SYSTEM, TASK, OBSERVATION, COMMAND)

_MARKERS: Final = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": TASK,
    "tool": OBSERVATION,
    "function": OBSERVATION,
    "assistant": COMMAND,
}

JINJA: Final = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|command|> ' + (m.content | trim) + '<|end|>' }}"
    "{% elif m.role in ['system', 'developer'] %}{{ '<|system|> ' + (m.content | trim) }}"
    "{% elif m.role == 'user' %}{{ '<|task|> ' + (m.content | trim) }}"
    "{% else %}{{ '<|observation|> ' + (m.content | trim) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|command|>' }}{% endif %}"
)
"""The same template for engines that render chats themselves."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special token, one of `SPECIALS`."""

    token: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, to be tokenised."""

    text: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids, to be taken as they are."""

    ids: tuple[int, ...]


Piece = Special | Text | Ids


class TemplateError(ValueError):
    """Messages that cannot be rendered; the text names the message and what is allowed."""


def _text(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
        raise TemplateError(f"{where}: the content has a part that is not text; allowed are text parts")
    if content is None:
        return ""
    raise TemplateError(
        f"{where}: the content is {type(content).__name__}; allowed are a string or a list of text parts"
    )


def _turn(message: Mapping[str, Any], where: str) -> str:
    """An assistant's turn: its text, or its tool calls as the policy would have written them."""
    text = _text(message, where)
    calls = message.get("tool_calls")
    if not calls:
        return text
    if not isinstance(calls, Sequence):
        raise TemplateError(f"{where}: tool_calls must be a list of tool calls")
    try:
        return tools.written(text, calls, where)
    except ValueError as error:
        raise TemplateError(str(error)) from error


def pieces(messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> list[Piece]:
    """What the messages become, in order, without the leading `BOS`.

    An assistant message with `token_ids` is taken as those ids, closed by `END` where they do not end with it (the
    caller compares: see `TinyTokenizer`).
    """
    result: list[Piece] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in _MARKERS:
            raise TemplateError(f"{where}: the role is {role!r}; allowed are {', '.join(_MARKERS)}")
        result.append(Special(_MARKERS[role]))
        if role == "assistant" and message.get("token_ids") is not None:
            result.append(Ids(tuple(message["token_ids"])))
        else:
            text = _turn(message, where) if role == "assistant" else _text(message, where)
            result.append(Text(" " + text.strip()))
        if role == "assistant":
            result.append(Special(END))
    if generation_prompt:
        result.append(Special(COMMAND))
    return result
