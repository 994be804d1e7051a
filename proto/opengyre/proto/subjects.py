"""Subjects and streams: `gyre.v1.<domain>.<ids...>.<event>`, the table of design section 3."""

PREFIX = "gyre.v1"

TASKS = "TASKS"
EPISODES = "EPISODES"
TRAJ = "TRAJ"
GROUPS = "GROUPS"
UPDATES = "UPDATES"
WEIGHTS = "WEIGHTS"
DECISIONS = "DECISIONS"
HOSTS = "HOSTS"
DLQ = "DLQ"
ADVISORY = "ADVISORY"

STREAM_SUBJECTS: dict[str, tuple[str, ...]] = {
    TASKS: (f"{PREFIX}.task.>",),
    EPISODES: (f"{PREFIX}.episode.>",),
    TRAJ: (f"{PREFIX}.traj.>",),
    GROUPS: (f"{PREFIX}.group.>",),
    UPDATES: (f"{PREFIX}.update.>",),
    WEIGHTS: (f"{PREFIX}.weights.>",),
    DECISIONS: (f"{PREFIX}.decision.>",),
    HOSTS: (f"{PREFIX}.host.>",),
    DLQ: (f"{PREFIX}.dlq.>",),
    ADVISORY: (
        "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
        "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
    ),
}

# Buckets of what is now.
KV_RUNS = "gyre_runs"  # <run> -> RunSpec
KV_LEDGER = "gyre_ledger"  # <group> -> GroupEntry; owned by the allocator
KV_HOSTS = "gyre_hosts"  # <host> -> HostStatus, with a time to live: a host that is missing is LOST
KV_DESIRED = "gyre_desired"  # <host> -> DesiredRole; owned by the allocator
KV_SERVICES = "gyre_services"  # <service>.<replica> -> ServiceStatus, with a time to live
KV_LEASES = "gyre_leases"  # leader.<service> -> owner, with a time to live
KV_IDEMPOTENCY = "gyre_idempotency"  # digest of an Idempotency-Key -> the first answer, with a time to live

# Durable consumers: (stream, durable).
ROLLOUT_EPISODES = (EPISODES, "rollout")
TRAINER_GROUPS = (GROUPS, "trainer")
TRAJECTORY_ENDED = (TRAJ, "trajectory")
TRAJECTORY_OVERDUE = (TASKS, "trajectory")

ALL = "all"
"""Where an execution stands in a subject, for what is of its whole group."""


def task(run: str, task_id: str, event: str) -> str:
    return f"{PREFIX}.task.{run}.{task_id}.{event}"


def episode_dispatch(run: str) -> str:
    return f"{PREFIX}.episode.{run}.dispatch"


def traj(run: str, group: str, execution: str, event: str) -> str:
    return f"{PREFIX}.traj.{run}.{group}.{execution}.{event}"


def group_ready(run: str) -> str:
    return f"{PREFIX}.group.{run}.ready"


def update(run: str, event: str) -> str:
    return f"{PREFIX}.update.{run}.{event}"


def weights(run: str, event: str) -> str:
    return f"{PREFIX}.weights.{run}.{event}"


def decision(run: str) -> str:
    return f"{PREFIX}.decision.{run}"


def host(host_id: str, event: str) -> str:
    return f"{PREFIX}.host.{host_id}.{event}"


def dlq(stream: str, consumer: str) -> str:
    return f"{PREFIX}.dlq.{stream}.{consumer}"


def rpc(service: str, target: str, verb: str) -> str:
    """A request to a service: `target` is one replica's or node's name, or `any` for whichever answers first."""
    return f"{PREFIX}.rpc.{service}.{target}.{verb}"
