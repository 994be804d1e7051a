"""Requests as they come in over HTTP: they mirror the structs of `proto` and turn into them.

Types and unknown fields are checked here; what a task or a run must be is `proto`'s own to say (`validate_task`,
`validate`), so that every way in has the same rules.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opengyre.gateway.problems import FIXED_FIELD, UNKNOWN_FIELD, Problem
from opengyre.proto import task_rules
from opengyre.proto.ids import RUN, TOKEN, BadIdentifierError, check_run
from opengyre.proto.run import MAX_SHOTS, InvalidRunError, RunSpec, validate
from opengyre.proto.task import TaskSpec

RUN_PATTERN = f"^{RUN.pattern}$"
TOKEN_PATTERN = f"^{TOKEN.pattern}$"
GROUP_PATTERN = r"^[A-Za-z0-9_]{1,32}-g[0-9]{6,12}$"
EXECUTION_PATTERN = r"^[A-Za-z0-9_]{1,32}-g[0-9]{6,12}-e[0-9]{2,6}$"
MAX_BATCH = 1000
MAX_SEQUENCE = 2**63 - 1

RunId = Annotated[str, Field(pattern=RUN_PATTERN, description="A run: 1 to 32 of A-Z a-z 0-9 _")]


class Input(BaseModel):
    """An object of a request: strict types, no unknown fields, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    fixed: ClassVar[Mapping[str, str]] = {}
    """Fields that are known and may not be given here, and why."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            allowed = ", ".join(name for name in cls.model_fields if name not in cls.fixed)
            for key in data:
                if key in cls.fixed:
                    raise PydanticCustomError(
                        FIXED_FIELD,
                        "{name} cannot change while the run goes on ({why}); allowed: {allowed}",
                        {"name": key, "why": cls.fixed[key], "allowed": allowed},
                    )
                if key not in cls.model_fields:
                    key = ascii(key)[1:-1]  # noqa: PLW2901 - a sentence must be UTF-8, and keys may be none
                    raise PydanticCustomError(
                        UNKNOWN_FIELD, "unknown field {name}; allowed: {allowed}", {"name": key, "allowed": allowed}
                    )
        return data


class CheckIn(Input):
    """A shell command run in the sandbox after the agent; exit status 0 means passed."""

    name: str = Field(min_length=1, max_length=task_rules.MAX_NAME)
    command: str = Field(min_length=1, max_length=task_rules.MAX_TEXT)
    weight: float = Field(gt=0, le=1, description="Share of the score; the weights of a task sum to 1")


_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Archive = Annotated[str, Field(pattern=_BASE64, description="a tar archive, compressed by gzip, as base64")]


class HealthcheckIn(Input):
    """A command that succeeds once a sandbox is ready."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = Field(default=3, ge=1, le=task_rules.MAX_RETRIES)


class EnvironmentIn(Input):
    """An image, or a Dockerfile and its context."""

    image: str | None = None
    dockerfile: str | None = None
    context: Archive = ""
    build_timeout_s: float = 600.0
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    healthcheck: HealthcheckIn | None = None
    network: Literal["none", "allowlist"] = "none"
    allowed_hosts: list[str] = Field(default=[], description="of an allowlist: names, *.name, addresses, networks")


class ArtifactIn(Input):
    """What of the agent's sandbox a verifier in an environment of its own is given."""

    source: str
    exclude: list[str] = []


class CollectIn(Input):
    """A command in the agent's sandbox before the tests."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


class TestsIn(Input):
    """A program that comes into the sandbox after the agent and leaves rewards in /logs/verifier."""

    __test__: ClassVar[bool] = False  # pytest collects classes of this name

    archive: Archive = Field(default="", description="the content of /tests: tar.gz, as base64")
    command: str = "/tests/test.sh"
    timeout_s: float = 600.0
    env: dict[str, str] = {}
    user: str | None = None
    separate: bool = False
    environment: EnvironmentIn | None = Field(default=None, description="of the tests alone")
    artifacts: list[ArtifactIn] = []
    collect: list[CollectIn] = []
    parser: Literal["rewards", "pytest"] = "rewards"
    baseline: int = Field(default=0, ge=0, le=1 << 31)
    weights: dict[str, float] = {}
    score: Literal["rewards", "progress"] = "rewards"


class StepIn(Input):
    """One of several steps, one after the other in the same sandbox."""

    name: str = Field(min_length=1, max_length=task_rules.MAX_NAME)
    instruction: str = Field(min_length=1, max_length=task_rules.MAX_TEXT)
    tests: TestsIn
    files: Archive = ""
    setup: str | None = None
    healthcheck: HealthcheckIn | None = None
    time_budget_s: float | None = Field(default=None, ge=task_rules.MIN_TIME_BUDGET_S, le=task_rules.MAX_TIME_BUDGET_S)
    min_reward: float | dict[str, float] | None = None


class TaskFields(Input):
    task: str = Field(pattern=TOKEN_PATTERN, description="Identifier, unique in its run")
    instruction: str = Field(min_length=1, max_length=task_rules.MAX_TEXT, description="What the agent is told")
    files: dict[str, str] = Field(
        default={}, description="Relative path -> text, placed in the sandbox's /workspace before the agent starts"
    )
    checks: list[CheckIn] = Field(default=[], max_length=task_rules.MAX_CHECKS, description="or else tests")
    environment: EnvironmentIn | None = None
    tests: TestsIn | None = Field(default=None, description="A verifier that is a program, or else checks")
    steps: list[StepIn] = Field(
        default=[],
        max_length=task_rules.MAX_STEPS,
        description="each with its own verifier, instead of checks and tests",
    )
    reward: Literal["mean", "final"] = Field(default="mean", description="What steps make of their rewards")
    max_turns: int | None = Field(default=None, ge=1, le=task_rules.MAX_TURNS)
    time_budget_s: float | None = Field(default=None, ge=task_rules.MIN_TIME_BUDGET_S, le=task_rules.MAX_TIME_BUDGET_S)
    purpose: Literal["train", "evaluate"] = "train"
    from_version: int = Field(
        default=0, ge=0, le=task_rules.MAX_VERSION, description="It evaluates weights from this version on"
    )
    repeat: int = Field(default=1, ge=1, le=task_rules.MAX_REPEAT, description="How many groups are made of it")
    family: str | None = Field(default=None, min_length=1, max_length=task_rules.MAX_NAME)
    labels: dict[str, str] = Field(default={}, max_length=task_rules.MAX_LABELS)

    def spec(self) -> TaskSpec:
        """The struct, with every rule checked; raises `InvalidTaskError`."""
        values = self.model_dump(exclude={"run"})
        return task_rules.validate_task(msgspec.convert(values, TaskSpec))


class SingleTask(TaskFields):
    """One task."""

    run: RunId | None = None


class TaskBatch(Input):
    """Several tasks, accepted all or none."""

    run: RunId | None = None
    tasks: list[TaskFields] = Field(min_length=1, max_length=MAX_BATCH)


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "batch" if "tasks" in value else "single"
    return "batch" if isinstance(value, TaskBatch) else "single"


Submission = Annotated[Annotated[SingleTask, Tag("single")] | Annotated[TaskBatch, Tag("batch")], Discriminator(_shape)]


def specs_of(submission: SingleTask | TaskBatch) -> list[TaskSpec]:
    """Every task of a submission; raises `Problem` naming the first field that is not allowed."""
    single = isinstance(submission, SingleTask)
    fields: Sequence[TaskFields] = [submission] if single else submission.tasks
    specs: list[TaskSpec] = []
    seen: dict[str, int] = {}
    for number, item in enumerate(fields):
        prefix = "" if single else f"tasks.{number}."
        try:
            spec = item.spec()
        except task_rules.InvalidTaskError as error:
            raise Problem(422, f"{prefix}{error}", field=f"{prefix}{error.field}") from error
        if spec.task in seen:
            where = f"{prefix}task"
            detail = f"{where} {spec.task!r} is tasks.{seen[spec.task]} already; each task has an identifier of its own"
            raise Problem(422, detail, field=where)
        seen[spec.task] = number
        specs.append(spec)
    return specs


def ranged(default: Any, low: float, high: float, **more: Any) -> Any:
    """A field whose range the document shows; `validate` holds it, so that every way in has the same sentence."""
    return Field(default=default, json_schema_extra={"minimum": low, "maximum": high}, **more)


class DispatchIn(Input):
    """Admission of groups: (phi + mu) * batch_groups are unconsumed at most."""

    phi: float = ranged(0.5, 0, 64)
    mu: int = ranged(2, 1, 64)
    batch_groups: int = ranged(8, 1, 4096)
    group_size: int = ranged(8, 1, 256)
    min_members: int = ranged(2, 1, 256)
    close_at: int | None = ranged(None, 1, 256, description="Scored members at which a group trains; null: all")
    deadline_s: float | None = ranged(None, 0.1, 31_536_000)
    continuous: int | None = ranged(None, 1, 1_000_000, description="Unfinished groups to keep; null: boundaries")
    d_max: int | None = ranged(None, 0, 10_000, description="Hard bound of staleness, in updates; null: none")
    on_stale: Literal["wait", "drop"] = "wait"


class BranchingIn(Input):
    """After `turn` turns an execution goes on as `copies` alternatives, each in a copy of its sandbox."""

    turn: int = Field(json_schema_extra={"minimum": 1, "maximum": 99_999}, description="Less than max_turns")
    copies: int = ranged(2, 2, 16)


class ShotTurnIn(Input):
    """A turn of a worked example."""

    command: str = Field(max_length=task_rules.MAX_TEXT, description="One line; the last of an example is done")
    output: str = Field(default="", max_length=task_rules.MAX_TEXT)


class ShotIn(Input):
    """A worked example in front of a transcript."""

    task: str = Field(max_length=task_rules.MAX_TEXT, description="Its instruction, one line")
    turns: list[ShotTurnIn]


class HarnessIn(Input):
    """The agent, its model calls and its budgets."""

    agent: Literal["shell", "synthetic", "program"] = Field(
        default="shell",
        description="program: any program that calls the model, run in the sandbox; "
        "synthetic: a load of drawn lengths, without a sandbox, scored by a draw",
    )
    program: str | None = Field(
        default=None, max_length=task_rules.MAX_TEXT, description="Command line of the agent program"
    )
    system: str | None = Field(default=None, max_length=task_rules.MAX_TEXT)
    prompt: Literal["chat", "transcript"] = Field(
        default="chat", description="agent shell: messages by the chat template, or a text that the model goes on with"
    )
    shots: list[ShotIn] = Field(default=[], description=f"Worked examples in front of a transcript, up to {MAX_SHOTS}")
    max_turns: int = ranged(4, 1, 100_000)
    time_budget_s: float = ranged(600.0, 0.1, 604_800)
    command_timeout_s: float = ranged(10.0, 0.1, 86_400)
    max_tokens: int = ranged(48, 1, 1_000_000)
    context_tokens: int = ranged(512, 1, 2_000_000)
    token_budget: int | None = ranged(
        None, 1, 1_000_000_000, description="Tokens that an execution samples at most, all calls together"
    )
    streams: Literal["recorded", "live"] = Field(
        default="recorded", description="A client that streams gets its text once it is recorded, or as it is sampled"
    )
    temperature: float = ranged(1.0, 0.01, 10)
    observation_chars: int = ranged(40, 1, 1_000_000)
    synthetic_turns: int = ranged(4, 1, 100_000, description="Calls of a synthetic execution; at most max_turns")
    synthetic_tokens: float = ranged(200.0, 1, 10_000_000, description="Mean of what a synthetic execution samples")
    synthetic_sigma: float = ranged(0.336, 0, 4, description="Of that number's logarithm")
    synthetic_shared: float = ranged(0.42, 0, 1, description="Share of the logarithm's variance common to a group")
    branching: BranchingIn | None = Field(default=None, description="agent shell: alternatives of each execution")


class OptimizationIn(Input):
    """The trainer's arithmetic."""

    loss: Literal["clip", "truncated", "sequence", "reinforce"] = Field(
        default="clip", description="clip: PPO, DAPO; truncated: TIS, CISPO; sequence: GSPO; reinforce: no correction"
    )
    average: Literal["execution", "token", "prompt", "constant"] = Field(
        default="execution", description="What tokens are averaged over first; constant: over constant_tokens"
    )
    constant_tokens: int | None = ranged(None, 1, 1_000_000_000, description="Of average = constant")
    advantage: Literal["grpo", "loo", "no_std"] = "grpo"
    clip_low: float = ranged(0.8, 0, 1)
    clip_high: float = ranged(1.28, 1, 100)
    truncate: float | None = ranged(
        None, 1, 1_000_000, description="Cap of the probability ratio; null: 2 for the loss truncated, else none"
    )
    sequence_low: float = ranged(0.9997, 0, 1, description="Of the loss sequence: lower bound of a sequence's ratio")
    sequence_high: float = ranged(1.0004, 1, 100, description="Of the loss sequence: upper bound of it")
    kl: float = ranged(0.0, 0, 100, description="Coefficient of KL(policy || initial model); 0: no such term")
    kl_estimator: Literal["k2", "k3"] = "k3"
    max_age: int | None = ranged(
        None, 0, 10_000, description="A token that was sampled more versions ago has no loss; null: all have"
    )
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = ranged(2e-4, 0, 1)
    weight_decay: float = ranged(0.0, 0, 1)
    beta1: float = ranged(0.9, 0, 0.999999, description="Of adamw")
    beta2: float = ranged(0.999, 0, 0.999999, description="Of adamw")
    epsilon: float = ranged(1e-8, 1e-16, 1, description="Of adamw")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Of the learning rate; linear and cosine end at 0 and need updates"
    )
    warmup_updates: int = ranged(0, 0, 10_000_000, description="Over which the learning rate grows from 0")
    gradient_clip_norm: float = ranged(1.0, 1e-6, 1e6)
    logprob_gap_alarm: float = ranged(
        0.05, 0, 1_000_000, description="Mean gap of trainer and engine at one version that raises an alarm, nats"
    )
    canary: bool = Field(default=False, description="The learning rate is 0: all figures must stay as they were")


class SamplingIn(Input):
    """Which paths of an execution's tree are trained."""

    j_max: int | None = ranged(None, 1, 1_000_000, description="Paths of an execution at most; null: all")
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    alternatives: Literal["structural", "leaves"] = Field(
        default="structural", description="leaves: answers to one prompt that were both gone on from share their weight"
    )


class ScoringIn(Input):
    """How the work of an execution is evaluated."""

    grading: Literal["separate", "shared"] = Field(
        default="separate", description="separate: on a copy of the files, in a fresh sandbox; shared: in the agent's"
    )
    attempts: int = ranged(3, 1, 100, description="Evaluations at most, before the execution leaves training")
    progress_every: int | None = ranged(
        None, 1, 100_000, description="Turns between two measurements of progress; null: none"
    )
    credit: Literal["execution", "progress"] = Field(
        default="execution", description="progress: tokens are also credited the progress of their turn"
    )


class ElasticIn(Input):
    """Which cells serve and which train."""

    policy: Literal["fine", "static", "global", "coarse"] = "fine"
    stream: bool = Field(default=True, description="Train groups as they are ready; else once a burst is")
    train_cells: int = ranged(1, 1, 10_000, description="Of the policy static")
    standalone_cells: int = ranged(0, 0, 10_000, description="Of the policy coarse: cells that never train")
    min_rollout_cells: int = ranged(0, 0, 10_000)
    max_rollout_cells: int | None = ranged(None, 1, 10_000)
    min_train_cells: int = ranged(0, 0, 10_000)
    max_train_cells: int | None = ranged(None, 1, 10_000)
    dwell_s: float = ranged(0.5, 0, 86_400)
    gate: float = ranged(2.0, 0, 1_000, description="Work, in switch times, that a cell is sent to train for")
    switch_s: float | None = ranged(None, 0, 86_400)
    grain: int | None = ranged(None, 1, 256, description="Executions that a cell trains at a time; null: a group")


class ServingIn(Input):
    """How engines have to compute that serve the run; others get no calls."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="That engines compute in; null: any"
    )
    kv_dtype: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Of keys and values, as vLLM names it; null: that which it computes in",
    )
    quantization: str | None = Field(
        default=None, min_length=1, max_length=64, description="Of weights, as vLLM names it; null: none"
    )
    chunked_prefill: bool | None = Field(default=None, description="Prompts are read in parts; null: either")
    prefix_caching: bool | None = Field(default=None, description="Prompts share keys and values; null: either")


class RunIn(Input):
    """A run: one policy trained on a stream of tasks."""

    run: RunId
    model: str = Field(min_length=1, max_length=4096, description="Directory of the initial policy, an absolute path")
    updates: int | None = ranged(None, 1, 10_000_000, description="The run is finished after so many")
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    dispatch: DispatchIn = DispatchIn()
    harness: HarnessIn = HarnessIn()
    optimization: OptimizationIn = OptimizationIn()
    sampling: SamplingIn = SamplingIn()
    scoring: ScoringIn = ScoringIn()
    elastic: ElasticIn = ElasticIn()
    serving: ServingIn = ServingIn()

    def spec(self) -> RunSpec:
        """The struct, with every rule checked; raises `Problem`."""
        for field, text in (
            ("model", self.model),
            ("harness.system", self.harness.system or ""),
            ("harness.program", self.harness.program or ""),
        ):
            if not task_rules.printable(text):
                raise Problem(422, f"{field} contains NUL or half of a surrogate pair", field=field)
        if not self.model.startswith("/"):
            detail = f"model is {self.model!r}; allowed is the absolute path of a directory that the trainer can read"
            raise Problem(422, detail, field="model")
        try:
            check_run(self.run)
            return validate(msgspec.convert(self.model_dump(), RunSpec))
        except BadIdentifierError as error:
            raise Problem(422, str(error), field="run") from error
        except InvalidRunError as error:
            field = str(error).partition(" ")[0].rstrip(":")
            raise Problem(422, str(error), field=field) from error
