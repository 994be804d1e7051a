"""vLLM's own page of metrics, read: what its engine does, and how fast. Pure: readings come with their times.

The names are those of vLLM's V1 engine (tried with 0.32.0); a server may have several engines, told apart by a label.
Counters are only compared with themselves: a server that was started again begins anew.
"""

from collections import deque
from dataclasses import dataclass

RATE_S = 3.0
"""What is said of the last seconds is of so many."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A page. What a page does not name is 0."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the blocks in use, 0 to 1, of the fullest engine: calls wait there, whatever the others have."""
    generated: float = 0.0
    """Tokens that were sampled since its start."""
    queried: float = 0.0
    """Tokens that were looked for in the prefix cache since its start."""
    hits: float = 0.0
    """Of these, those that were there."""
    preemptions: float = 0.0
    """Calls that lost their keys and values to others, and were computed again."""


def gauges(page: str) -> dict[str, list[float]]:
    """The values of each of vLLM's figures, by name without its prefix and `_total`, one for each set of labels. Lines
    that are none are left out."""
    found: dict[str, list[float]] = {}
    for line in page.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line[5:].rpartition(" ")
            name = name.partition("{")[0].removesuffix("_total")
            try:
                found.setdefault(name, []).append(float(value))
            except ValueError:
                continue
    return found


def read_figures(page: str) -> Figures:
    values = gauges(page)

    def total(name: str) -> float:
        return sum(values.get(name, ()))

    return Figures(
        running=round(total("num_requests_running")),
        waiting=round(total("num_requests_waiting")),
        kv_usage=max(values.get("kv_cache_usage_perc", (0.0,)), default=0.0),
        generated=total("generation_tokens"),
        queried=total("prefix_cache_queries"),
        hits=total("prefix_cache_hits"),
        preemptions=total("num_preemptions"),
    )


class Meter:
    """The last readings."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Figures]] = deque()

    def take(self, figures: Figures, now: float) -> None:
        """A reading at `now` (seconds, monotonic); a server that was started again makes the former ones void."""
        if self._readings and figures.generated < self._readings[-1][1].generated:
            self._readings.clear()
        self._readings.append((now, figures))
        while len(self._readings) > 2 and self._readings[1][0] <= now - RATE_S:
            self._readings.popleft()

    def clear(self) -> None:
        self._readings.clear()

    def now(self, now: float) -> Figures | None:
        """The last reading; None where that is older than `RATE_S`: it says nothing of now."""
        if not self._readings or now - self._readings[-1][0] > RATE_S:
            return None
        return self._readings[-1][1]

    def tokens_per_s(self, now: float) -> float | None:
        """Sampled over the last seconds. None: not known."""
        if self.now(now) is None or len(self._readings) < 2:
            return None
        (since, before), (until, last) = self._readings[0], self._readings[-1]
        return (last.generated - before.generated) / (until - since) if until > since else None

    def prefix_hits(self, now: float) -> float | None:
        """Share of the prompts' tokens of the last seconds that were in the cache. None: there were none, or it is not
        known."""
        if self.now(now) is None:
            return None
        before, last = self._readings[0][1], self._readings[-1][1]
        queried = last.queried - before.queried
        return min(1.0, max(0.0, (last.hits - before.hits) / queried)) if queried > 0 else None
