"""What `gyre bench engine` says, from what was measured. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec


@dataclass(frozen=True, slots=True)
class Reload:
    """New weights while calls are in flight, in seconds."""

    pause: float
    load: float
    resume: float
    first: float
    """From the command to resume until further tokens of the first call in flight have come."""
    every: float
    """And until all of them have."""
    gap: float
    """From the command to pause until the first has further tokens."""
    came: int
    """Tokens that came with those first ones: as many as the engine streams at a time, or fewer."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Calls beside each other, once all of them sample."""

    tokens_per_s: float
    late: float
    """By how many seconds another process, which needs a processor for a moment now and then, got it late at most."""


@dataclass(frozen=True, slots=True)
class Life:
    """An engine from its start to its end: seconds, and bytes of memory."""

    start: float
    cold: tuple[float, ...]
    """To the next token of calls of which nothing is cached."""
    warm: tuple[float, ...]
    """To the token after it, as many, where what was computed before is cached."""
    sampled: Sampled
    reload: Reload
    end: float
    serving: int
    after: int


class Range(msgspec.Struct, frozen=True, kw_only=True):
    low: float
    median: float
    high: float


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, but for ratio, tokens and memory. `warm_of_cold`: of pairs of calls, one after the other."""

    model: str
    dtype: str
    processors: int
    threads: int
    context: int
    stream_interval: int
    """Tokens of a call that come together, but for its first."""
    rounds: int
    prompt: int
    pairs: int
    """Of calls without and with a cache, in all."""
    calls: int
    """In flight while tokens are counted and while weights change."""
    start: Range
    cold: Range
    warm: Range
    warm_of_cold: Range
    tokens_per_s: Range
    late: Range
    """Another process's wait for a processor meanwhile, the longest of each round."""
    pause: Range
    load: Range
    resume: Range
    first_token: Range
    """Of these, after the command to resume, until the first has further tokens ..."""
    every_token: Range
    """... until all have ..."""
    gap: Range
    """... and until the first has, from the command to pause."""
    tokens_at_once: int
    """That came first after a resume, at most."""
    end: Range
    serving_mib: Range
    after_mib: Range


def span(values: Sequence[float]) -> Range:
    """Lowest, median and highest of one or more."""
    return Range(low=round(min(values), 4), median=round(median(values), 4), high=round(max(values), 4))


def facts(
    lives: Sequence[Life], *, model: str, dtype: str, processors: int, threads: int, context: int,
    stream_interval: int, prompt: int, calls: int,
) -> Facts:  # fmt: skip
    """Of one or more lives of an engine, each with one pair of calls or more."""
    pairs = [pair for life in lives for pair in zip(life.cold, life.warm, strict=True)]
    reloads = [life.reload for life in lives]
    return Facts(
        model=model,
        dtype=dtype,
        processors=processors,
        threads=threads,
        context=context,
        stream_interval=stream_interval,
        rounds=len(lives),
        prompt=prompt,
        pairs=len(pairs),
        calls=calls,
        start=span([life.start for life in lives]),
        cold=span([cold for cold, _ in pairs]),
        warm=span([warm for _, warm in pairs]),
        warm_of_cold=span([warm / cold for cold, warm in pairs]),
        tokens_per_s=span([life.sampled.tokens_per_s for life in lives]),
        late=span([life.sampled.late for life in lives]),
        pause=span([one.pause for one in reloads]),
        load=span([one.load for one in reloads]),
        resume=span([one.resume for one in reloads]),
        first_token=span([one.first for one in reloads]),
        every_token=span([one.every for one in reloads]),
        gap=span([one.gap for one in reloads]),
        tokens_at_once=max(one.came for one in reloads),
        end=span([life.end for life in lives]),
        serving_mib=span([life.serving / 2**20 for life in lives]),
        after_mib=span([life.after / 2**20 for life in lives]),
    )
