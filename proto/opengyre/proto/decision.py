"""Decisions of the allocator (stream DECISIONS), each with its inputs, and the ledger's entries."""

from typing import ClassVar, Literal

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record
from opengyre.proto.host import HostState, Role
from opengyre.proto.run import Dispatch, Elastic, RunState


class CellView(Record, frozen=True, kw_only=True):
    cell: str
    hosts: tuple[str, ...]
    state: HostState
    settled: bool
    """Every host of it has obeyed the last command."""
    since_s: float
    capacity: float
    """Calls that it serves at full speed."""
    running: int
    wish: Role | None = None
    """An operator's wish, which the policy obeys."""
    role: Role | None = None
    """What it was last told to be; none if it was told nothing yet."""
    idle_s: float = 0.0
    """How long it has been in the TRAIN state with nothing to train."""
    held_tokens: int = 0
    """Tokens of the calls in flight: what moving them would compute again."""


class PolicyInput(Record, frozen=True, kw_only=True):
    """All that the policy sees."""

    cells: tuple[CellView, ...]
    live_executions: int
    ready_groups: float
    """Finished groups that the trainer may take now and that no contribution to an update holds yet; executions that
    trained without the rest of their group count as parts of one."""
    dispatch: Dispatch
    elastic: Elastic
    finished: bool = False
    demand_calls: float | None = None
    """What the live executions need of the engines now and soon, in calls in flight. None: one call each."""
    switch_s: float | None = None
    """Measured mean duration of a role switch. None: none was measured, nor is one set."""
    train_s: float | None = None
    """Measured: how long one cell trains a group. None: not yet."""


class AdmissionInput(Record, frozen=True, kw_only=True):
    """All that an admission was decided on."""

    dispatch: Dispatch
    updates: int | None
    """Of the run; it takes no more groups than they hold."""
    state: RunState
    """Of the run."""
    finished: bool
    """Its last update is committed."""
    published: int
    kept_executions: int
    """Executions of train groups that updates have taken or will take."""
    unconsumed_executions: int
    """Of these, those that no committed update has taken."""
    live_groups: int = 0
    """Train groups that are unfinished; `continuous` counts them."""
    oldest_version: int | None = None
    """`v_d` of the oldest train group that is unconsumed; `d_max` counts from it."""
    stream: bool = True
    """Without it a burst has to be complete before any of it is trained."""
    waiting: int
    """Train groups that could be made of the tasks that wait."""
    most: int
    """Groups of one admission."""
    evaluating: int = 0
    """Groups of this admission that evaluate; they are no part of the depth."""


class RoleChange(Record, frozen=True, kw_only=True):
    cell: str
    role: Role
    reason: str


class Decision(Event, frozen=True, kw_only=True, tag="decision.v1"):
    stream: ClassVar[str] = subjects.DECISIONS
    run: str
    decision: str
    """Identifier: `<leader's fencing token>-<number>`."""
    kind: Literal["roles", "admission", "wish"]
    input: PolicyInput | None = None
    """Of `roles`."""
    admission: AdmissionInput | None = None
    """Of `admission`; none where a leader finishes what a former one began."""
    wish: Literal["drain", "resume", "cordon"] | None = None
    changes: tuple[RoleChange, ...] = ()
    admitted: tuple[str, ...] = ()
    version: int | None = None
    """Published version, of an admission."""
    unconsumed: int | None = None
    """Groups that were unconsumed before an admission."""
    note: str = ""
    took_s: float = 0.0
    """How long the policy took to decide, on the allocator's clock."""
    suspends: bool = False
    """After it no cell serves although executions are live: their calls are parked and the episodes SUSPENDED."""

    def event_id(self) -> str:
        return f"decision-{self.run}-{self.decision}"


GroupState = Literal["live", "ready", "trained", "dropped", "evaluated"]


class GroupEntry(Record, frozen=True, kw_only=True):
    """Bucket `gyre_ledger`: one group."""

    run: str
    group: str
    task: str
    sequence: int
    purpose: Literal["train", "evaluate"]
    state: GroupState
    executions: tuple[str, ...]
    admitted_version: int
    """`v_d`."""
    dispatched: bool = False
    """All its episodes are in the work queue."""
    consumed_version: int | None = None
    """`v_t`; `d = v_t - v_d`."""
    reason: str | None = None
    """Why it was dropped."""
    unscored: dict[str, str] = {}
    """Executions that have no score, and why; they are dropped when they are consumed."""
    closed: tuple[str, ...] = ()
    """Executions that ended and were scored, or that have no score: what was said of them is known."""
    trained: dict[str, int] = {}
    """Execution -> `v_t` of the update in which it took a place."""
    dropped: dict[str, str] = {}
    """Execution -> why it left training before an update took it, or with an update that did not step."""
    tokens: dict[str, int] = {}
    """Execution -> its sampled tokens."""


class Book(Record, frozen=True, kw_only=True):
    """The identity of law 2, for groups or executions: dispatched = trained + dropped + ready + live."""

    dispatched: int
    trained: int
    dropped: dict[str, int]
    ready: int
    live: int
    balances: bool


class Discards(Record, frozen=True, kw_only=True):
    """Executions that left training for one reason. What is discarded is not random: its length says so."""

    executions: int
    mean_tokens: float | None
    """Sampled tokens of those that were measured."""


class StalenessReport(Record, frozen=True, kw_only=True):
    """`gyre.v1.rpc.allocator.any.staleness`."""

    run: str
    phi: float
    mu: int
    predicted: float
    """E[d] = phi + (mu - 1) / 2 (equation 2 of the paper)."""
    mean: float | None
    maximum: int | None
    distribution: dict[int, int]
    """d -> groups."""
    window_mean: float | None
    """Of the last groups, `window` at most."""
    window: int
    published_version: int
    trainer_version: int
    groups: Book
    executions: Book
    evaluated_groups: int = 0
    by_execution_mean: float | None = None
    """Mean `d` of trained executions, each with that of the update it was in."""
    by_execution_maximum: int | None = None
    by_execution: dict[int, int] = {}
    """d -> executions."""
    by_execution_window_mean: float | None = None
    """Of the last executions, those of `window` groups at most."""
    by_token_mean: float | None = None
    """Mean over trained tokens: the base version of the update minus the version that sampled the token."""
    trained_mean_tokens: float | None = None
    """Sampled tokens of a trained execution."""
    discards: dict[str, Discards] = {}
    """Reason -> what was discarded for it."""
    admission: AdmissionInput | None = None
    """What an admission would be decided on now; none for a run that is not led."""
    live_executions: int | None = None
    """Executions of both purposes that have not ended; none for a run that is not led."""


class WishRequest(Record, frozen=True, kw_only=True):
    """`gyre.v1.rpc.allocator.any.wish`: an operator drains, resumes or cordons a cell."""

    cell: str
    wish: Literal["drain", "resume", "cordon"]


class WishReply(Record, frozen=True, kw_only=True):
    cell: str
    wish: str
    state: str


class CellReport(Record, frozen=True, kw_only=True):
    """`gyre.v1.rpc.allocator.any.cells`."""

    cell: str
    hosts: tuple[str, ...]
    state: str
    """A `HostState`'s value, `lost`, or `refused`."""
    role: Role | None
    """What it was told to be."""
    wish: Role | None
    refused: str | None = None
    """Why the run takes no token from it."""


class CellsReport(Record, frozen=True, kw_only=True):
    cells: tuple[CellReport, ...]


class StalenessRequest(Record, frozen=True, kw_only=True):
    run: str
