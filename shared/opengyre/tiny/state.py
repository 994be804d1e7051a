"""The engine's states.

RUNNING samples. PAUSED holds its requests and samples nothing; only here are weights exchanged. ASLEEP holds neither
weights nor cache and takes no request; it wakes into PAUSED. Repeating an event changes nothing.
"""

import enum
from typing import Final

from opengyre.tiny.types import WrongStateError


class EngineState(enum.Enum):
    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"


class EngineEvent(enum.Enum):
    PAUSE = "pause"
    RESUME = "resume"
    LOAD = "load"
    SLEEP = "sleep"
    WAKE = "wake"


class Effect(enum.Enum):
    """What the engine has to do for the transition to be true."""

    EXCHANGE = "exchange the weights"
    FREE = "free weights and cache"
    RESTORE = "load weights and allocate the cache"


_S, _E = EngineState, EngineEvent

TABLE: Final[dict[tuple[EngineState, EngineEvent], tuple[EngineState, tuple[Effect, ...]]]] = {
    (_S.RUNNING, _E.PAUSE): (_S.PAUSED, ()),
    (_S.PAUSED, _E.PAUSE): (_S.PAUSED, ()),
    (_S.PAUSED, _E.RESUME): (_S.RUNNING, ()),
    (_S.RUNNING, _E.RESUME): (_S.RUNNING, ()),
    (_S.PAUSED, _E.LOAD): (_S.PAUSED, (Effect.EXCHANGE,)),
    (_S.RUNNING, _E.SLEEP): (_S.ASLEEP, (Effect.FREE,)),
    (_S.PAUSED, _E.SLEEP): (_S.ASLEEP, (Effect.FREE,)),
    (_S.ASLEEP, _E.SLEEP): (_S.ASLEEP, ()),
    (_S.ASLEEP, _E.WAKE): (_S.PAUSED, (Effect.RESTORE,)),
    (_S.PAUSED, _E.WAKE): (_S.PAUSED, ()),
    (_S.RUNNING, _E.WAKE): (_S.RUNNING, ()),
}


def advance(state: EngineState, event: EngineEvent) -> tuple[EngineState, tuple[Effect, ...]]:
    """The next state and what has to be done for it; raises `WrongStateError` where the event is not allowed."""
    try:
        return TABLE[state, event]
    except KeyError:
        allowed = " or ".join(s.value for s in EngineState if (s, event) in TABLE)
        raise WrongStateError(f"{event.value}: the engine is {state.value}; it must be {allowed}") from None
