"""What `gyre bench router` says, from what was measured. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from opengyre.cli.bench_facts import Spread, spread

AIM_MEDIAN_MS = 3.0
AIM_RATIO = 0.97
WAY = "way and client"
"""What of a call is no stage of the service: its HTTP server, the socket, and the client."""
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Turn:
    """One call, as its client saw it. `spans`: seconds by stage."""

    seconds: float
    prompt: int
    sampled: int
    spans: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Conversations side by side by one way: its wall time, its calls and each process's processor seconds."""

    way: str
    concurrency: int
    seconds: float
    turns: tuple[Turn, ...]
    processor_s: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return sum(turn.sampled for turn in self.turns) / self.seconds


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A way at a concurrency. `processor_ms`: of each process, per call."""

    way: str
    concurrency: int
    calls: int
    prompt_tokens: float
    sampled_tokens: float
    call: Spread
    tokens_per_s: float
    processor_ms: dict[str, float]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """`via` beside `direct`, whose blocks alternated: differences of the medians and of the 99th percentiles, and the
    ratio of tokens a second, of all blocks together and of the pairs (lowest, median, highest)."""

    concurrency: int
    median_ms: float
    p99_ms: float
    around_engine: Spread
    """Of a call by `via`: its time without the engine's, call by call."""
    throughput_ratio: float
    pairs: tuple[float, float, float]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Of calls by `via`, one after the other and at the largest concurrency."""

    name: str
    alone: Spread
    crowded: Spread


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    processors: int
    engine_processors: int
    """Of these the engine's alone; 0: it shares them all."""
    aim_median_ms: float = AIM_MEDIAN_MS
    aim_throughput_ratio: float = AIM_RATIO
    overheads: tuple[Overhead, ...]
    stages: tuple[Stage, ...]
    rows: tuple[Row, ...]


def read_spans(header: str) -> dict[str, float]:
    """Seconds by stage, of a `Server-Timing` header as ours is written."""
    found: dict[str, float] = {}
    for part in header.split(","):
        name, _, milliseconds = part.strip().partition(";dur=")
        if milliseconds:
            found[name] = float(milliseconds) / 1e3
    return found


def facts(engine: str, processors: int, engine_processors: int, blocks: Sequence[Block]) -> Facts:
    """Needs blocks by `direct` and by `via` at each concurrency, as many of each."""
    levels = sorted({block.concurrency for block in blocks})
    names = list(dict.fromkeys(block.way for block in blocks))
    by = {
        (level, way): [b for b in blocks if (b.concurrency, b.way) == (level, way)] for level in levels for way in names
    }
    return Facts(
        engine=engine,
        processors=processors,
        engine_processors=engine_processors,
        overheads=tuple(_overhead(level, by[level, "direct"], by[level, "via"]) for level in levels),
        stages=_stages(by[levels[0], "via"], by[levels[-1], "via"]),
        rows=tuple(_row(way, level, found) for (level, way), found in by.items() if found),
    )


def _turns(blocks: Sequence[Block]) -> list[Turn]:
    return [turn for block in blocks for turn in block.turns]


def _rate(blocks: Sequence[Block]) -> float:
    return sum(turn.sampled for turn in _turns(blocks)) / sum(block.seconds for block in blocks)


def _row(way: str, concurrency: int, blocks: Sequence[Block]) -> Row:
    turns = _turns(blocks)
    calls = len(turns)
    taken = {name: sum(block.processor_s[name] for block in blocks) for name in blocks[0].processor_s}
    return Row(
        way=way,
        concurrency=concurrency,
        calls=calls,
        prompt_tokens=round(sum(turn.prompt for turn in turns) / calls, 1),
        sampled_tokens=round(sum(turn.sampled for turn in turns) / calls, 1),
        call=spread(turn.seconds for turn in turns),
        tokens_per_s=round(_rate(blocks), 1),
        processor_ms={name: round(1e3 * seconds / calls, 2) for name, seconds in taken.items()},
    )


def _overhead(concurrency: int, direct: Sequence[Block], via: Sequence[Block]) -> Overhead:
    one, other = spread(turn.seconds for turn in _turns(direct)), spread(turn.seconds for turn in _turns(via))
    assert one.median_ms is not None
    assert one.p99_ms is not None
    assert other.median_ms is not None
    assert other.p99_ms is not None
    pairs = sorted(b.tokens_per_s / a.tokens_per_s for a, b in zip(direct, via, strict=True))
    return Overhead(
        concurrency=concurrency,
        median_ms=round(other.median_ms - one.median_ms, 2),
        p99_ms=round(other.p99_ms - one.p99_ms, 2),
        around_engine=spread(turn.seconds - turn.spans[ENGINE] for turn in _turns(via)),
        throughput_ratio=round(_rate(via) / _rate(direct), 3),
        pairs=(round(pairs[0], 3), round(median(pairs), 3), round(pairs[-1], 3)),
    )


def _stages(alone: Sequence[Block], crowded: Sequence[Block]) -> tuple[Stage, ...]:
    names = list(dict.fromkeys(name for turn in _turns(alone) for name in turn.spans))
    return tuple(Stage(name=name, alone=_stage(name, alone), crowded=_stage(name, crowded)) for name in (*names, WAY))


def _stage(name: str, blocks: Sequence[Block]) -> Spread:
    if name == WAY:
        return spread(turn.seconds - sum(turn.spans.values()) for turn in _turns(blocks))
    return spread(turn.spans[name] for turn in _turns(blocks))
