"""What every reader makes of a foreign log: a stream of model calls. Pure.

A call has its prompt and its answer as messages, as token ids, or both. The prompt is whole, or (with `parent`) only
what it adds after the first `prefix` messages or tokens of the parent's prompt and answer. A message's identity is what
the model is shown of it: its role and its blocks; not call identifiers, cache marks or fields that are empty.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opengyre.formats.values import compact, mended
from opengyre.trees import Role

Unit = str
"""`tokens` or `messages`: what a tree of the log is made of."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: str
    text: str
    """What the model is shown, blocks joined, without reasoning."""
    reasoning: str = ""
    key: bytes = b""
    """16 bytes that stand for role and blocks."""


def message(role: str, blocks: Sequence[tuple[str, str]]) -> Message:
    """A message of `(kind, text)` blocks. Kinds: text, reasoning, call, result, other."""
    kept = [(kind, text) for kind, text in blocks if text]
    key = hashlib.blake2b(compact([role, kept]).encode(), digest_size=16).digest()
    shown = "\n".join(text for kind, text in kept if kind != "reasoning")
    thought = "\n".join(text for kind, text in kept if kind == "reasoning")
    return Message(role, shown, thought, key)


def visible(one: Message) -> str:
    """What a message shows without its reasoning, also where that is part of an answer's text, up to `</think>`; and
    without space around an answer, which clients trim or add."""
    if one.role != "assistant":
        return one.text
    _, mark, after = one.text.partition("</think>")
    return (after if mark else one.text).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCall:
    """One model call of a log."""

    call: str
    """Unique in its execution."""
    execution: str = ""
    """Calls of different executions are never each other's history."""
    group: str | None = None
    """Executions that answer the same task."""
    parent: str | None = None
    prefix: int | None = None
    """Of the parent's prompt and answer; None: all of it."""
    prompt: tuple[Message, ...] = ()
    answer: tuple[Message, ...] = ()
    prompt_ids: Sequence[int] | None = None
    sampled_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    agent: str = "main"
    """Which agent asked: main, or the name of a sub-agent."""
    role: Role | None = None
    """By the harness's profile; None: a sub-agent if another than main asked, else the shape of the tree tells it."""
    wanted: bool = False
    """It is one of several answers that were all asked for: none takes another's place."""
    after_compaction: bool = False
    """The log says that the history was summarised before this call."""
    refused: str | None = None
    """Why the log alone makes it useless; counted, never part of the tree."""
    usage: dict[str, int] = field(default_factory=dict)
    """What the API reported: input, output, cache_read, cache_creation."""

    @property
    def has_tokens(self) -> bool:
        return self.prompt_ids is not None and self.sampled_ids is not None


LINE_NOT_UTF8 = "a line is not UTF-8"


@dataclass(slots=True)
class Notes:
    """What a reader has to say beside the calls."""

    warnings: dict[str, int] = field(default_factory=dict)
    """Sentence -> how often."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Kind of entry -> how many have no part in the tree."""
    facts: dict[str, Any] = field(default_factory=dict)

    def warn(self, sentence: str) -> None:
        self.warnings[sentence] = self.warnings.get(sentence, 0) + 1

    def unreadable(self, line: bytes) -> None:
        """A line that is no JSON object was left out."""
        try:
            line.decode()
        except UnicodeDecodeError:
            self.warn(LINE_NOT_UTF8)
        else:
            self.warn("a line is no JSON object")


def nothing_beside(_name: str) -> bytes | None:
    """No file lies beside a log that came without a folder."""
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """The bytes of a log. `data` is bytes or a map of a file into memory; `beside` gives the file of a name that the
    log refers to, or None where it is absent."""

    name: str
    data: Any
    beside: Callable[[str], bytes | None] = nothing_beside

    def mended(self) -> "Source":
        """The same log as JSON that can be read: without a byte-order mark, without halves of surrogate pairs."""
        data = mended(self.data)
        return self if data is self.data else replace(self, data=data)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number (from 1) and content of each line that is not blank; one at a time in memory."""
        place, end, count = 0, len(self.data), 0
        while place < end:
            stop = self.data.find(b"\n", place)
            stop = end if stop < 0 else stop
            count += 1
            line = bytes(self.data[place:stop]).strip()
            place = stop + 1
            if line:
                yield count, line


Reader = Callable[[Source, Notes], Iterator[LogCall]]
