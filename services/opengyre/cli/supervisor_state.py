"""The life of one supervised process, as a pure machine: `advance(life, event) -> (life, effects)`.

States:
    DOWN ──start──> STARTING ──ready──> RUNNING
                       │  ▲                │ exited
                exited │  └──due── BACKOFF <┘
                       └──────────────^
    any of these ──stop──> STOPPING ──exited──> DOWN        (BACKOFF goes to DOWN at once)
                              └──overdue──> KILLED ──exited──> DOWN

Invariants: a process that was not told to stop is started again, always; the first time at once, then after delays
that double up to `BACKOFF_MAX_S`, and at once again after it ran for `STEADY_S`. In STOPPING, KILLED and DOWN nothing
is spawned.
"""

import enum
from dataclasses import dataclass, replace

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
STEADY_S = 20.0


class State(enum.Enum):
    DOWN = "down"
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    KILLED = "killed"


class Kind(enum.Enum):
    START = "start"
    READY = "ready"
    EXITED = "exited"
    DUE = "due"
    STOP = "stop"
    OVERDUE = "overdue"


@dataclass(frozen=True)
class Event:
    kind: Kind
    code: int | None = None
    """Of EXITED: exit status, or minus the signal."""
    uptime_s: float = 0.0
    """Of EXITED: how long it ran."""


class Do(enum.Enum):
    SPAWN = "spawn"
    WAIT = "wait"
    """For `Effect.delay_s`, then give DUE."""
    TERMINATE = "terminate"
    """Give OVERDUE when it has not ended within its bound."""
    KILL = "kill"
    REPORT = "report"
    """It ended though nobody told it to: say which, why and the tail of its log."""


@dataclass(frozen=True)
class Effect:
    do: Do
    delay_s: float = 0.0
    code: int | None = None


@dataclass(frozen=True)
class Life:
    state: State = State.DOWN
    failures: int = 0
    """In a row: exits that nobody asked for, since it last ran for `STEADY_S`."""
    restarts: int = 0


def backoff_s(failures: int) -> float:
    """Seconds before the start that follows the `failures`-th failure in a row (from 1)."""
    if failures <= 1:
        return 0.0
    return min(BACKOFF_FIRST_S * 2.0 ** min(failures - 2, 16), BACKOFF_MAX_S)


def _start(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.STARTING, failures=0), (Effect(Do.SPAWN),)


def _ready(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.RUNNING), ()


def _died(life: Life, event: Event) -> tuple[Life, tuple[Effect, ...]]:
    failures = (0 if event.uptime_s >= STEADY_S else life.failures) + 1
    delay = backoff_s(failures)
    report = Effect(Do.REPORT, delay, event.code)
    life = replace(life, failures=failures, restarts=life.restarts + 1)
    if delay == 0:
        return replace(life, state=State.STARTING), (report, Effect(Do.SPAWN))
    return replace(life, state=State.BACKOFF), (report, Effect(Do.WAIT, delay))


def _due(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.STARTING), (Effect(Do.SPAWN),)


def _stop(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.STOPPING), (Effect(Do.TERMINATE),)


def _rest(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.DOWN), ()


def _overdue(life: Life, _event: Event) -> tuple[Life, tuple[Effect, ...]]:
    return replace(life, state=State.KILLED), (Effect(Do.KILL),)


TABLE = {
    (State.DOWN, Kind.START): _start,
    (State.STARTING, Kind.READY): _ready,
    (State.STARTING, Kind.EXITED): _died,
    (State.STARTING, Kind.STOP): _stop,
    (State.RUNNING, Kind.EXITED): _died,
    (State.RUNNING, Kind.STOP): _stop,
    (State.BACKOFF, Kind.DUE): _due,
    (State.BACKOFF, Kind.STOP): _rest,
    (State.STOPPING, Kind.EXITED): _rest,
    (State.STOPPING, Kind.OVERDUE): _overdue,
    (State.KILLED, Kind.EXITED): _rest,
}


def advance(life: Life, event: Event) -> tuple[Life, tuple[Effect, ...]]:
    """What becomes of it. An event that means nothing in this state (a timer that came late) changes nothing."""
    step = TABLE.get((life.state, event.kind))
    return step(life, event) if step else (life, ())
