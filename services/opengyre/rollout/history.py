"""The recorded calls and commands of one execution, indexed. No I/O.

It is filled from the log by a writer that takes over and grows with each event that was stored; both give the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opengyre.proto.traj import AnyTrajEvent, Call, ToolResult


@dataclass(frozen=True)
class Turn:
    """A call and, where the agent ran it, its command's result."""

    call: Call
    result: ToolResult | None


@dataclass
class History:
    calls: list[Call] = field(default_factory=list)
    _results: dict[int, ToolResult] = field(default_factory=dict)
    _by_id: dict[str, Call] = field(default_factory=dict)
    _by_request: dict[str, Call] = field(default_factory=dict)
    _by_history: dict[str, Call] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Iterable[AnyTrajEvent]) -> "History":
        history = cls()
        for event in log:
            history.take(event)
        return history

    def take(self, event: AnyTrajEvent) -> None:
        """Add a stored event; those that are neither call nor command change nothing."""
        if isinstance(event, Call):
            self.calls.append(event)
            self._by_id[event.call] = event
            self._by_request[event.request_digest] = event
            self._by_history[event.history_digest] = event
        elif isinstance(event, ToolResult):
            self._results[event.turn] = event

    def answered(self, request_digest: str) -> Call | None:
        """The call that answered this very request."""
        return self._by_request.get(request_digest)

    def extended_by(self, digests: Sequence[str]) -> tuple[Call, int] | None:
        """The latest call that the messages with this chain continue, and how many of the messages it covers."""
        for covered in range(len(digests), 0, -1):
            call = self._by_history.get(digests[covered - 1])
            if call is not None:
                return call, covered
        return None

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

    def turns(self) -> list[Turn]:
        """Calls in order, each with its command's result."""
        return [Turn(call, self._results.get(call.turn)) for call in self.calls]
