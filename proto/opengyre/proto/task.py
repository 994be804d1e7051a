"""Tasks: what is to be solved, and what becomes of it (stream TASKS)."""

from typing import ClassVar, Literal

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record


class Check(Record, frozen=True, kw_only=True):
    """One part of a verifier: a shell command run in the sandbox after the agent; exit status 0 means passed."""

    name: str
    command: str
    weight: float
    """Share of the score, above 0; the weights of a task sum to 1."""


class Healthcheck(Record, frozen=True, kw_only=True):
    """A command that succeeds once a sandbox is ready; where it never does, the machine failed and not the work."""

    command: str
    interval_s: float = 5.0
    """Between two of them."""
    timeout_s: float = 30.0
    """Of each."""
    start_period_s: float = 0.0
    """From the begin, while failures do not count."""
    start_interval_s: float = 5.0
    """Between two of them meanwhile."""
    retries: int = 3
    """Failures in a row after which the sandbox is given up."""

    @property
    def longest_s(self) -> float:
        """The longest that it is waited for."""
        begin = self.start_period_s + self.start_interval_s + self.timeout_s if self.start_period_s else 0.0
        return begin + self.retries * (self.interval_s + self.timeout_s)


class TaskEnvironment(Record, frozen=True, kw_only=True):
    """What the sandbox of a task is, where that is more than text files: an image, or a Dockerfile and its context."""

    image: str | None = None
    """Name of an image; None: it is made from ``dockerfile``."""
    dockerfile: str | None = None
    """Text of a Dockerfile; a node that cannot build replays its instructions where they allow that."""
    context: bytes = b""
    """The build context: a tar archive, compressed by gzip (base64 in JSON)."""
    build_timeout_s: float = 600.0
    """For each of its instructions."""
    env: dict[str, str] = {}
    """Of everything that runs in it, beside what the image or the Dockerfile sets."""
    workdir: str | None = None
    """Absolute path where commands start; None is the image's or the Dockerfile's own."""
    user: str | None = None
    """Whose commands the agent's are; None is the image's or the Dockerfile's own."""
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    healthcheck: Healthcheck | None = None
    """Waited for before anything else is run in it."""
    network: Literal["none", "allowlist"] = "none"
    """``allowlist`` reaches ``allowed_hosts`` only; what is made from ``dockerfile`` is made without a network."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names, ``*.name`` (what is below it), addresses or networks; with ``allowlist`` only."""

    @property
    def longest_s(self) -> float:
        """What one instruction and the health check may take: so long a caller waits before it asks again."""
        return self.build_timeout_s + (self.healthcheck.longest_s if self.healthcheck is not None else 0.0)


class Collect(Record, frozen=True, kw_only=True):
    """A command that is run in the agent's sandbox once the agent has ended, before the tests."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


class Artifact(Record, frozen=True, kw_only=True):
    """A file or a folder of the agent's sandbox that a verifier in an environment of its own is given."""

    source: str
    """Absolute path, the same there; nothing is carried over where there is none."""
    exclude: tuple[str, ...] = ()
    """Patterns of names or of paths in the folder that stay behind."""


class TaskTests(Record, frozen=True, kw_only=True):
    """A verifier that is a program: it comes into the sandbox after the agent and leaves rewards in ``/logs/verifier``,
    ``reward.json`` before ``reward.txt``, and reports of its tests (CTRF, JUnit).
    """

    archive: bytes = b""
    """The content of ``/tests``: a tar archive, compressed by gzip (base64 in JSON). Empty: ``environment`` has it."""
    command: str = "/tests/test.sh"
    """Its exit status says nothing."""
    timeout_s: float = 600.0
    """A verifier that is late is a failed evaluation, never a zero."""
    env: dict[str, str] = {}
    user: str | None = None
    """None is ``root`` where the node's sandboxes have other users, else the agent's."""
    separate: bool = False
    """Asks for a clean sandbox, whatever the run says."""
    environment: TaskEnvironment | None = None
    """They run in a fresh sandbox of it, which has of the agent's what ``artifacts`` name and ``/logs/artifacts``, and
    their own ``/tests`` where there is a ``test.sh`` in it. None: in the agent's, or in a copy of that."""
    artifacts: tuple[Artifact, ...] = ()
    """With ``environment`` only."""
    collect: tuple[Collect, ...] = ()
    parser: Literal["rewards", "pytest"] = "rewards"
    """``pytest``: no file, but the short summary that pytest prints; the reward is 1 where every test passed."""
    baseline: int = 0
    """How many tests pass with nothing done."""
    weights: dict[str, float] = {}
    """Reward -> its share of the score; those that are not named have 1, and shares are made to sum to 1."""
    score: Literal["rewards", "progress"] = "rewards"
    """``progress``: the score is the part of the tests that was gained over the baseline."""

    @property
    def longest_s(self) -> float:
        """The longest that one evaluation may take, once its environment is made."""
        own = self.timeout_s + sum(item.timeout_s for item in self.collect)
        return own + (self.environment.longest_s if self.environment is not None else 0.0)


class TaskStep(Record, frozen=True, kw_only=True):
    """One of several steps of a task, one after the other in the same sandbox, each asked for and judged by itself."""

    name: str
    instruction: str
    """What the agent is told, in a conversation of its own."""
    tests: TaskTests
    files: bytes = b""
    """Goes to the folder where commands start, before the step: a tar archive, compressed by gzip (base64 in JSON)."""
    setup: str | None = None
    """A command that is run there then; where it fails, the step cannot begin and the task cannot be judged."""
    healthcheck: Healthcheck | None = None
    """Waited for after that."""
    time_budget_s: float | None = None
    """Of this step; None: the task's, or the run's."""
    min_reward: float | dict[str, float] | None = None
    """The next step begins if the tests say so much: of ``reward``, of each where none has that name, or as named."""


class TaskSpec(Record, frozen=True, kw_only=True):
    """A task as a user submits it."""

    task: str
    """Identifier, unique in its run."""
    instruction: str
    """What the agent is told."""
    files: dict[str, str] = {}
    """Relative path -> text, placed in the sandbox's /workspace before the agent starts."""
    checks: tuple[Check, ...] = ()
    """The verifier, as commands; or else ``tests``."""
    environment: TaskEnvironment | None = None
    """None: the sandbox is a node's plain one, with ``files``."""
    tests: TaskTests | None = None
    """The verifier, as a program; or else ``checks``."""
    steps: tuple[TaskStep, ...] = ()
    """One after the other, each with its own verifier, instead of ``checks`` and ``tests``; ``instruction`` is for
    people then."""
    reward: Literal["mean", "final"] = "mean"
    """Of steps: the score is the mean of theirs, those that were not reached being 0, or the last one's."""
    max_turns: int | None = None
    """Overrides the run's turn budget; of each step."""
    time_budget_s: float | None = None
    """Overrides the run's time budget; of each step."""
    purpose: Literal["train", "evaluate"] = "train"
    from_version: int = 0
    """It evaluates weights from this version on: no group is made of it before that is published."""
    repeat: int = 1
    """How many groups are made of it."""
    family: str | None = None
    labels: dict[str, str] = {}


class TaskSubmitted(Event, frozen=True, kw_only=True, tag="task.submitted.v1"):
    stream: ClassVar[str] = subjects.TASKS
    run: str
    task: str
    spec: TaskSpec

    def event_id(self) -> str:
        return f"task-{self.run}-{self.task}-submitted"


class TaskAdmitted(Event, frozen=True, kw_only=True, tag="task.admitted.v1"):
    """A group was made of the task and its executions were dispatched."""

    stream: ClassVar[str] = subjects.TASKS
    run: str
    task: str
    group: str
    executions: tuple[str, ...]
    version: int
    """`v_d`: the version that was published when the group was admitted."""

    def event_id(self) -> str:
        return f"task-{self.group}-admitted"


class GroupOverdue(Event, frozen=True, kw_only=True, tag="task.overdue.v1"):
    """The deadline of a live group has passed: it is to close as soon as enough members have a score."""

    stream: ClassVar[str] = subjects.TASKS
    run: str
    task: str
    group: str

    def event_id(self) -> str:
        return f"task-{self.group}-overdue"


class GroupScored(Event, frozen=True, kw_only=True, tag="task.scored.v1"):
    """A group has closed: it is ready, evaluated or unusable. Or a member ended late, after its group had closed."""

    stream: ClassVar[str] = subjects.TASKS
    run: str
    task: str
    group: str
    outcome: Literal["ready", "evaluated", "dropped"]
    reason: str | None = None
    """Why it was dropped: `infra` when no member could be scored, `too_few_members` below the run's minimum."""
    scores: dict[str, float]
    """Execution -> score in [0, 1], of the members that were scored."""
    unscored: dict[str, str] = {}
    """Execution -> why it has no score."""
    sampled_version_min: int
    sampled_version_max: int
    tokens: int
    """Sampled tokens of all members that it is about."""
    executions: tuple[str, ...] = ()
    """The executions that it is about; empty: all of the group."""
    late: bool = False
    tokens_by: dict[str, int] = {}
    """Execution -> its sampled tokens."""

    def event_id(self) -> str:
        return f"task-{self.executions[0] if self.late else self.group}-scored"


class GroupConsumed(Event, frozen=True, kw_only=True, tag="task.consumed.v1"):
    """Executions of a group went into a committed update, or left training for a reason."""

    stream: ClassVar[str] = subjects.TASKS
    run: str
    task: str
    group: str
    outcome: Literal["trained", "dropped"]
    reason: str | None = None
    version: int
    """`v_t`: the trainer's version before the update that consumed it."""
    executions: tuple[str, ...] = ()
    """The executions that it is about, those without a score included; empty: all of the group."""

    def event_id(self) -> str:
        return f"task-{self.executions[0] if self.executions else self.group}-consumed"


TaskEvent = TaskSubmitted | TaskAdmitted | GroupOverdue | GroupScored | GroupConsumed
