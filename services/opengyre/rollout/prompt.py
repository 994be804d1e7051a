"""From a request to token ids: token in, token out. Pure.

What the model sampled is taken as the ids that it sampled, never encoded again; only what is new is rendered. A request
whose messages begin with those of a recorded call and its answer extends that call. Any other is rendered as a whole,
with each turn that the model said in its own ids, and then looked for among the recorded calls token by token: what it
shares with the nearest is its prefix, whose end is the exact divergence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opengyre.proto.traj import Call, Transition
from opengyre.rollout.ask import Ask
from opengyre.rollout.history import History
from opengyre.rollout.messages import Message, chain, text_of, tools_digest, turn_of
from opengyre.tiny.tools import Said


class Renderer(Protocol):
    """A tokenizer with its chat template (`opengyre.tiny.tokenizer` has the tiny policy's, `opengyre.chat.hf` that of
    any other model directory)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token(self) -> int:
        """No token of text stands for more characters."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def begin(self, text: str) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]: ...

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        closed: bool = True,
        generation_prompt: bool = True,
    ) -> list[int] | None:
        """None where the template changes what stands before these messages."""
        ...

    def tools_prompt(self, offered: Sequence[Mapping[str, Any]]) -> str: ...

    def read_turn(self, text: str, offered: Sequence[Mapping[str, Any]], choice: str | None = None) -> Said: ...

    def settled(self, text: str, offered: Sequence[Mapping[str, Any]], choice: str | None = None) -> str: ...

    def opening(self, offered: Sequence[Mapping[str, Any]], choice: str) -> list[int]: ...

    @property
    def call_end(self) -> str: ...

    def completion_text(self, sampled: Sequence[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """`tokens[:prefix]` are the beginning of prompt and completion of the call `parent`."""

    tokens: tuple[int, ...]
    parent: str | None
    prefix: int
    digest: str
    """Chain digest of the messages; empty where there are none."""
    host: str | None = None
    """Who served the parent last, and may still hold its keys and values."""
    transition: Transition = "root"
    forced: int = 0
    """How many of the last tokens begin the answer for the policy."""


def size_of(ask: Ask) -> int:
    """Characters of a request's text that its prompt is sure to have, tools left out. Nothing is encoded for it."""
    # The template strips a message, and nothing else of it is lost, also where the turn stands in its own ids.
    return len(ask.text or "") + sum(len(text_of(message).strip()) for message in ask.messages)


def fewest_tokens(ask: Ask, renderer: Renderer) -> int:
    """The prompt has at least so many tokens; it is not encoded for this."""
    return -(-size_of(ask) // renderer.longest_token) + len(ask.tokens or ())


def prompt_of(ask: Ask, history: History, renderer: Renderer) -> Prompt:
    """Token ids of a request; raises `ValueError` (the template's) for one that cannot be rendered."""
    if ask.tokens is not None:
        return _placed(ask.tokens, history, "", said=False)
    if ask.text is not None:
        return _continued(ask.text, history, renderer)
    prompt = build(ask.messages, history, renderer, ask.tools)
    if ask.choice is None:
        return prompt
    begin = renderer.opening(ask.tools, ask.choice)
    return replace(prompt, tokens=(*prompt.tokens, *begin), forced=len(begin))


def build(
    messages: Sequence[Message], history: History, renderer: Renderer, tools: Sequence[Mapping[str, Any]] = ()
) -> Prompt:
    """Token ids of a chat; raises `ValueError` (the template's) for messages that cannot be rendered."""
    digests = chain(messages, tools_digest(renderer.tools_prompt(tools)))
    found = history.extended_by(digests)
    parent, before = None, []
    if found is not None and not _said(messages[found[1] :]):
        parent, covered = found
        before = history.tokens(parent)
        closed = bool(parent.sampled_ids) and parent.sampled_ids[-1] in renderer.stop_token_ids
        new = renderer.render_suffix(messages[covered:], tools=tools, closed=closed)
        if new is not None:
            host = parent.hosts[-1] if parent.hosts else None
            return Prompt((*before, *new), parent.call, len(before), digests[-1], host, "extend")
    tokens = renderer.render(_in_own_ids(messages, history), tools=tools)
    prompt = _placed(tuple(tokens), history, digests[-1] if digests else "", said=_said(messages))
    if parent is not None and (prompt.parent, prompt.prefix) == (parent.call, len(before)):
        return replace(prompt, transition="extend")  # the template might have changed what stands before, and did not
    return prompt


def _said(messages: Sequence[Message]) -> bool:
    """Whether the model, or who was put in its place, said one of these."""
    return any(message.get("role") == "assistant" for message in messages)


def _in_own_ids(messages: Sequence[Message], history: History) -> list[Message]:
    """The messages, each that the model said with the ids that it sampled."""
    result: list[Message] = []
    after = -1
    for message in messages:
        call = history.said(turn_of(message), after) if message.get("role") == "assistant" else None
        if call is None:
            result.append(message)
        else:
            after = max(after, history.place(call))
            result.append({"role": "assistant", "token_ids": turn_ids(call)})
    return result


def turn_ids(call: Call) -> tuple[int, ...]:
    """The token ids of a turn: those that begin it, and those that were sampled."""
    return (*call.prompt_ids[len(call.prompt_ids) - call.forced :], *call.sampled_ids)


def _placed(tokens: tuple[int, ...], history: History, digest: str, *, said: bool) -> Prompt:
    """`said`: there are turns of the model in it, so that it goes on from something."""
    found = history.nearest(tokens)
    if found is None:
        return Prompt(tokens, None, 0, digest)
    parent, prefix = found
    end = parent.prefix_tokens + len(parent.prompt_ids) + len(parent.sampled_ids)
    kind: Transition
    if prefix == end:
        kind = "realign" if said else "extend"
    else:
        kind = "fork" if said or history.samples_within(parent, prefix) else "branch"
    return Prompt(tokens, parent.call, prefix, digest, parent.hosts[-1] if parent.hosts else None, kind)


def _continued(text: str, history: History, renderer: Renderer) -> Prompt:
    """A text prompt: the longest recorded text that it begins with is taken in its own ids.

    The last token of a call that a stop string ended may stand for more than that string, which the client was not
    given and so may not go on with; then that token is encoded again.
    """
    best: tuple[Call, str, int] | None = None
    for call in reversed(history.calls):
        if call.api != "completions":
            continue
        tokens = history.tokens(call)
        for keep in (len(tokens), *([len(tokens) - 1] if call.stop is not None else [])):
            before = renderer.decode(tokens[:keep])
            if text.startswith(before):
                if best is None or len(before) > len(best[1]):
                    best = call, before, keep
                break
    if best is None:
        return _placed(tuple(renderer.begin(text)), history, "", said=False)
    call, before, keep = best
    tokens = history.tokens(call)
    host = call.hosts[-1] if call.hosts else None
    kind: Transition = "extend" if keep == len(tokens) else "realign"
    return Prompt((*tokens[:keep], *renderer.encode(text[len(before) :])), call.call, keep, "", host, kind)
