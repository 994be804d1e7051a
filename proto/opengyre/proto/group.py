"""Finished groups on their way to the trainer (stream GROUPS, a work queue).

A group closes once: its closing message holds the members that its baseline is frozen from. Each member that ends
later goes out in a message of its own, with the frozen baseline and scale. A group without a `close_at` or a deadline
is one message.
"""

from typing import ClassVar

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record
from opengyre.proto.traj import Media


class Span(Record, frozen=True, kw_only=True):
    """Tokens `[start, end)` of a sequence were sampled by the policy and are trained."""

    start: int
    end: int
    logprobs: tuple[float, ...]
    """Behaviour log-probs, one a token."""
    versions: tuple[int, ...]
    """The weight version that sampled each token."""
    temperature: float
    advantage: float | None = None
    """Of each of its tokens. None: the execution's."""
    weight: float = 1.0
    """Of each of its tokens, relative to the others of the execution; an average counts a token for as much."""


class RouteRows(Record, frozen=True, kw_only=True):
    """Recorded routes of experts, of tokens `[start, end)` of a sequence: rows from `first` on of a blob."""

    start: int
    end: int
    blob: str
    first: int


class Sequence(Record, frozen=True, kw_only=True):
    """A root-to-leaf path of an execution's tree. A token has a loss in at most one sequence."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    role: str = "main"
    """`main`, `main-summary`, `sub-agent` or `sub-agent-summary`: whose path it is."""
    adapter: str | None = None
    """That it was sampled under. Sequences share what they compute only if this, media and routes are the same."""
    media: tuple[Media, ...] = ()
    routes: tuple[RouteRows, ...] = ()
    """In order; where there are any, each token but the last of what is trained has its row."""


class Member(Record, frozen=True, kw_only=True):
    """One scored execution."""

    execution: str
    score: float
    """In [0, 1]."""
    advantage: float
    sequences: tuple[Sequence, ...]
    trained_tokens: int
    path_tokens: int
    """Tokens of all calls' prompts and completions, without sharing."""
    unique_tokens: int = 0
    """The same with sharing: tokens at distinct prefixes."""
    left_out: dict[str, int] = {}
    """Role -> sampled tokens that the bound on paths left out."""
    transitions: dict[str, int] = {}
    """How calls stand to those before: extend, branch, compaction, realign, fork, retry -> calls."""

    @property
    def weighed_tokens(self) -> float:
        """Trained tokens, each counted for its weight: what an average divides by. Of lanes, the mean along them."""
        spans = [span for sequence in self.sequences for span in sequence.spans]
        return self.trained_tokens + sum((span.weight - 1) * (span.end - span.start) for span in spans)

    @property
    def judged(self) -> bool:
        """Whether any of its trained tokens has an advantage."""
        spans = (span for sequence in self.sequences for span in sequence.spans)
        return any((self.advantage if span.advantage is None else span.advantage) != 0 for span in spans)


class GroupReady(Event, frozen=True, kw_only=True, tag="group.ready.v1"):
    stream: ClassVar[str] = subjects.GROUPS
    run: str
    group: str
    task: str
    version: int
    """`v_d`."""
    members: tuple[Member, ...] = ()
    blob: str | None = None
    """`sha256:...` of the JSON list of members, when they are too large for a message."""
    refused: dict[str, int] = {}
    """Reason -> calls that cannot be trained."""
    executions: tuple[str, ...] = ()
    """The executions that this message accounts for, in order: its members, and those that have no score. Empty in
    messages from before groups closed early: then its members."""
    late: bool = False
    """A member that ended after its group had closed."""
    baseline: float | None = None
    """The mean that was frozen when the group closed."""
    scale: float | None = None
    """An advantage is `(score - baseline) * scale`."""
    group_size: int = 0
    """Executions of the group in all; 0 in messages from before groups closed early: those of this message."""

    @property
    def slots(self) -> int:
        """Places that it takes in updates: one for each execution that it accounts for."""
        return len(self.executions) or len(self.members)

    def event_id(self) -> str:
        return f"group-{self.executions[0] if self.late else self.group}-ready"
