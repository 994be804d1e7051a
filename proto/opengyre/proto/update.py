"""Updates (stream UPDATES) and the requests between the trainer and the cells that train.

An update is a bag of executions, `B * G` of them. A cell in the TRAIN role pulls some of one group after another
(`pull`), adds their gradient to its own accumulator and hands over (`hand_over`) when it is told to flush or when it
leaves. The trainer commits when all executions of the update are in contributions that it holds. `attempt` fences: a
trainer that was started again opens the same update under a new attempt, and what belongs to the old one is refused.
"""

from typing import Any, ClassVar, cast

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Optimization
from opengyre.proto.weights import Manifest


class UpdateStats(Record, frozen=True, kw_only=True):
    """Sums over the trained tokens of a contribution; means are taken at the commit. `one + other` adds all of them,
    and of what is called `_max` takes the greater."""

    executions: int = 0
    tokens: int = 0
    path_tokens: int = 0
    unique_tokens: int = 0
    """Tokens that were computed: those at distinct prefixes, where prefixes are shared."""
    loss: float = 0.0
    """Sum of weighted losses: the value of the objective's share."""
    clipped_tokens: int = 0
    masked_tokens: int = 0
    """Tokens that were too old to have a loss (`max_age`); they are in `tokens` too."""
    kl_sum: float = 0.0
    """Sum over tokens of the k3 estimate of KL(behaviour || policy)."""
    reference_kl_sum: float = 0.0
    """Sum over tokens of the loss's estimate of KL(policy || reference); 0 without such a term."""
    entropy_sum: float = 0.0
    ratio_sum: float = 0.0
    """Sum over tokens of the loss's importance ratio, before any bound."""
    ratio_square_sum: float = 0.0
    """Of its square: `ratio_sum ** 2 / ratio_square_sum` is an effective number of tokens."""
    logprob_gap_sum: float = 0.0
    """Sum over tokens sampled by the base version of |trainer log-prob - behaviour log-prob|."""
    logprob_gap_tokens: int = 0
    logprob_gap_max: float = 0.0
    """The greatest of these gaps, nats."""
    offset_sum: float = 0.0
    """Sum over the same tokens of trainer log-prob - behaviour log-prob, with its sign."""
    offset_square_sum: float = 0.0
    behaviour_sum: float = 0.0
    """Sum over the same tokens of the behaviour log-prob. With the sums of its square and of its product with the
    offset: how the two vary together, by which causes of a gap differ."""
    behaviour_square_sum: float = 0.0
    offset_behaviour_sum: float = 0.0
    score_sum: float = 0.0
    zero_variance_groups: int = 0
    busy_s: float = 0.0
    """Seconds that cells spent on it, without waiting."""
    token_staleness_sum: int = 0
    """Sum over trained tokens of the base version minus the version that sampled it."""
    token_versions: dict[int, int] = {}
    """Version -> trained tokens that it sampled."""
    version_gaps: dict[int, float] = {}
    """Version -> sum over these tokens of |trainer log-prob - behaviour log-prob|. Of the base version it is
    `logprob_gap_sum`; of older ones what the policy has moved since is in it too."""
    broken: tuple[str, ...] = ()
    """Groups whose loss or gradient was not finite: nothing of them is in the sum, and the update is skipped."""

    @property
    def live_tokens(self) -> int:
        """Tokens that had a loss."""
        return self.tokens - self.masked_tokens

    @property
    def effective_share(self) -> float:
        """Effective over live tokens: Kish's effective sample size of the importance ratios; 1 where all are equal."""
        square = self.ratio_square_sum * self.live_tokens
        return self.ratio_sum**2 / square if square > 0 else 0.0

    @property
    def logprob_gap(self) -> float | None:
        """Mean |trainer log-prob - behaviour log-prob| over tokens of the base version, nats; None: it sampled none."""
        return self.logprob_gap_sum / self.logprob_gap_tokens if self.logprob_gap_tokens else None

    @property
    def logprob_gap_by_version(self) -> dict[int, float]:
        """Version that sampled -> mean gap to the base version, nats."""
        return {
            version: total / self.token_versions[version]
            for version, total in self.version_gaps.items()
            if self.token_versions.get(version)
        }

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        return UpdateStats(
            **{name: _together(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        )


def _together(name: str, one: Any, other: Any) -> Any:
    """Two values of a figure as one."""
    if isinstance(one, dict):
        ours, theirs = cast("dict[int, Any]", one), cast("dict[int, Any]", other)
        return {version: ours.get(version, 0) + theirs.get(version, 0) for version in sorted({*ours, *theirs})}
    return max(one, other) if name.endswith("_max") else one + other


class UpdateEvent(Event, frozen=True, kw_only=True):
    stream: ClassVar[str] = subjects.UPDATES
    run: str
    update: int
    """Number of the update, from 1: it makes version `update` of version `update - 1`."""
    attempt: str


class Opened(UpdateEvent, frozen=True, kw_only=True, tag="update.opened.v1"):
    groups: int
    """How many groups' worth it will hold."""
    executions: int = 0
    """How many executions it will hold."""

    def event_id(self) -> str:
        return f"update-{self.run}-{self.update}-{self.attempt}-opened"


class Joined(UpdateEvent, frozen=True, kw_only=True, tag="update.joined.v1"):
    host: str
    boot: str

    def event_id(self) -> str:
        return f"update-{self.run}-{self.update}-{self.attempt}-{self.host}-{self.boot}-joined"


class Contributed(UpdateEvent, frozen=True, kw_only=True, tag="update.contributed.v1"):
    host: str
    contribution: str
    groups: tuple[str, ...]
    """Of which it holds executions."""
    gradient: str
    """Blob reference (`sha256:...`) of the accumulated gradient, safetensors, float32."""
    stats: UpdateStats
    executions: tuple[str, ...] = ()
    """Empty: all of the groups'."""

    def event_id(self) -> str:
        return f"update-{self.run}-{self.update}-{self.attempt}-{self.contribution}"


class Left(UpdateEvent, frozen=True, kw_only=True, tag="update.left.v1"):
    host: str
    boot: str
    reason: str

    def event_id(self) -> str:
        return f"update-{self.run}-{self.update}-{self.attempt}-{self.host}-{self.boot}-left"


class Committed(UpdateEvent, frozen=True, kw_only=True, tag="update.committed.v1"):
    version: int
    """The version it made."""
    published: bool
    """Whether the version was published (the end of a burst) or only kept by the trainer."""
    groups: tuple[str, ...]
    """Of which it holds executions, in order of arrival."""
    executions: tuple[str, ...]
    """Those with a score: what was trained."""
    staleness: tuple[int, ...]
    """`d` of each group's part in it, in the order of `groups`."""
    unscored: tuple[str, ...] = ()
    """Executions that took a place in it and have no score."""
    score: float
    """Mean score of the update's executions."""
    gradient_norm: float
    learning_rate: float | None = None
    """Of its step. None in events from before it was told."""
    skipped: str | None = None
    """Why the optimizer did not step (a gradient that is not finite)."""
    alarm: str | None = None
    """What is wrong with its figures, in a sentence: trainer and engine disagree about log-probs."""
    stats: UpdateStats
    opened_s: float = 0.0
    """Seconds from opening to commit, on the trainer's clock."""

    def event_id(self) -> str:
        return f"update-{self.run}-{self.update}-committed"


class RunFinished(Event, frozen=True, kw_only=True, tag="update.finished.v1"):
    stream: ClassVar[str] = subjects.UPDATES
    run: str
    update: int
    version: int

    def event_id(self) -> str:
        return f"update-{self.run}-finished"


AnyUpdateEvent = Opened | Joined | Contributed | Left | Committed | RunFinished


class PullRequest(Record, frozen=True, kw_only=True):
    """`gyre.v1.rpc.trainer.any.pull`: a cell asks for work."""

    host: str
    boot: str
    update: int | None = None
    """The update that its accumulator belongs to, if it holds one."""
    attempt: str | None = None
    holding: tuple[str, ...] = ()
    """Executions in its accumulator."""


class WorkItem(Record, frozen=True, kw_only=True):
    update: int
    attempt: str
    base: Manifest
    """The weights to compute the gradient at (version `update - 1`)."""
    reference: Manifest | None = None
    """The weights of the run's initial model, where the loss has a KL term to it."""
    group: GroupReady
    """With the members to train, or a blob that has them among others."""
    executions: tuple[str, ...] = ()
    """Which members to train now; empty: all of them."""
    weight: float
    """Of each execution: 1 / (executions of the update). Where `token_weights` is empty, a token's weight is this over
    its execution's trained tokens (the paper's two averages)."""
    token_weights: dict[str, float] = {}
    """Execution -> weight of each of its trained tokens (times its span's), up to a factor that is common to the update
    and is applied at its commit."""
    optimization: Optimization


class PullReply(Record, frozen=True, kw_only=True):
    """Exactly one of `item`, `flush` and `wait` is set."""

    item: WorkItem | None = None
    flush: bool = False
    """Hand over what you hold: the update has nothing further."""
    discard: bool = False
    """What you hold belongs to an update that is no more: drop it."""
    wait: str | None = None
    """Nothing to do now, and what it is waiting for."""


class HandOver(Record, frozen=True, kw_only=True):
    """`gyre.v1.rpc.trainer.any.hand_over`: a cell's accumulated gradient."""

    host: str
    boot: str
    update: int
    attempt: str
    contribution: str
    executions: tuple[str, ...] = ()
    """What it is the sum over."""
    gradient: str
    stats: UpdateStats
    leaving: bool = False


class HandOverReply(Record, frozen=True, kw_only=True):
    accepted: bool
    reason: str | None = None
