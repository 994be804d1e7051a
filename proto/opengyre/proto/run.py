"""A run: one policy trained on a stream of tasks under one setting of the gyre (bucket `gyre_runs`)."""

from typing import Literal

from opengyre.proto.base import Record
from opengyre.proto.engine_names import KV_DTYPES, QUANTIZATIONS

MAX_SHOTS = 64


class Dispatch(Record, frozen=True, kw_only=True):
    """How groups are admitted (design section 5; the paper's phi, mu, B)."""

    phi: float = 0.5
    """Extra depth at the boundary, in units of `batch_groups`; at least 0."""
    mu: int = 2
    """Updates in a burst; weights are published at its end; at least 1."""
    batch_groups: int = 8
    """B: groups in an update; at least 1."""
    group_size: int = 8
    """G: executions in a group; at least 2 for group-relative advantages."""
    min_members: int = 2
    """A group with fewer scored members leaves training."""
    close_at: int | None = None
    """Scored members at which a group closes: its baseline and scale are frozen, it trains, and each later member
    trains late, with its own staleness. None: all of them (the paper)."""
    deadline_s: float | None = None
    """After so long a group closes as soon as `min_members` have a score. None: never."""
    continuous: int | None = None
    """Q_c: keep so many groups unfinished, whatever the boundary says. None: boundary dispatch."""
    d_max: int | None = None
    """Hard bound of staleness, in updates. None: none."""
    on_stale: Literal["wait", "drop"] = "wait"
    """How `d_max` is kept: admission is paced so that no group can exceed it, or what exceeds it is dropped."""

    @property
    def closes_at(self) -> int:
        """`close_at`, where None is the whole group."""
        return self.group_size if self.close_at is None else self.close_at

    @property
    def update_executions(self) -> int:
        """B * G: what an update holds."""
        return self.batch_groups * self.group_size


class Branching(Record, frozen=True, kw_only=True):
    """Alternatives of an execution: after `turn` turns it goes on as `copies` lanes, each in a copy of its sandbox."""

    turn: int
    """Turns before the lanes part, at least 1. Fixed beforehand: where it parts must not depend on what the policy did,
    or the estimate of the gradient is biased."""
    copies: int = 2
    """Lanes, 2 to 16."""


class ShotTurn(Record, frozen=True, kw_only=True):
    """A turn of a worked example."""

    command: str
    """One line; the last of an example is `done`."""
    output: str = ""
    """What it printed."""


class Shot(Record, frozen=True, kw_only=True):
    """A worked example in front of a transcript."""

    task: str
    """Its instruction, one line."""
    turns: tuple[ShotTurn, ...]


class Harness(Record, frozen=True, kw_only=True):
    """The agent, its model calls and its budgets."""

    agent: Literal["shell", "synthetic", "program"] = "shell"
    """`shell` works in a sandbox. `program` is any program, run in the sandbox, that calls the model by the OpenAI or
    the Anthropic API. `synthetic` is a load: it makes calls of drawn lengths, opens no sandbox and is scored by a
    draw."""
    program: str | None = None
    """The command line of `program`, run by `sh` in /workspace; it finds the task's instruction in `GYRE_INSTRUCTION`,
    and addresses, key and model in the variables that clients of these APIs read."""
    system: str | None = None
    """System prompt; none by default."""
    prompt: Literal["chat", "transcript"] = "chat"
    """How the `shell` agent asks. `chat`: messages, by the model's chat template. `transcript`: a text that the model
    goes on with, for base models; a turn is one line."""
    shots: tuple[Shot, ...] = ()
    """Worked examples in front of a transcript, at most 64."""
    max_turns: int = 4
    time_budget_s: float = 600.0
    """Of one execution, on the rollout service's clock, without the time it was suspended."""
    command_timeout_s: float = 10.0
    max_tokens: int = 48
    """Of one model call."""
    context_tokens: int = 512
    """Of prompt and completion together."""
    token_budget: int | None = None
    """Tokens that an execution samples at most, all calls together. None: as many as its calls may have."""
    streams: Literal["recorded", "live"] = "recorded"
    """When a client that streams gets its text: once the call is in the log, or as it is sampled. What was sent of a
    live stream cannot be taken back, so its client sees a crash of the rollout service as a broken stream, and has to
    ask again by itself."""
    temperature: float = 1.0
    observation_chars: int = 40
    """What the agent sees of a command's output."""
    synthetic_turns: int = 4
    """Calls of a synthetic execution; at most `max_turns`."""
    synthetic_tokens: float = 200.0
    """Mean of the tokens that a synthetic execution samples, all calls together."""
    synthetic_sigma: float = 0.336
    """Standard deviation of the logarithm of that number, which is lognormal."""
    synthetic_shared: float = 0.42
    """Share of the logarithm's variance that is common to the executions of a group."""
    branching: Branching | None = None
    """None: an execution is one line. `max_turns` is of each line, from the root to its end."""


class Optimization(Record, frozen=True, kw_only=True):
    """The trainer's arithmetic (design section 7; formulas in docs/losses.md)."""

    loss: Literal["clip", "truncated", "sequence", "reinforce"] = "clip"
    """`clip`: token-level probability ratios within bounds (PPO, DAPO). `truncated`: importance weights with a cap,
    constant to the gradient (truncated importance sampling, CISPO). `sequence`: one ratio a sequence within bounds
    (GSPO). `reinforce`: no correction."""
    average: Literal["execution", "token", "prompt", "constant"] = "execution"
    """How tokens are averaged: inside an execution first, then over executions; over all tokens of the update; inside a
    group first, then over groups; or an execution's sum over `constant_tokens`, then over executions."""
    constant_tokens: int | None = None
    """Of `average = constant`: what an execution's sum is divided by."""
    advantage: Literal["grpo", "loo", "no_std"] = "grpo"
    clip_low: float = 0.8
    """Lower bound of the probability ratio."""
    clip_high: float = 1.28
    """Upper bound of the probability ratio."""
    truncate: float | None = None
    """Cap of the probability ratio. None: 2 for `truncated`, else none."""
    sequence_low: float = 0.9997
    """Lower bound of a sequence's ratio (`sequence`), a geometric mean over its tokens."""
    sequence_high: float = 1.0004
    """Upper bound of it."""
    kl: float = 0.0
    """Coefficient of KL(policy || initial model of the run), per token; 0: no such term."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    max_age: int | None = None
    """A token that was sampled more versions ago has no loss; it stays in the averages. None: none is left out."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """torch.optim's; `adafactor` keeps a row and a column for a matrix instead of two matrices."""
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    """Of `adamw`."""
    beta2: float = 0.999
    """Of `adamw`."""
    epsilon: float = 1e-8
    """Of `adamw`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after the warm-up; `linear` and `cosine` go down to 0 at the run's end."""
    warmup_updates: int = 0
    """Updates over which the learning rate grows from 0 in equal steps."""
    gradient_clip_norm: float = 1.0
    logprob_gap_alarm: float = 0.05
    """An update whose mean |trainer log-prob - engine log-prob| at one version is above it raises an alarm, nats."""
    canary: bool = False
    """The learning rate is 0: nothing is learnt, and all figures must stay as they were."""


class Sampling(Record, frozen=True, kw_only=True):
    """Which paths of an execution's tree are trained (design section 6; the paper's bounded deduplicating sampling)."""

    j_max: int | None = None
    """Paths of an execution at most: drawn by role, in proportion to the tokens that are left. None: all of them."""
    seed: int = 0
    """Of the draws, with that of the execution."""
    alternatives: Literal["structural", "leaves"] = "structural"
    """Two answers to one prompt that were both gone on from: all in one world, each token counts once; or worlds of
    their own, each token weighted by the share of leaves below it."""


class Scoring(Record, frozen=True, kw_only=True):
    """How the work of an execution is evaluated (design section 6)."""

    grading: Literal["separate", "shared"] = "separate"
    """`separate`: the checks run on a copy of the files that the agent left, in a fresh sandbox that it never was in.
    `shared`: in the agent's own, once its processes have been stopped."""
    attempts: int = 3
    """Evaluations at most; after so many that failed by no fault of the work, the execution leaves training."""
    progress_every: int | None = None
    """Turns between two measurements of progress, each an evaluation of a copy of the files. None: none."""
    credit: Literal["execution", "progress"] = "execution"
    """Whose advantage a token has: its execution's, or one that also credits the progress of its turn (which needs
    `progress_every`)."""


class Elastic(Record, frozen=True, kw_only=True):
    """Which cells serve and which train (design section 4; the allocations of the paper's Table 1)."""

    policy: Literal["fine", "static", "global", "coarse"] = "fine"
    """`fine`: cells switch one by one on demand. `static` (Async): `train_cells` train, the others serve. `global`
    (Colocate): all cells train once a burst is complete, and serve again once it is trained. `coarse`: the same, but
    `standalone_cells` always serve."""
    stream: bool = True
    """Groups are trained as they are ready; without it, once all groups of a burst are."""
    train_cells: int = 1
    """Of the `static` policy."""
    standalone_cells: int = 0
    """Of the `coarse` policy: cells that never train."""
    min_rollout_cells: int = 0
    """Floor of cells in the rollout role while episodes are live."""
    max_rollout_cells: int | None = None
    """Ceiling of cells in the rollout role; the others train or wait to."""
    min_train_cells: int = 0
    """Floor of cells in the train role."""
    max_train_cells: int | None = None
    """Ceiling of cells in the train role."""
    dwell_s: float = 0.5
    """A cell keeps a role at least this long (hysteresis)."""
    gate: float = 2.0
    """A cell is sent to train only for work of so many switch times at least; 0: always."""
    switch_s: float | None = None
    """Duration of a switch until one is measured. None: not known, and the gate stands open until then."""
    grain: int | None = None
    """Executions that a cell trains at a time. None: a group."""


class Serving(Record, frozen=True, kw_only=True):
    """How engines have to compute that serve the run; one that differs gets no calls (`opengyre.proto.handshake`).

    What the trainer cannot compute again is refused whatever stands here: truncated distributions, penalties, log-probs
    that are not of what was sampled from.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """That engines compute in. None: any."""
    kv_dtype: str | None = None
    """Of keys and values, one of `engine_names.KV_DTYPES`. None: that which the engine computes in."""
    quantization: str | None = None
    """Of weights, one of `engine_names.QUANTIZATIONS`. None: none."""
    chunked_prefill: bool | None = None
    """Whether prompts are read in parts. None: either."""
    prefix_caching: bool | None = None
    """Whether prompts share keys and values. None: either."""


RunState = Literal["active", "finished", "stopped"]


class RunSpec(Record, frozen=True, kw_only=True):
    run: str
    model: str
    """Directory of the initial policy (config.json, model.safetensors, tokenizer.json)."""
    updates: int | None = None
    """The run is finished after so many updates; without it, it goes on while there are tasks."""
    seed: int = 0
    dispatch: Dispatch = Dispatch()
    harness: Harness = Harness()
    optimization: Optimization = Optimization()
    sampling: Sampling = Sampling()
    scoring: Scoring = Scoring()
    elastic: Elastic = Elastic()
    serving: Serving = Serving()
    state: RunState = "active"
    """One run is active at a time in a stack."""


class InvalidRunError(ValueError):
    """A run's setting is out of its allowed range; the message names the field and the range."""


def _optional(name: str, value: float | None, low: float, high: float) -> tuple[tuple[str, float, float, float], ...]:
    return () if value is None else ((name, value, low, high),)


def _train_cells(elastic: Elastic) -> tuple[float, float]:
    """A fixed split is within the floor and the ceiling of the train role."""
    if elastic.policy != "static":
        return 1, 10_000
    return max(1, elastic.min_train_cells), elastic.max_train_cells or 10_000


def _branching(harness: Harness) -> tuple[tuple[str, float, float, float], ...]:
    if (branching := harness.branching) is None:
        return ()
    # A task may have a turn budget of its own: an execution that ends before the turn has no lanes.
    return (
        ("harness.branching.turn", branching.turn, 1, max(1, harness.max_turns - 1)),
        ("harness.branching.copies", branching.copies, 2, 16),
    )


_SEQUENCE = (
    "optimization.loss is sequence beside it; allowed are clip, truncated and reinforce, which judge each token by its "
    "own advantage"
)


def _unbranched(spec: RunSpec, branching: Branching) -> str | None:
    """What does not go with lanes, in a sentence."""
    if spec.harness.agent != "shell":
        agent = spec.harness.agent
        return f"harness.branching is set, and harness.agent is {agent}; allowed is shell, whose state can be copied"
    if spec.scoring.progress_every is not None:
        return "scoring.progress_every is set beside harness.branching; leave out one of them"
    if spec.optimization.loss == "sequence":
        # One ratio a path: its gradient is spread over the path, so the trunk would get what one lane is credited with.
        return f"harness.branching is set; {_SEQUENCE}"
    j_max = spec.sampling.j_max
    if j_max is not None and j_max < branching.copies:
        return (
            f"sampling.j_max is {j_max} beside harness.branching.copies = {branching.copies}; allowed are values from "
            f"{branching.copies}, or none: each lane is a path"
        )
    return None


def _transcript(h: Harness) -> str | None:
    """What is wrong with a prompt that is a transcript, in a sentence."""
    if h.prompt == "chat":
        return "harness.shots is set, but nothing reads it without harness.prompt = transcript" if h.shots else None
    if h.agent != "shell":
        return f"harness.prompt is transcript, and harness.agent is {h.agent}; allowed is shell, which writes it"
    if len(h.shots) > MAX_SHOTS:
        return f"harness.shots has {len(h.shots)} examples; allowed are up to {MAX_SHOTS}"
    for number, shot in enumerate(h.shots):
        if not shot.turns:
            return f"harness.shots[{number}].turns is empty; an example has at least one turn"
        lines = {"task": shot.task, **{f"turns[{at}].command": turn.command for at, turn in enumerate(shot.turns)}}
        for name, line in lines.items():
            if not line.strip() or "\n" in line.strip():
                return f"harness.shots[{number}].{name} is {line!r}; allowed is one line of text"
    return None


def _standalone_cells(elastic: Elastic) -> tuple[float, float]:
    """They are what serves while the pool trains."""
    return (max(1, elastic.min_rollout_cells) if elastic.policy == "coarse" else 0), 10_000


def _ignored(o: Optimization) -> str | None:
    """The first setting that was given and that nothing reads beside the others, in a sentence."""
    uses = (
        (("constant_tokens",), o.average == "constant", "optimization.average = constant"),
        (("truncate",), o.loss in ("clip", "truncated"), "optimization.loss = clip or truncated"),
        (("clip_low", "clip_high"), o.loss == "clip", "optimization.loss = clip"),
        (("sequence_low", "sequence_high"), o.loss == "sequence", "optimization.loss = sequence"),
        (("kl_estimator",), o.kl > 0, "optimization.kl above 0"),
        (("beta1", "beta2", "epsilon"), o.optimizer == "adamw", "optimization.optimizer = adamw"),
    )
    default = Optimization()
    for names, used, by in uses:
        for name in names:
            if not used and getattr(o, name) != getattr(default, name):
                return f"optimization.{name} is {getattr(o, name)}, but nothing reads it without {by}; leave it out"
    return None


def _unknown(serving: Serving) -> str | None:
    """A name that no engine has, in a sentence: a run that asks for it would get no call served."""
    for name, value, allowed, without in (
        ("kv_dtype", serving.kv_dtype, KV_DTYPES, "that which the engine computes in"),
        ("quantization", serving.quantization, QUANTIZATIONS, "weights that are not quantized"),
    ):
        if value is not None and value not in allowed:
            return f"serving.{name} is {value!r}; allowed are {', '.join(allowed)}; leave it out for {without}"
    return None


def validate(spec: RunSpec) -> RunSpec:
    """Return `spec` if every field is in its range and read by what is chosen beside it, else raise `InvalidRunError`
    naming the first that is not."""
    d, h, o, e = spec.dispatch, spec.harness, spec.optimization, spec.elastic
    ranges: tuple[tuple[str, float, float, float], ...] = (
        # The range of others ends at it.
        ("updates", spec.updates if spec.updates is not None else 1, 1, 10_000_000),
        ("dispatch.phi", d.phi, 0, 64),
        ("dispatch.mu", d.mu, 1, 64),
        ("dispatch.batch_groups", d.batch_groups, 1, 4096),
        ("dispatch.group_size", d.group_size, 1, 256),
        ("dispatch.min_members", d.min_members, 1, d.group_size),
        ("harness.max_turns", h.max_turns, 1, 100_000),
        ("harness.time_budget_s", h.time_budget_s, 0.1, 604_800),
        ("harness.command_timeout_s", h.command_timeout_s, 0.1, 86_400),
        ("harness.max_tokens", h.max_tokens, 1, 1_000_000),
        ("harness.context_tokens", h.context_tokens, h.max_tokens, 2_000_000),
        *_optional("harness.token_budget", h.token_budget, 1, 1_000_000_000),
        ("harness.temperature", h.temperature, 0.01, 10),
        ("harness.observation_chars", h.observation_chars, 1, 1_000_000),
        ("harness.synthetic_turns", h.synthetic_turns, 1, h.max_turns if h.agent == "synthetic" else 100_000),
        ("harness.synthetic_tokens", h.synthetic_tokens, 1, 10_000_000),
        ("harness.synthetic_sigma", h.synthetic_sigma, 0, 4),
        ("harness.synthetic_shared", h.synthetic_shared, 0, 1),
        *_branching(h),
        ("optimization.learning_rate", o.learning_rate, 0, 1),
        ("optimization.weight_decay", o.weight_decay, 0, 1),
        ("optimization.clip_low", o.clip_low, 0, 1),
        ("optimization.clip_high", o.clip_high, 1, 100),
        # With clipped ratios a cap below the upper bound would be that bound.
        *_optional("optimization.truncate", o.truncate, o.clip_high if o.loss == "clip" else 1, 1_000_000),
        ("optimization.sequence_low", o.sequence_low, 0, 1),
        ("optimization.sequence_high", o.sequence_high, 1, 100),
        ("optimization.kl", o.kl, 0, 100),
        *_optional("optimization.constant_tokens", o.constant_tokens, 1, 1_000_000_000),
        *_optional("optimization.max_age", o.max_age, 0, 10_000),
        ("optimization.beta1", o.beta1, 0, 0.999999),
        ("optimization.beta2", o.beta2, 0, 0.999999),
        ("optimization.epsilon", o.epsilon, 1e-16, 1),
        ("optimization.warmup_updates", o.warmup_updates, 0, spec.updates or 10_000_000),
        ("optimization.gradient_clip_norm", o.gradient_clip_norm, 1e-6, 1e6),
        ("optimization.logprob_gap_alarm", o.logprob_gap_alarm, 0, 1_000_000),
        ("elastic.train_cells", e.train_cells, *_train_cells(e)),
        ("elastic.min_rollout_cells", e.min_rollout_cells, 0, 10_000),
        ("elastic.standalone_cells", e.standalone_cells, *_standalone_cells(e)),
        ("elastic.min_train_cells", e.min_train_cells, 0, 10_000),
        ("elastic.dwell_s", e.dwell_s, 0, 86_400),
        ("elastic.gate", e.gate, 0, 1_000),
        *_optional("dispatch.close_at", d.close_at, d.min_members, d.group_size),
        *_optional("dispatch.deadline_s", d.deadline_s, 0.1, 31_536_000),
        *_optional("dispatch.continuous", d.continuous, 1, 1_000_000),
        # A burst of mu updates trains what was admitted before it: its last update is mu - 1 versions away.
        *_optional("dispatch.d_max", d.d_max, d.mu - 1, 10_000),
        *_optional("sampling.j_max", spec.sampling.j_max, 1, 1_000_000),
        ("sampling.seed", spec.sampling.seed, 0, 2**63 - 1),
        ("scoring.attempts", spec.scoring.attempts, 1, 100),
        *_optional("scoring.progress_every", spec.scoring.progress_every, 1, 100_000),
        *_optional("elastic.max_rollout_cells", e.max_rollout_cells, max(1, e.min_rollout_cells), 10_000),
        *_optional("elastic.max_train_cells", e.max_train_cells, max(1, e.min_train_cells), 10_000),
        *_optional("elastic.switch_s", e.switch_s, 0, 86_400),
        *_optional("elastic.grain", e.grain, 1, d.group_size),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidRunError(f"{name} is {value}; allowed are values from {low} to {high}")
    if h.agent == "program" and not (h.program or "").strip():
        raise InvalidRunError("harness.program is empty; allowed is a command line, since harness.agent is program")
    if (wrong := _transcript(h)) is not None:
        raise InvalidRunError(wrong)
    if h.branching is not None and (fault := _unbranched(spec, h.branching)) is not None:
        raise InvalidRunError(fault)
    if spec.scoring.credit == "progress" and o.loss == "sequence":
        raise InvalidRunError(f"scoring.credit is progress; {_SEQUENCE}")
    if spec.scoring.credit == "progress" and spec.scoring.progress_every is None:
        raise InvalidRunError("scoring.progress_every is not set; scoring.credit = progress needs it, from 1")
    if o.average == "constant" and o.constant_tokens is None:
        raise InvalidRunError(
            "optimization.constant_tokens is not set; optimization.average = constant needs it, from 1"
        )
    if (fault := _unknown(spec.serving) or _ignored(o)) is not None:
        raise InvalidRunError(fault)
    if o.schedule != "constant" and spec.updates is None:
        raise InvalidRunError(f"updates is not set; optimization.schedule {o.schedule} needs it, since it ends there")
    depth = (d.phi + d.mu) * d.batch_groups
    if depth != int(depth):
        raise InvalidRunError(
            f"dispatch: (phi + mu) * batch_groups is {depth} groups; choose phi so that it is a whole number"
        )
    return spec
