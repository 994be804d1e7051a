"""Figures of the trainer, set at each commit: metrics, the status page, the alarm that is up.

Awaits: nothing.
"""

import contextlib
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from opengyre.proto.ids import group_of
from opengyre.proto.update import Committed
from opengyre.shared.metrics import WEIGHT_VERSION
from opengyre.shared.waits import Waits

VERSION = Gauge("gyre_trainer_version", "Version that the trainer committed last", ["run"])
SCORE = Gauge("gyre_update_score", "Mean score of the last update's executions, 0 to 1", ["run"])
GRADIENT_NORM = Gauge("gyre_update_gradient_norm", "Norm of the last update's gradient before clipping", ["run"])
LOSS = Gauge("gyre_update_loss", "Value of the last update's objective", ["run"])
KL = Gauge("gyre_update_kl", "Mean k3 estimate of KL(behaviour || policy) over the last update's tokens", ["run"])
ENTROPY = Gauge("gyre_update_entropy", "Mean entropy over the last update's tokens, nats", ["run"])
CLIPPED = Gauge("gyre_update_clip_fraction", "Share of the last update's tokens that the bounds stopped", ["run"])
GAP = Gauge("gyre_update_logprob_gap", "Mean |trainer log-prob - engine log-prob| at one version, nats", ["run"])
GAP_MAX = Gauge("gyre_update_logprob_gap_max", "The greatest of these gaps in the last update, nats", ["run"])
GAP_BY_AGE = Gauge(
    "gyre_update_logprob_gap_by_age",
    "Mean |trainer log-prob - engine log-prob| in the last update, by versions since the one that sampled, nats",
    ["run", "age"],
)
REFERENCE_KL = Gauge(
    "gyre_update_reference_kl", "Mean estimate of KL(policy || initial model) over the last update's tokens", ["run"]
)
EFFECTIVE = Gauge(
    "gyre_update_effective_share", "Effective over trained tokens of the last update, by importance ratios", ["run"]
)
RATE = Gauge("gyre_update_learning_rate", "Learning rate of the last update", ["run"])
ALARM = Gauge("gyre_update_logprob_gap_alarm", "1 while trainer and engine disagree more than the run allows", ["run"])
STALENESS = Histogram("gyre_group_staleness", "d = v_t - v_d of consumed groups", ["run"], buckets=range(17))
EXECUTION_STALENESS = Histogram("gyre_execution_staleness", "d of trained executions", ["run"], buckets=range(17))
TOKENS = Counter("gyre_trained_tokens", "Tokens with a loss", ["run"])
TOKEN_AGES = Counter(
    "gyre_tokens_by_age", "Tokens of trained executions, by versions since the one that sampled them", ["run", "age"]
)
MASKED = Counter("gyre_masked_tokens", "Tokens that were too old to have a loss", ["run"])
UNIQUE_TOKENS = Counter("gyre_unique_tokens", "Tokens that gradients were computed of, shared prefixes once", ["run"])
PATH_TOKENS = Counter("gyre_path_tokens", "Tokens of all calls of consumed executions, without sharing", ["run"])
EXECUTIONS = Counter("gyre_consumed_executions", "Executions in committed updates", ["run"])
SKIPPED = Counter("gyre_updates_skipped", "Updates whose gradient was not finite", ["run"])
DROPPED = Counter("gyre_executions_dropped_by_trainer", "Executions that left training unconsumed", ["reason"])
CELLS_LOST = Counter("gyre_training_cells_lost", "Cells that left an update without handing over")
UPDATE_SECONDS = Histogram("gyre_update_seconds", "From opening to commit", buckets=(0.3, 1, 3, 10, 30, 100, 300, 1000))


OLD: Final = 16
"""Ages from here on are one series."""


def commit(event: Committed) -> dict[str, float]:
    """Set the metrics; return the figures of the status page."""
    stats, run = event.stats, event.run
    tokens = max(stats.tokens, 1)
    live = max(stats.live_tokens, 1)
    figures = {
        "score": event.score,
        "gradient_norm": event.gradient_norm,
        "loss": stats.loss,
        "kl": stats.kl_sum / live,
        "entropy": stats.entropy_sum / tokens,
        "clip_fraction": stats.clipped_tokens / live,
        "reference_kl": stats.reference_kl_sum / live,
        "effective_share": stats.effective_share,
        "learning_rate": event.learning_rate or 0.0,
        "logprob_gap_alarm": float(event.alarm is not None),
    }
    gauges = (SCORE, GRADIENT_NORM, LOSS, KL, ENTROPY, CLIPPED, REFERENCE_KL, EFFECTIVE, RATE, ALARM)
    for gauge, value in zip(gauges, figures.values(), strict=True):
        gauge.labels(run).set(value)
    if (
        apart := stats.logprob_gap
    ) is not None:  # Else the last measured one stays: it is not 0 because it was not measured.
        figures |= {"logprob_gap": apart, "logprob_gap_max": stats.logprob_gap_max}
        GAP.labels(run).set(apart)
        GAP_MAX.labels(run).set(stats.logprob_gap_max)
    for version, mean in sorted(stats.logprob_gap_by_version.items()):
        GAP_BY_AGE.labels(run, _age(event.version - 1 - version)).set(mean)
    VERSION.labels(run).set(event.version)
    if event.published:
        WEIGHT_VERSION.labels(run).set(event.version)
    for d in event.staleness:
        STALENESS.labels(run).observe(d)
    d_of = dict(zip(event.groups, event.staleness, strict=True))
    for execution in event.executions:
        EXECUTION_STALENESS.labels(run).observe(d_of[group_of(execution)])
    for version, count in stats.token_versions.items():
        TOKEN_AGES.labels(run, _age(event.version - 1 - version)).inc(count)
    TOKENS.labels(run).inc(stats.live_tokens)
    MASKED.labels(run).inc(stats.masked_tokens)
    UNIQUE_TOKENS.labels(run).inc(stats.unique_tokens)
    PATH_TOKENS.labels(run).inc(stats.path_tokens)
    EXECUTIONS.labels(run).inc(len(event.executions))
    if event.skipped is not None:
        SKIPPED.labels(run).inc()
    UPDATE_SECONDS.observe(event.opened_s)
    mean_d = sum(event.staleness) / max(len(event.staleness), 1)
    return {
        **figures,
        "trainer_version": event.version,
        "staleness_mean": mean_d,
        "tokens": stats.tokens,
        "masked_tokens": stats.masked_tokens,
        "unique_tokens": stats.unique_tokens,
        "path_tokens": stats.path_tokens,
    }


def _age(versions: int) -> str:
    return str(versions) if versions < OLD else f"{OLD}+"


class Alarm:
    """What is wrong, among the waits of the process: until it is right, that is what is waited for."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._shown: contextlib.ExitStack | None = None
        self._what: str | None = None

    def show(self, sentence: str | None) -> None:
        """Show this alarm from now on, or none."""
        if sentence == self._what:
            return
        if self._shown is not None:
            self._shown.close()
            self._shown = None
        if sentence is not None:
            self._shown = contextlib.ExitStack()
            self._shown.enter_context(self._waits.on(f"an update without an alarm: {sentence}"))
        self._what = sentence
