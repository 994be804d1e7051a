"""What each service says of itself (bucket `gyre_services`): `/v1/status` is made of these."""

from opengyre.proto.base import Record


class Wait(Record, frozen=True, kw_only=True):
    """Something that does not go on now (law 7)."""

    what: str
    """A sentence: `a host in the rollout role`."""
    since_s: float
    bound_s: float | None
    """When it gives up or looks again; none where a lease bounds it."""
    count: int = 1
    """How many wait for it."""


class ServiceStatus(Record, frozen=True, kw_only=True):
    service: str
    replica: str
    pid: int
    url: str
    """Base URL of /healthz, /readyz and /metrics."""
    ready: bool
    missing: str | None = None
    """What it lacks to be ready, in words."""
    waits: tuple[Wait, ...] = ()
    gauges: dict[str, float] = {}
    """Figures that other services and the status page read, such as `live_episodes`."""


class Empty(Record, frozen=True, kw_only=True):
    """A request or an answer without content."""
