"""Metrics of the trainer, set at each commit."""

from prometheus_client import Counter, Gauge, Histogram

from opengyre.proto.ids import group_of
from opengyre.proto.update import Committed
from opengyre.shared.metrics import WEIGHT_VERSION

VERSION = Gauge("gyre_trainer_version", "Version that the trainer committed last", ["run"])
SCORE = Gauge("gyre_update_score", "Mean score of the last update's executions, 0 to 1", ["run"])
GRADIENT_NORM = Gauge("gyre_update_gradient_norm", "Norm of the last update's gradient before clipping", ["run"])
LOSS = Gauge("gyre_update_loss", "Value of the last update's objective", ["run"])
KL = Gauge("gyre_update_kl", "Mean k3 estimate of KL(behaviour || policy) over the last update's tokens", ["run"])
ENTROPY = Gauge("gyre_update_entropy", "Mean entropy over the last update's tokens, nats", ["run"])
CLIPPED = Gauge("gyre_update_clip_fraction", "Share of the last update's tokens that the bounds stopped", ["run"])
GAP = Gauge("gyre_update_logprob_gap", "Mean |trainer log-prob - engine log-prob| at one version, nats", ["run"])
STALENESS = Histogram("gyre_group_staleness", "d = v_t - v_d of consumed groups", ["run"], buckets=range(17))
EXECUTION_STALENESS = Histogram("gyre_execution_staleness", "d of trained executions", ["run"], buckets=range(17))
TOKENS = Counter("gyre_trained_tokens", "Tokens with a loss", ["run"])
PATH_TOKENS = Counter("gyre_path_tokens", "Tokens of all calls of consumed executions, without sharing", ["run"])
EXECUTIONS = Counter("gyre_consumed_executions", "Executions in committed updates", ["run"])
SKIPPED = Counter("gyre_updates_skipped", "Updates whose gradient was not finite", ["run"])
DROPPED = Counter("gyre_executions_dropped_by_trainer", "Executions that left training unconsumed", ["reason"])
CELLS_LOST = Counter("gyre_training_cells_lost", "Cells that left an update without handing over")
UPDATE_SECONDS = Histogram("gyre_update_seconds", "From opening to commit", buckets=(0.3, 1, 3, 10, 30, 100, 300, 1000))


def commit(event: Committed) -> dict[str, float]:
    """Set the metrics; return the figures of the status page."""
    stats, run = event.stats, event.run
    tokens = max(stats.tokens, 1)
    figures = {
        "score": event.score,
        "gradient_norm": event.gradient_norm,
        "loss": stats.loss,
        "kl": stats.kl_sum / tokens,
        "entropy": stats.entropy_sum / tokens,
        "clip_fraction": stats.clipped_tokens / tokens,
        "logprob_gap": stats.logprob_gap_sum / max(stats.logprob_gap_tokens, 1),
    }
    gauges = (SCORE, GRADIENT_NORM, LOSS, KL, ENTROPY, CLIPPED, GAP)
    for gauge, value in zip(gauges, figures.values(), strict=True):
        gauge.labels(run).set(value)
    VERSION.labels(run).set(event.version)
    if event.published:
        WEIGHT_VERSION.labels(run).set(event.version)
    for d in event.staleness:
        STALENESS.labels(run).observe(d)
    d_of = dict(zip(event.groups, event.staleness, strict=True))
    for execution in event.executions:
        EXECUTION_STALENESS.labels(run).observe(d_of[group_of(execution)])
    TOKENS.labels(run).inc(stats.tokens)
    PATH_TOKENS.labels(run).inc(stats.path_tokens)
    EXECUTIONS.labels(run).inc(len(event.executions))
    if event.skipped is not None:
        SKIPPED.labels(run).inc()
    UPDATE_SECONDS.observe(event.opened_s)
    mean_d = sum(event.staleness) / max(len(event.staleness), 1)
    return {**figures, "trainer_version": event.version, "staleness_mean": mean_d}
