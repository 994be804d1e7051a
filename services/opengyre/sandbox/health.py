"""Health checks of tasks' environments: how long they are waited for. Pure.

As Docker's: in the start period failures do not count; after it, so many in a row are the end.
"""

from dataclasses import dataclass

from opengyre.proto.task import Healthcheck


@dataclass(frozen=True)
class Again:
    """Look again after a pause."""

    pause_s: float
    failures: int
    """In a row that count."""


def failed(check: Healthcheck, elapsed_s: float, failures: int) -> Again | None:
    """What follows a failure, so long after the begin and after so many in a row; None: it is given up."""
    if elapsed_s < check.start_period_s:
        return Again(check.start_interval_s, 0)
    if failures + 1 >= check.retries:
        return None
    return Again(check.interval_s, failures + 1)
