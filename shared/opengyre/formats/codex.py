"""Codex rollouts: JSON lines of session metadata, items of the Responses API and events. Pure.

One answer is a run of items that the model made; it ends at a tool's output, a user's message, or the event that
counts its tokens. `compacted` replaces the history, `thread_rolled_back` takes the last turns of the user off it.
The first releases wrote bare items, without an envelope.
"""

from collections.abc import Iterator
from typing import Any

from opengyre.formats.messages import preamble, response_item
from opengyre.formats.model import LogCall, Message, Notes, Source, message
from opengyre.formats.values import decoded, number, obj, seq, string

MADE = frozenset(
    {"reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call", "tool_search_call"}
)


class _Thread:
    """The history as the model is shown it. Invariant: `answer` is what the call under way has made so far."""

    def __init__(self) -> None:
        self.history: list[Message] = []
        self.turns: list[int] = []
        """Where in the history each message of the user begins."""
        self.answer: list[Message] = []
        self.usage: dict[str, int] = {}
        self.calls = 0
        self.compacted = False

    def close(self) -> Iterator[LogCall]:
        """The call under way, ended."""
        if not self.answer:
            return
        yield LogCall(
            call=f"call-{self.calls}",
            prompt=tuple(self.history),
            answer=tuple(self.answer),
            after_compaction=self.compacted,
            usage=self.usage,
        )
        self.history += self.answer
        self.calls, self.answer, self.usage, self.compacted = self.calls + 1, [], {}, False

    def take(self, item: dict[str, Any]) -> Iterator[LogCall]:
        one = response_item(item)
        kind = string(item.get("type"))
        if kind in MADE or (kind == "message" and item.get("role") == "assistant"):
            self.answer.append(one)
            return
        yield from self.close()
        if item.get("role") == "user":
            self.turns.append(len(self.history))
        self.history.append(one)

    def compact(self, payload: dict[str, Any]) -> Iterator[LogCall]:
        yield from self.close()
        replaced = seq(payload.get("replacement_history"))
        summary = string(payload.get("message"))
        self.history = [response_item(one) for one in replaced]
        if not replaced and summary:
            self.history = [message("user", [("text", summary)])]
        self.turns = [place for place, one in enumerate(self.history) if one.role == "user"]
        self.compacted = True

    def roll_back(self, turns: int) -> Iterator[LogCall]:
        yield from self.close()
        if turns > 0 and self.turns:
            place = self.turns[-min(turns, len(self.turns))]
            del self.history[place:]
            del self.turns[-min(turns, len(self.turns)) :]


def codex(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of a rollout."""
    thread = _Thread()
    for _, line in source.lines():
        entry = decoded(line)
        if not isinstance(entry, dict):
            notes.unreadable(line)
            continue
        kind, payload = string(entry.get("type")), obj(entry.get("payload"))
        if kind == "response_item":
            yield from thread.take(payload)
        elif kind == "session_meta" or ("instructions" in entry and not kind):
            base = payload.get("base_instructions") or payload.get("instructions") or entry.get("instructions")
            text = string(obj(base).get("text")) or string(base)
            if not thread.history:
                thread.history += preamble(text, None)
        elif kind == "compacted":
            yield from thread.compact(payload)
        elif kind == "event_msg":
            yield from _event(thread, payload, notes)
        elif kind == "message" or kind in MADE or kind.endswith("_output"):
            yield from thread.take(entry)
        else:
            notes.ignored[kind or "untyped"] += 1
    yield from thread.close()


def _event(thread: _Thread, payload: dict[str, Any], notes: Notes) -> Iterator[LogCall]:
    kind = string(payload.get("type"))
    if kind == "thread_rolled_back":
        yield from thread.roll_back(number(payload.get("num_turns")) or 0)
    elif kind == "token_count":
        last = obj(obj(payload.get("info")).get("last_token_usage"))
        names = {"input": "input_tokens", "output": "output_tokens", "cache_read": "cached_input_tokens"}
        thread.usage = {
            ours: value for ours, theirs in names.items() if (value := number(last.get(theirs))) is not None
        }
        # Written once an answer is whole; it also comes alone, when only the limits of the account changed.
        yield from thread.close()
    else:
        notes.ignored[f"event_{kind}"] += 1
