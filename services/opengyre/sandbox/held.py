"""What a manager holds of a sandbox, and what it writes down of it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from opengyre.sandbox.core import Spec
from opengyre.sandbox.lease import Effect, Event, Lease, State, advance


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """``manager.json``: what a service that starts again has to know."""

    spec: Spec
    owner: str
    labels: Mapping[str, str]
    created_at: float
    expires_at: float
    idle_ttl_s: float
    environment: str = ""


class Quieted(msgspec.Struct, frozen=True):
    """``verify-*.quiet``: what the agent left running has been ended for this verification."""


@dataclass
class Held:
    """A sandbox as its manager holds it."""

    spec: Spec
    owner: str
    labels: Mapping[str, str]
    created_at: float
    lease: Lease
    environment: str = ""
    """Which base a task's environment has and how it was made."""
    state: State = State.CREATING
    running: int = 0
    making: bool = True
    verifying: str | None = None
    """The evaluation that is under way."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    removing: asyncio.Lock = field(default_factory=asyncio.Lock)
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever takes a snapshot holds it: what runs is stopped for each, and goes on when one is done."""

    def step(self, event: Event) -> tuple[Effect, ...]:
        """Take an event; what has to be done."""
        self.state, effects = advance(self.state, event)
        self.tell()
        return effects

    def tell(self) -> None:
        """Wake whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()
