"""A chat template with turns that are token ids: what it makes around them, and what it makes of a history that grew.

Invariants:
- Turns that were sampled are rendered as marks and cut out of the text again, so their ids are never encoded anew.
- Text of a message never becomes a special token, whatever it says: a guard, a character that occurs in no message, is
  put into what looks like one, and taken out again before the text is encoded.
- A suffix is given only where the template was seen to leave alone what stands before: for these roles, histories of
  several shapes, and a turn with and without thoughts. Such a template is append-only there.
- Where it is not (`rewrites`: thoughts of former turns are dropped, tools move along), a whole history is rendered, and
  a sampled turn stands in its own ids only where the template kept its text.

White space around a message is no part of it: templates strip it, and clients do too. Rendering is the template's own
(`Render`), deterministic but for templates that print the date.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from opengyre.chat import hermes
from opengyre.chat.messages import ChatError, Message, plain, with_system
from opengyre.tiny.tools import OPEN, Tool

Ids = tuple[int, ...]
Shape = tuple[str, ...]
"""Roles of messages."""


class Render(Protocol):
    """The template: messages and tools (OpenAI's shape; None: none) to text. Raises `ChatError`."""

    def __call__(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation_prompt: bool, /
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Text:
    """Text with the template's special tokens in it, and `guard` within what only looks like one."""

    text: str
    guard: str


Piece = Text | Ids

PRIVATE: Final = range(0xE000, 0xF8FF)
"""Code points that stand for nothing, of which marks and guards are made."""
MOST_SHAPES: Final = 256
"""Whose suffixes are remembered."""
_PLAIN: Final = "alpha beta"
_THOUGHT: Final = "<think>\nalpha\n</think>\n\nbeta"
_BEFORE: Final[tuple[Shape, ...]] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
    ("system", "user", "assistant", "tool"),
)
"""Histories before the turn that a suffix follows."""
_TOOL: Final = {"name": "probe", "description": "a probe", "parameters": {"type": "object", "properties": {}}}


def _unused(texts: Iterable[str], count: int) -> list[str]:
    used = set().union(*map(set, texts))
    free = [chr(code) for code in PRIVATE if chr(code) not in used]
    if len(free) < count:
        raise ChatError("messages use every private character of Unicode; allowed are those that leave some free")
    return free[:count]


def _texts(value: Any) -> Iterator[str]:
    """Every text within a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _probe(shape: Shape, turn: str) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": turn if role == "assistant" else f"text{number}"} for number, role in enumerate(shape)
    ]


class ChatTemplate:
    """`source` is the template's text, `specials` the texts of special tokens."""

    def __init__(self, render: Render, source: str, specials: Sequence[str]) -> None:
        self._render = render
        self.tools = "tools" in source and OPEN in source
        """Whether it tells of tools, and writes calls, as Hermes and Qwen do."""
        self._calls = self.tools and "tool_calls" in source
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first))) if specials else None
        self._suffix_shape = functools.lru_cache(MOST_SHAPES)(self._probed)
        self._system = self._works([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        self.rewrites = not all(self._works_alike(shape) for shape in (("user",), ("tool",)))
        """Whether it changes what stands before where a message comes."""

    def _works(self, messages: list[dict[str, Any]]) -> bool:
        try:
            self._render(messages, None, True)
        except ChatError:
            return False
        return True

    def _works_alike(self, shape: Shape) -> bool:
        """Whether a suffix of this shape can be had, or none of the histories allows such messages."""
        before, refused = self._suffix_shape(shape, tools=False, generation_prompt=True)
        return before is not None or refused

    def _probed(self, shape: Shape, *, tools: bool, generation_prompt: bool) -> tuple[Shape | None, bool]:
        """A history before which the suffix of `shape` is what it is before any; and whether all refused it."""
        offered = hermes.functions([_TOOL]) if tools else None
        found: dict[str, Shape] = {}
        for before in _BEFORE:
            for turn in (_PLAIN, _THOUGHT):
                history = _probe(before, turn)
                after = [{"role": role, "content": f"new{number}"} for number, role in enumerate(shape)]
                try:
                    begin = self._render(history, offered, True)
                    whole = self._render(
                        [*history, {"role": "assistant", "content": turn}, *after], offered, generation_prompt
                    )
                except ChatError:
                    continue
                if not whole.startswith(begin + turn):
                    return None, False
                found[whole[len(begin) + len(turn) :]] = before
        if len(found) != 1:
            return None, not found
        return next(iter(found.values())), False

    def _marked(
        self, messages: Sequence[dict[str, Any]], decode: Callable[[Ids], str]
    ) -> tuple[list[dict[str, Any]], list[Ids], list[str], str, str]:
        """The messages, guarded, with marks as content of sampled turns; these turns; their texts; mark; guard."""
        turns = [message["token_ids"] for message in messages if "token_ids" in message]
        texts = [decode(turn).strip() for turn in turns]
        mark, guard = _unused((*texts, *_texts(list(messages))), 2)
        marked: list[dict[str, Any]] = []
        number = 0
        for message in messages:
            if "token_ids" in message:
                marked.append({"role": "assistant", "content": f"{mark}{number}{mark}"})
                number += 1
            else:
                marked.append({name: self._guarded(value, guard) for name, value in message.items()})
        return marked, turns, [self._guarded(text, guard) for text in texts], mark, guard

    def _guarded(self, value: Any, guard: str) -> Any:
        if self._specials is None:
            return value
        if isinstance(value, str):
            return self._specials.sub(lambda found: found[0][0] + guard + found[0][1:], value)
        if isinstance(value, dict):
            return {name: self._guarded(item, guard) for name, item in value.items()}
        return [self._guarded(item, guard) for item in value] if isinstance(value, list) else value

    def _offered(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template is to have them: told by itself or in the system prompt."""
        if tools and self.tools:
            return messages, hermes.functions(tools)
        return with_system(messages, hermes.prompt_of(tools), allowed=self._system), None

    def pieces(
        self,
        messages: Sequence[Message],
        decode: Callable[[Ids], str],
        *,
        tools: Sequence[Tool] = (),
        generation_prompt: bool = True,
    ) -> list[Piece]:
        """What the messages become, in order; `decode` gives the text of a sampled turn. Raises `ChatError`."""
        given, offered = self._offered(plain(messages, calls=self._calls), tools)
        marked, turns, texts, mark, guard = self._marked(given, decode)
        text = self._render(marked, offered, generation_prompt)
        parts = _cut(text, mark, len(turns))
        if not (self.rewrites and turns):
            return _joined(parts, turns, guard)
        said = iter(texts)
        real = [{**message, "content": next(said)} if _is_mark(message, mark) else message for message in marked]
        return _aligned(self._render(real, offered, generation_prompt), parts, turns, texts, guard)

    def suffix(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), generation_prompt: bool = True
    ) -> Text | None:
        """What follows a sampled turn where these messages come after it, the turn's end included; None where that
        depends on what stands before, or changes it. Raises `ChatError`."""
        new = plain(messages, calls=self._calls)
        shape = tuple(message["role"] for message in new)
        native = bool(tools) and self.tools
        before, _ = self._suffix_shape(shape, tools=native, generation_prompt=generation_prompt)
        if before is None:
            return None
        turn = {"role": "assistant", "token_ids": ()}
        marked, _, _, mark, guard = self._marked([*_probe(before, _PLAIN), turn, *new], lambda _: "")
        offered = hermes.functions(tools) if native else None
        text = self._render(marked, offered, generation_prompt)
        return Text(_cut(text, mark, 1)[1], guard)


def _is_mark(message: dict[str, Any], mark: str) -> bool:
    return message["role"] == "assistant" and str(message["content"]).startswith(mark)


def _cut(text: str, mark: str, count: int) -> list[str]:
    """The text between the marks `0` to `count - 1`."""
    parts: list[str] = []
    for number in range(count):
        before, found, text = text.partition(f"{mark}{number}{mark}")
        if not found:
            raise ChatError(f"the chat template leaves out turn {number} of the assistant")
        parts.append(before)
    return [*parts, text]


def _joined(parts: Sequence[str], turns: Sequence[Ids], guard: str) -> list[Piece]:
    pieces: list[Piece] = [Text(parts[0], guard)]
    for part, turn in zip(parts[1:], turns, strict=True):
        pieces += [turn, Text(part, guard)]
    return pieces


def _aligned(real: str, parts: Sequence[str], turns: Sequence[Ids], texts: Sequence[str], guard: str) -> list[Piece]:
    """The text `real`, with those turns in their own ids whose texts stand between the parts that surround them.

    The pieces' text is `real`, whatever was changed in it.
    """
    pieces: list[Piece] = []
    kept, begin = 0, 0
    for number, (turn, text) in enumerate(zip(turns, texts, strict=True)):
        here = parts[number] + text + parts[number + 1]
        place = real.find(here, begin)
        if place < 0:
            continue  # rewritten: it stands in the text as the template has it
        start = place + len(parts[number])
        pieces += [Text(real[kept:start], guard), turn]
        kept = begin = start + len(text)
    return [*pieces, Text(real[kept:], guard)]
