"""An execution opened again: its tree, and what of it was trained. Requests and answers of `trajectory`.

`gyre.v1.rpc.trajectory.any.explain`. The answer is made anew from the log of the group (stream TRAJ), as the group
itself was: the same log gives the same answer.
"""

from typing import Literal

from opengyre.proto.base import Record

Outcome = Literal["trained", "refused", "left_out", "not_trained"]
"""`trained`: its tokens have a loss in one path. `refused`: they cannot be trained. `left_out`: the bound on paths did
not reach it. `not_trained`: nothing of the execution is trained, or not yet; with the reason `no advantage` its tokens
went to the trainer, where only a KL term moves anything."""


class ExplainRequest(Record, frozen=True, kw_only=True):
    execution: str


class ExplainedCall(Record, frozen=True, kw_only=True):
    """One model call, and what became of it."""

    call: str
    turn: int
    role: str
    """`main`, `main-summary`, `sub-agent` or `sub-agent-summary`."""
    transition: str
    """`root`, `extend`, `branch`, `compaction`, `realign`, `fork` or `retry`."""
    related: str | None
    """The earlier call that it goes on from or shares most with."""
    offset: int
    """How many tokens it shares with that."""
    diagnosis: str | None
    """Why it diverges from that: `template`, `retokenisation` or `edit`."""
    prompt_tokens: int
    sampled_tokens: int
    outcome: Outcome
    reason: str | None = None
    """Why it is not trained."""
    path: int | None = None
    """The path that trains it."""
    weight: float | None = None
    """Of each of its tokens, relative to the others of the execution."""
    version_min: int | None = None
    version_max: int | None = None
    text: str = ""
    """The beginning of the completion."""
    potential: float | None = None
    """What the work was worth before it, as far as that was measured."""
    advantage: float | None = None
    """Of each of its tokens, where it is trained."""
    lane: int | None = None
    """Which of the execution's lanes asked; None: the trunk."""


class ExplainedProgress(Record, frozen=True, kw_only=True):
    """One measurement of what the work was worth along the way."""

    turn: int
    """Calls that were recorded before it."""
    call: str | None
    """The last of them."""
    potential: float | None
    """In [0, 1]; None: it could not be measured, and the one before goes on."""
    infra_error: str | None = None


class ExplainedLane(Record, frozen=True, kw_only=True):
    """One of the alternatives that an execution went on as."""

    lane: int
    calls: int
    """Its own."""
    tokens: int
    """Sampled by these."""
    score: float | None = None
    advantage: float | None = None
    """Of what it sampled, where that is trained."""
    weight: float | None = None
    """Of each of its tokens, where they are trained; the trunk's weigh 1."""
    end_reason: str | None = None
    unscored: str | None = None
    """Why it has no score."""


class ExplainedPath(Record, frozen=True, kw_only=True):
    """A root-to-leaf path that was chosen."""

    role: str
    calls: tuple[str, ...]
    """Those whose tokens are trained here."""
    tokens: int
    trained_tokens: int
    masked_tokens: int
    """Sampled tokens that are context here: another path trains them, or they are refused."""


class ExplainReport(Record, frozen=True, kw_only=True):
    """What became of an execution."""

    execution: str
    group: str
    run: str
    task: str
    purpose: str
    state: Literal["live", "ended"]
    end_reason: str | None = None
    group_state: Literal["open", "ready", "evaluated", "dropped"] = "open"
    """`open`: it has not closed yet."""
    group_reason: str | None = None
    score: float | None = None
    unscored: str | None = None
    """Why there is no score."""
    advantage: float | None = None
    baseline: float | None = None
    scale: float | None = None
    late: bool = False
    """It ended after its group had closed."""
    calls: int = 0
    events: int = 0
    """Sampled tokens."""
    path_tokens: int = 0
    """Prompts and completions without sharing."""
    unique_nodes: int = 0
    """With sharing."""
    leaves: int = 0
    dedup_ratio: float = 1.0
    trained_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens on chosen paths that are context there."""
    left_out: dict[str, int] = {}
    """Role -> sampled tokens that the bound on paths left out."""
    refused: dict[str, int] = {}
    """Reason -> calls."""
    transitions: dict[str, int] = {}
    diagnoses: dict[str, int] = {}
    j_max: int | None = None
    paths: tuple[ExplainedPath, ...] = ()
    per_call: tuple[ExplainedCall, ...] = ()
    credit: Literal["execution", "progress"] = "execution"
    """Whose advantage a call has: its execution's, or one that also credits the progress of its turn."""
    progress: tuple[ExplainedProgress, ...] = ()
    forked_at: int | None = None
    """Turns of the trunk before it went on as lanes; None: it has none."""
    lanes: tuple[ExplainedLane, ...] = ()
