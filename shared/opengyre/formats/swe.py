"""SWE-agent trajectories (`.traj`): each step with its messages and its answer. Pure.

`query` is the prompt. `messages`, of earlier releases, is the history as it stood after the step, its own answer and
observation included: the prompt is what stands before that answer. Both are whole, so that an observation that was
elided later shows as a rewritten history. A step that kept neither has no prompt and is refused.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from opengyre.formats.messages import blocks_of, chat_message, flat
from opengyre.formats.model import LogCall, Message, Notes, Source, message
from opengyre.formats.values import FormatError, compact, decode, obj, seq, string

LOOK_BACK = 64
"""Messages at the end, among which a step's own answer is looked for."""


class _Trajectory(msgspec.Struct):
    trajectory: list[msgspec.Raw]


def swe_agent(source: Source, _notes: Notes) -> Iterator[LogCall]:
    """Calls of a trajectory, step by step."""
    try:
        document = msgspec.json.decode(source.data, type=_Trajectory)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"it is no trajectory of SWE-agent: {error}") from error
    for place, raw in enumerate(document.trajectory):
        step = obj(decode(raw))
        given = [obj(one) for one in seq(step.get("query")) or seq(step.get("messages"))]
        own = None if step.get("query") else _own_answer(given, string(step.get("response")))
        if not given:
            yield LogCall(call=f"step-{place}", refused="no_prompt")
            continue
        yield LogCall(
            call=f"step-{place}",
            prompt=tuple(chat_message(one) for one in given[:own]),
            answer=(chat_message(given[own]) if own is not None else _answer(step),),
            agent=string(given[-1].get("agent")) or "main",
        )


def _own_answer(messages: list[dict[str, Any]], response: str) -> int | None:
    """Where the step's own answer stands among messages that were kept after it; None where it does not."""
    for place in range(len(messages) - 1, max(-1, len(messages) - 1 - LOOK_BACK), -1):
        if messages[place].get("role") == "assistant" and flat(messages[place].get("content")) == response:
            return place
    return None


def _answer(step: dict[str, Any]) -> Message:
    found = blocks_of(step.get("response"))
    for call in seq(step.get("tool_calls")):
        function = obj(obj(call).get("function"))
        found.append(("call", compact([string(function.get("name")), function.get("arguments")])))
    return message("assistant", found)
