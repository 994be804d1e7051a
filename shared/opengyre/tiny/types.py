"""What goes into the tiny engine and what comes out of it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class EngineError(Exception):
    """A call that the engine refused, or its failure. The message is one sentence."""


class InvalidRequestError(EngineError):
    """A request that can never be served; the message names the field and what is allowed."""


class EngineBusyError(EngineError):
    """As many requests wait as may; try again later."""


class WrongStateError(EngineError):
    """The call is not allowed in the engine's present state."""


class EngineClosedError(EngineError):
    """The engine was closed, or its thread failed."""


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` of a completion were sampled by `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call: token ids in."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    max_tokens: int
    """Of the completion; the context's end may come earlier."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """The token at an absolute position is a function of seed, position and logits."""
    ignore_eos: bool = False
    """Go on after a stop token."""
    priority: int = 0
    """Of the calls that wait the least comes first, and of equals the oldest."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Token ids out; a stop token that ended the call is the last of them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One a token, of the distribution that was sampled from."""
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    """They cover `token_ids` in order."""


@dataclass(frozen=True, slots=True)
class Increment:
    """Tokens that a call in flight has got since it was last looked at."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    """They cover `token_ids` in order, in positions of the whole completion."""


def spans_from(spans: tuple[VersionSpan, ...], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of `[start, end)`."""
    return tuple(
        VersionSpan(span.version, max(span.start, start), min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`threads` are torch's own in this process; None leaves them as they are."""

    max_batch: int = 32
    """Requests that run at once, and rows of every step."""
    max_context: int = 512
    """Tokens of prompt and completion."""
    max_waiting: int = 1024
    threads: int | None = 1

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max_batch", self.max_batch, 1, 1024),
            ("max_context", self.max_context, 2, 1 << 20),
            ("max_waiting", self.max_waiting, 0, 1 << 20),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; allowed are values from {low} to {high}")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine does now."""

    state: str
    version: int
    running: int
    waiting: int
    tokens: int
    """Sampled since it was made."""
    tokens_per_s: float
    """Sampled, over the last seconds."""
    kv_bytes: int
    """Held for keys and values now; 0 asleep."""
    weight_bytes: int
    """Held for weights now; 0 asleep."""
    kv_usage: float = 0.0
    """Share of the memory for keys and values that is in use, where the engine says so."""
    prefix_hits: float | None = None
    """Share of the prompts' tokens of the last seconds that were in its prefix cache. None: there were no prompts, or
    it does not say."""
    preemptions: int = 0
    """Calls that lost their keys and values to others since it was started, where the engine says so."""
