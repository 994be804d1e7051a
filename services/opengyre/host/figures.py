"""Metrics of a host's engine, as it says itself (vLLM: of its own /metrics). Several hosts may share a process."""

from prometheus_client import Gauge

from opengyre.tiny.types import EngineStats

RUNNING = Gauge("gyre_engine_running", "Calls that the engine works on", ["host"])
WAITING = Gauge("gyre_engine_waiting", "Calls that wait in the engine", ["host"])
TOKENS_PER_S = Gauge("gyre_engine_tokens_per_second", "Tokens that it sampled over the last seconds", ["host"])
KV_USAGE = Gauge("gyre_engine_kv_usage", "Share of its memory for keys and values in use; 0 if not told", ["host"])
PREFIX_HITS = Gauge(
    "gyre_engine_prefix_hits", "Share of the last prompts' tokens in its prefix cache; NaN without prompts", ["host"]
)
PREEMPTIONS = Gauge("gyre_engine_preemptions", "Calls that lost their keys and values since its start", ["host"])


def show(host: str, stats: EngineStats) -> None:
    RUNNING.labels(host).set(stats.running)
    WAITING.labels(host).set(stats.waiting)
    TOKENS_PER_S.labels(host).set(stats.tokens_per_s)
    KV_USAGE.labels(host).set(stats.kv_usage)
    PREFIX_HITS.labels(host).set(float("nan") if stats.prefix_hits is None else stats.prefix_hits)
    PREEMPTIONS.labels(host).set(stats.preemptions)
