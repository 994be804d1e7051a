"""The recorded calls and commands of one execution, indexed. No I/O.

It is filled from the log by a writer that takes over and grows with each event that was stored; both give the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opengyre.proto.traj import PROGRAM, AnyTrajEvent, Call, ToolCall, ToolResult
from opengyre.rollout.messages import answer, turn_of


@dataclass(frozen=True)
class Turn:
    """A call and, where the agent ran it, its command's result."""

    call: Call
    result: ToolResult | None


Place = tuple[int | None, int]
"""Whose command it is (None: the trunk's), and its turn."""


def message_of_parts(text: str, content: str | None, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """The assistant's message that the agent is given for a completion."""
    return answer(text if content is None else content, ((tool.id, tool.name, tool.arguments) for tool in calls))


def message_of(call: Call) -> dict[str, Any]:
    """The assistant's message that the agent was given."""
    return message_of_parts(call.text, call.content, call.tool_calls)


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many leading items are the same."""
    length = min(len(one), len(other))
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class History:
    calls: list[Call] = field(default_factory=list)
    sampled: int = 0
    """Tokens of all calls."""
    number: int | None = None
    """The lane whose line this is; None: all of the execution, whose own line is the trunk."""
    _results: dict[Place, ToolResult] = field(default_factory=dict)
    _programs: dict[int, ToolResult] = field(default_factory=dict)
    """Step -> how the agent program of it ended."""
    _lines: dict[int, "History"] = field(default_factory=dict)
    _by_id: dict[str, Call] = field(default_factory=dict)
    _by_request: dict[str, dict[int, Call]] = field(default_factory=dict)
    _by_history: dict[str, Call] = field(default_factory=dict)
    _by_turn: dict[str, list[Call]] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    """Call id -> its place in `calls`."""

    @classmethod
    def of(cls, log: Iterable[AnyTrajEvent]) -> "History":
        history = cls()
        for event in log:
            history.take(event)
        return history

    def take(self, event: AnyTrajEvent) -> None:
        """Add a stored event; those that are neither call nor command change nothing."""
        if isinstance(event, Call | ToolResult):
            for line in self._lines.values():
                if event.lane in (None, line.number):
                    line.take(event)
        if isinstance(event, Call):
            self._places[event.call] = len(self.calls)
            self.calls.append(event)
            self.sampled += len(event.sampled_ids)
            self._by_id[event.call] = event
            self._by_request.setdefault(event.request_digest, {})[event.choice] = event
            if event.history_digest:
                self._by_history[event.history_digest] = event
                self._by_turn.setdefault(turn_of(message_of(event)), []).append(event)
        elif isinstance(event, ToolResult) and event.turn == PROGRAM:
            self._programs[event.step or 0] = event
        elif isinstance(event, ToolResult):
            self._results[event.lane, event.turn] = event

    def line(self, lane: int | None) -> "History":
        """What a lane's agent has behind it: the trunk's calls and commands and its own. It grows with this one."""
        if lane is None:
            return self
        if lane not in self._lines:
            line = History(number=lane)
            for event in (*self.calls, *self._results.values()):
                if event.lane in (None, lane):
                    line.take(event)
            self._lines[lane] = line
        return self._lines[lane]

    def snapshot(self) -> "History":
        """As it is now, for a reader in another thread."""
        return replace(
            self,
            calls=list(self.calls),
            _results=dict(self._results),
            _programs=dict(self._programs),
            _by_id=dict(self._by_id),
            _by_request={request: dict(choices) for request, choices in self._by_request.items()},
            _by_history=dict(self._by_history),
            _by_turn={turn: list(calls) for turn, calls in self._by_turn.items()},
            _places=dict(self._places),
        )

    def answered(self, request_digest: str, choice: int = 0) -> Call | None:
        """The call that answered this very request."""
        return self._by_request.get(request_digest, {}).get(choice)

    def program(self, step: int = 0) -> ToolResult | None:
        """How the agent program ended, that of a step where the task has several."""
        return self._programs.get(step)

    def extended_by(self, digests: Sequence[str]) -> tuple[Call, int] | None:
        """The latest call that the messages with this chain continue, and how many of the messages it covers."""
        for covered in range(len(digests), 0, -1):
            call = self._by_history.get(digests[covered - 1])
            if call is not None:
                return call, covered
        return None

    def said(self, turn: str, after: int) -> Call | None:
        """A recorded call that said this: the first later than place `after`, else the last."""
        found = self._by_turn.get(turn)
        if not found:
            return None
        return next((call for call in found if self._places[call.call] > after), found[-1])

    def place(self, call: Call) -> int:
        return self._places[call.call]

    def tokens(self, call: Call) -> list[int]:
        """Prompt and completion of a call, put together from its ancestors."""
        parts: list[Sequence[int]] = []
        keep: int | None = None
        current: Call | None = call
        while current is not None:
            own = (*current.prompt_ids, *current.sampled_ids)
            wanted = len(own) if keep is None else max(0, keep - current.prefix_tokens)
            parts.append(own[:wanted])
            keep = current.prefix_tokens if keep is None else min(keep, current.prefix_tokens)
            current = self._by_id[current.parent] if current.parent is not None else None
        return [token for part in reversed(parts) for token in part]

    def nearest(self, tokens: tuple[int, ...]) -> tuple[Call, int] | None:
        """The call that shares the longest beginning with `tokens` (the latest of several), and how long that is.

        Linear in the number of calls and in the tokens that are compared; each call is compared beyond its parent only.
        """
        best: tuple[Call, int] | None = None
        lengths: dict[str, int] = {}
        for call in self.calls:
            begin = call.prefix_tokens
            length = lengths[call.parent] if call.parent is not None else 0
            if length >= begin:
                own = (*call.prompt_ids, *call.sampled_ids)
                length = begin + shared(own, tokens[begin : begin + len(own)])
            lengths[call.call] = length
            if length and (best is None or length >= best[1]):
                best = call, length
        return best

    def samples_within(self, call: Call, length: int) -> bool:
        """Whether the first `length` tokens of a call's prompt and completion hold some that were sampled."""
        current: Call | None = call
        while current is not None:
            if length > current.prefix_tokens + len(current.prompt_ids):
                return True
            length = min(length, current.prefix_tokens)
            current = self._by_id[current.parent] if current.parent is not None else None
        return False

    def turns(self) -> list[Turn]:
        """Calls of its own line in order, each with its command's result."""
        line = [call for call in self.calls if call.lane in (None, self.number)]
        return [
            # Lanes ask side by side, so the number of a lane's call is not its turn.
            Turn(call, self._results.get((call.lane, call.turn if call.lane is None else place)))
            for place, call in enumerate(line)
        ]
