"""From chat messages to token ids: token in, token out. Pure.

What the model sampled is taken as the ids that it sampled, never encoded again; only what is new is rendered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from opengyre.rollout.history import History
from opengyre.rollout.messages import Message, chain


class Renderer(Protocol):
    """A tokenizer with its chat template (`opengyre.tiny.tokenizer` has the tiny policy's)."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]: ...

    def render_suffix(
        self, messages: Sequence[Message], *, closed: bool = True, generation_prompt: bool = True
    ) -> list[int]: ...

    def completion_text(self, sampled: Sequence[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """`tokens[:prefix]` are prompt and completion of the call `parent`."""

    tokens: tuple[int, ...]
    parent: str | None
    prefix: int
    digest: str
    """Chain digest of the messages."""
    host: str | None = None
    """Who served the parent last, and may still hold its keys and values."""


def build(messages: Sequence[Message], history: History, renderer: Renderer) -> Prompt:
    """Token ids of a request; raises `ValueError` (the template's) for messages that cannot be rendered."""
    digests = chain(messages)
    found = history.extended_by(digests)
    if found is None:
        return Prompt(tuple(renderer.render(messages)), None, 0, digests[-1] if digests else "")
    parent, covered = found
    before = history.tokens(parent)
    closed = bool(parent.sampled_ids) and parent.sampled_ids[-1] in renderer.stop_token_ids
    new = renderer.render_suffix(messages[covered:], closed=closed)
    return Prompt((*before, *new), parent.call, len(before), digests[-1], parent.hosts[-1] if parent.hosts else None)
