"""The life of a sandbox as its manager sees it, and its lease. Pure: times are seconds on the monotonic clock.

    (none) --create--> CREATING --created--> READY --verify--> VERIFYING --verified--> READY
                          | failed             | destroy             | destroy
                          | or destroy         v                     |
                          +---------------> DESTROYING <-------------+
                                               | destroyed
                                               v
                                             GONE

A lease never gets shorter by a renewal, and a use only pushes the idle bound.
"""

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    READY = "ready"
    VERIFYING = "verifying"
    DESTROYING = "destroying"
    GONE = "gone"


class Event(Enum):
    """What happens to a sandbox."""

    CREATED = "created"
    FAILED = "failed"
    VERIFY = "verify"
    VERIFIED = "verified"
    DESTROY = "destroy"
    DESTROYED = "destroyed"


class Effect(Enum):
    """What the shell has to do after a step."""

    REMOVE = "remove"
    FORGET = "forget"


_TABLE: dict[tuple[State, Event], tuple[State, tuple[Effect, ...]]] = {
    (State.CREATING, Event.CREATED): (State.READY, ()),
    (State.CREATING, Event.FAILED): (State.DESTROYING, (Effect.REMOVE,)),
    (State.CREATING, Event.DESTROY): (State.DESTROYING, (Effect.REMOVE,)),
    (State.READY, Event.VERIFY): (State.VERIFYING, ()),
    (State.READY, Event.DESTROY): (State.DESTROYING, (Effect.REMOVE,)),
    (State.VERIFYING, Event.VERIFIED): (State.READY, ()),
    (State.VERIFYING, Event.DESTROY): (State.DESTROYING, (Effect.REMOVE,)),
    # What was under way when the sandbox was destroyed ends afterwards and changes nothing.
    (State.DESTROYING, Event.CREATED): (State.DESTROYING, ()),
    (State.DESTROYING, Event.FAILED): (State.DESTROYING, ()),
    (State.DESTROYING, Event.VERIFIED): (State.DESTROYING, ()),
    # A removal that failed is tried again.
    (State.DESTROYING, Event.DESTROY): (State.DESTROYING, (Effect.REMOVE,)),
    (State.DESTROYING, Event.DESTROYED): (State.GONE, (Effect.FORGET,)),
    (State.GONE, Event.CREATED): (State.GONE, ()),
    (State.GONE, Event.FAILED): (State.GONE, ()),
    (State.GONE, Event.VERIFIED): (State.GONE, ()),
    (State.GONE, Event.DESTROY): (State.GONE, ()),
    (State.GONE, Event.DESTROYED): (State.GONE, ()),
}


def advance(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The next state and what to do; `ValueError` where the event cannot happen in that state."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise ValueError(f"a sandbox that is {state.value} cannot be {event.value}") from None


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Until when a sandbox is kept."""

    expires_at: float
    idle_ttl_s: float
    used_at: float

    @classmethod
    def begin(cls, now: float, ttl_s: float, idle_ttl_s: float) -> "Lease":
        return cls(expires_at=now + ttl_s, idle_ttl_s=idle_ttl_s, used_at=now)

    def renewed(self, now: float, ttl_s: float) -> "Lease":
        return replace(self, expires_at=max(self.expires_at, now + ttl_s), used_at=max(self.used_at, now))

    def used(self, now: float) -> "Lease":
        return replace(self, used_at=max(self.used_at, now))

    def ends_at(self, running: bool) -> float:
        """When it ends, if nothing more happens; a running command is a use."""
        return self.expires_at if running else min(self.expires_at, self.used_at + self.idle_ttl_s)
