"""Hosts and cells: roles, what is wished and what is so (stream HOSTS, buckets `gyre_hosts` and `gyre_desired`)."""

import enum
from typing import ClassVar, Literal

from opengyre.proto import subjects
from opengyre.proto.base import Event, Record


class HostState(enum.Enum):
    """Design section 4. LOST is not reported by a host: it is the absence of its heartbeat."""

    STARTING = "starting"
    JOINING = "joining"
    ROLLOUT = "rollout"
    DRAINING = "draining"
    TRAIN = "train"
    LEAVING_TRAIN = "leaving_train"
    """Finishes the group at hand and hands over, before it joins the rollout again."""
    CORDONED = "cordoned"


Role = Literal["rollout", "train", "cordoned"]
KV_FULL = 0.9
"""Use of the memory for keys and values from which calls that wait are taken to wait for it. Calls that wait for their
prompt to be read are no sign of that."""


class DesiredRole(Record, frozen=True, kw_only=True):
    """Bucket `gyre_desired`: the level that a host obeys. Only a greater epoch is obeyed; a repeat changes nothing."""

    host: str
    role: Role
    epoch: int
    grace_s: float = 0.5
    """How long a call in flight may go on before it is moved."""
    reason: str = ""
    cell: str = ""
    """The cell it belongs to, so that a cell whose hosts are lost is still known."""
    wish: Role | None = None
    """An operator's wish behind it; it lasts until the cell is resumed."""


class HostCommand(Event, frozen=True, kw_only=True, tag="host.command.v1"):
    """The audit of a `DesiredRole`."""

    stream: ClassVar[str] = subjects.HOSTS
    desired: DesiredRole
    decision: str | None = None

    def event_id(self) -> str:
        return f"host-{self.desired.host}-command-{self.desired.epoch}"


class Sampler(Record, frozen=True, kw_only=True):
    """How an engine samples, and what its log-probs are of: all that moves them against the trainer's, which are of the
    whole distribution at the call's temperature. An engine says what is in force, not what it was asked for."""

    temperature: float | None = None
    """At which it samples whatever a call says. None: at the call's own."""
    top_p: float = 1.0
    """Share of the probability that is sampled from."""
    top_k: int = 0
    """Tokens that are sampled from; 0: all."""
    min_p: float = 0.0
    """Share of the likeliest token's probability below which none is sampled."""
    repetition_penalty: float = 1.0
    processors: tuple[str, ...] = ()
    """Further changes to logits, by name."""
    logprobs: str = "processed"
    """`processed`: of the distribution that is sampled from. `raw`: of the logits as the model gives them, without the
    temperature."""
    dtype: str = "float32"
    """That it computes in."""
    kv_dtype: str = "float32"
    """Of keys and values."""
    quantization: str | None = None
    """Of weights."""
    chunked_prefill: bool = False
    """Whether a prompt is read in parts, beside other calls."""
    prefix_caching: bool = False
    """Whether prompts share keys and values."""


class HostStatus(Record, frozen=True, kw_only=True):
    """Bucket `gyre_hosts`: renewed every second, with a time to live of a few: its absence is LOST."""

    host: str
    cell: str
    boot: str
    """Identity of this process."""
    state: HostState
    epoch: int
    """Of the last command obeyed."""
    url: str
    """Base URL of the engine's HTTP endpoint (`/inference/v1/generate`)."""
    engine: str
    run: str | None = None
    version: int = -1
    """Version the engine serves; -1 before the first."""
    capacity: float = 32
    """Calls it serves at full speed."""
    running: int = 0
    """Calls in flight."""
    waiting: int = 0
    """Of the calls in flight, those that wait in the engine."""
    held_tokens: int = 0
    """Prompts and completions of the calls in flight, in tokens."""
    tokens_per_s: float = 0.0
    """Sampled, over the last seconds."""
    kv_usage: float = 0.0
    """Share of the engine's memory for keys and values that is in use, 0 to 1; 0 where it does not say."""
    prefix_hits: float | None = None
    """Share of the prompts' tokens of the last seconds whose keys and values the engine still had. None: there were no
    prompts, or it does not say."""
    memory_bytes: int = 0
    """Measured, of the engine (weights and keys/values)."""
    training_group: str | None = None
    training_update: int | None = None
    since_s: float = 0.0
    """How long it has been in this state, on its own clock."""
    last_switch_s: float | None = None
    """Duration of its last role switch."""
    sampler: Sampler | None = None
    """How its engine samples, by which a run takes or refuses it. None: it has not begun to."""

    @property
    def serves(self) -> float:
        """Calls that it serves at full speed now, 1 at least: its capacity, or what its engine runs where more wait
        because its memory for keys and values is full."""
        full = self.waiting > 0 and self.kv_usage >= KV_FULL
        return max(1.0, min(self.capacity, self.running - self.waiting) if full else self.capacity)


class HostStateChanged(Event, frozen=True, kw_only=True, tag="host.state.v1"):
    stream: ClassVar[str] = subjects.HOSTS
    host: str
    cell: str
    boot: str
    sequence: int
    """Of this process's changes, from 0."""
    before: HostState
    after: HostState
    epoch: int
    version: int
    live_calls: int
    """Calls in flight when it changed."""
    moved_calls: int = 0
    """Calls that were stopped with their partial tokens to be continued elsewhere."""
    freed_bytes: int = 0
    duration_s: float = 0.0
    """How long it was in `before`."""
    obeyed_s: float | None = None
    """Since it was told of the command of `epoch`, on its own clock. None: it was told nothing yet."""
    reason: str = ""

    def event_id(self) -> str:
        return f"host-{self.host}-{self.boot}-{self.sequence}"


HostEvent = HostCommand | HostStateChanged
