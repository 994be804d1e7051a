"""Where a reader of several streams is: the id of a server-sent event, `TASKS:12,UPDATES:7`. Pure.

An id names the last sequence that was sent of every stream, so that a reader who comes back with it misses nothing
and gets nothing twice.
"""

from collections.abc import Iterable, Mapping

from opengyre.proto import subjects

STREAMS = (
    subjects.TASKS,
    subjects.TRAJ,
    subjects.UPDATES,
    subjects.WEIGHTS,
    subjects.DECISIONS,
    subjects.HOSTS,
    subjects.DLQ,
)
"""Streams that can be followed; the others are work queues."""
DEFAULT = tuple(stream for stream in STREAMS if stream != subjects.TRAJ)
MAX_SEQUENCE = 2**63 - 2


class BadPositionError(ValueError):
    """An id that we did not give out, or a stream that cannot be followed."""


def filter_of(stream: str, run: str | None) -> str:
    """The subjects of `stream` that belong to `run`; hosts and dead letters belong to no run."""
    (everything,) = subjects.STREAM_SUBJECTS[stream]
    if run is None or stream in (subjects.HOSTS, subjects.DLQ):
        return everything
    if stream == subjects.DECISIONS:
        return subjects.decision(run)
    return f"{everything.removesuffix('>')}{run}.>"


def chosen(names: str | None) -> tuple[str, ...]:
    """Streams from a list separated by commas; raises `BadPositionError`."""
    if names is None:
        return DEFAULT
    wanted = tuple(dict.fromkeys(name.strip().upper() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in STREAMS]
    if unknown or not wanted:
        what = repr(unknown[0][:40]) if unknown else "empty"
        raise BadPositionError(f"streams is {what}; allowed are {', '.join(STREAMS)}, separated by commas")
    return wanted


def parse(text: str) -> dict[str, int]:
    """Stream -> last sequence; raises `BadPositionError`."""
    positions: dict[str, int] = {}
    for part in text.split(","):
        stream, _, number = part.strip().partition(":")
        digits = number.isascii() and number.isdigit() and len(number) <= 19
        if stream not in STREAMS or not digits or int(number) > MAX_SEQUENCE:
            raise BadPositionError("Last-Event-ID is not an id of ours; allowed are ids like TASKS:12,UPDATES:7")
        positions[stream] = int(number)
    return positions


def render(positions: Mapping[str, int], order: Iterable[str] = STREAMS) -> str:
    """The id of an event: the inverse of `parse`."""
    return ",".join(f"{stream}:{positions[stream]}" for stream in order if stream in positions)
