"""What follows from an evaluation of the work, and when progress is due. Pure.

An evaluation that failed says nothing about the work (law 6): it is tried again, under another id, up to
`scoring.attempts` times, unless it can never become well. After that the execution has no score and leaves training.
"""

from dataclasses import dataclass

from opengyre.proto.sandbox import VerifyResult
from opengyre.proto.traj import Part

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True)
class Verdict:
    """What one evaluation said: parts, or why there are none."""

    parts: tuple[Part, ...] = ()
    fault: str | None = None
    hopeless: bool = False
    """The same would be said again: the checks themselves, or the way of grading, are refused."""
    evaluations: int = 1
    """How many there were, with this one."""


def verdict(result: VerifyResult) -> Verdict:
    """What the sandbox service's answer means."""
    if result.infra_error is not None or not result.valid:
        return Verdict(fault=result.infra_error or "not every check could be evaluated")
    parts = (Part(name=p.name, weight=p.weight, value=p.passed, output=p.output) for p in result.parts)
    return Verdict(parts=tuple(parts))


def pause_s(failed: int) -> float:
    """Before the next evaluation, after so many that failed (at least one): what overloaded a machine may pass."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failed - 1, 16))


def another(last: Verdict, attempts: int) -> bool:
    """Whether the work is evaluated again."""
    return last.fault is not None and not last.hopeless and last.evaluations < attempts


def progress_due(every: int | None, calls: int, measured: int | None) -> bool:
    """Whether progress is measured before the next call. `calls` are recorded; at `measured` of them it was last."""
    return every is not None and (measured is None or calls >= measured + every)
