"""Metrics that several services share. A service's own stand in its package; all are served on /metrics."""

from prometheus_client import Counter, Gauge, Histogram

EPISODES_INTERRUPTED = Counter(
    "gyre_episodes_interrupted", "Live episodes that ended because of us and not for a reason of their own (law 1)"
)
EPISODES_ENDED = Counter("gyre_episodes_ended", "Episodes that ended, by reason", ["reason"])
LIVE_EPISODES = Gauge("gyre_live_episodes", "Episodes that are running in this replica")
SUSPENDED_EPISODES = Gauge("gyre_suspended_episodes", "Episodes whose call is parked: no host is in the rollout role")
ROLE_SWITCHES = Counter("gyre_role_switches", "Role switches that ended on this host", ["role"])
SWITCH_SECONDS = Histogram(
    "gyre_role_switch_seconds",
    "Duration of a role switch",
    ["role"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15, 60),
)
OBEYED_SECONDS = Histogram(
    "gyre_command_obeyed_seconds",
    "From the time when a host is told of a command to the state that it asks for",
    ["state"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15, 60),
)
MOVE_SECONDS = Histogram(
    "gyre_call_move_seconds",
    "Of a call that is moved: from the answer of the host that stopped it to its place in the next engine",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
)
WEIGHT_VERSION = Gauge("gyre_weight_version", "Version that is served or was published here", ["run"])
DEAD_LETTERS = Counter("gyre_dead_letters", "Messages that were given up", ["stream"])
EVENT_LOOP_LAG = Gauge("gyre_event_loop_lag_seconds", "How late the event loop woke a timer in the last second")
