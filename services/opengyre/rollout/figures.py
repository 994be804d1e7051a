"""Metrics of the rollout service alone."""

from prometheus_client import Counter

TRANSITIONS = Counter(
    "gyre_rollout_calls", "Model calls by how their prompt stands to the calls before it", ["transition"]
)
HEDGES = Counter(
    "gyre_rollout_hedges", "Calls that a second host was asked for, by which one had the first token", ["winner"]
)
