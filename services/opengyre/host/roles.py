"""The role machine of a host: which state it is in, and what a command or the end of an activity makes of it.

States (design section 4): STARTING has no weights to serve. JOINING loads the current version and refuses traffic.
ROLLOUT is the only state with traffic. DRAINING ends the calls and puts the engine to sleep. TRAIN computes gradients
while the engine sleeps. LEAVING_TRAIN finishes the group at hand and hands over. CORDONED does neither.

Invariants:
- Between ROLLOUT and TRAIN there is always a finished drain, between TRAIN and ROLLOUT a hand-over and a load.
- Epochs only grow: a command whose epoch is not greater than the last one obeyed changes nothing.
- DRAINING and LEAVING_TRAIN are never cut short; a new wish counts when they are done.

Everything here is pure: no I/O and no clock.
"""

import enum
from dataclasses import dataclass, replace
from typing import Final

from opengyre.proto.host import DesiredRole, HostState, Role


class Signal(enum.Enum):
    """What happened, beside commands."""

    WEIGHTS = "the run has published weights"
    RUN_CHANGED = "another run is active; nothing of it is known yet"
    APPLIED = "the current version is loaded and acknowledged"
    DRAINED = "no call is in flight, the engine sleeps, its memory is free"
    LEFT = "the training worker has handed over what it held"
    LAPSED = "its heartbeat had expired: it was LOST to the others and may have missed versions"
    STOP = "the process is to end"


class Effect(enum.Enum):
    """What the shell does at once when the state changes."""

    ADMIT = "let calls in"
    REFUSE = "let no call in"


class Activity(enum.Enum):
    """What the shell does for as long as a state lasts."""

    REST = "wait"
    LOAD = "wake the engine with the current version and acknowledge it"
    SERVE = "serve, and load each new version without dropping calls"
    DRAIN = "end or abort the calls in flight, put the engine to sleep, measure its memory"
    TRAIN = "pull groups and accumulate gradients"
    LEAVE = "hand over the accumulator"


Event = DesiredRole | Signal
_S = HostState
_END: Final = {_S.STARTING: _S.STARTING, _S.ROLLOUT: _S.JOINING, _S.TRAIN: _S.TRAIN, _S.CORDONED: _S.CORDONED}

TURN: Final[dict[HostState, dict[HostState, HostState]]] = {
    _S.STARTING: _END,
    _S.JOINING: {
        _S.STARTING: _S.DRAINING,
        _S.ROLLOUT: _S.JOINING,
        _S.TRAIN: _S.DRAINING,
        _S.CORDONED: _S.DRAINING,
    },
    _S.ROLLOUT: {
        _S.STARTING: _S.DRAINING,
        _S.ROLLOUT: _S.ROLLOUT,
        _S.TRAIN: _S.DRAINING,
        _S.CORDONED: _S.DRAINING,
    },
    _S.DRAINING: dict.fromkeys(_END, _S.DRAINING),
    _S.TRAIN: {
        _S.STARTING: _S.LEAVING_TRAIN,
        _S.ROLLOUT: _S.LEAVING_TRAIN,
        _S.TRAIN: _S.TRAIN,
        _S.CORDONED: _S.LEAVING_TRAIN,
    },
    _S.LEAVING_TRAIN: dict.fromkeys(_END, _S.LEAVING_TRAIN),
    _S.CORDONED: _END,
}
"""State -> goal -> next state, when the goal may have changed."""

DONE: Final[dict[tuple[HostState, Signal], dict[HostState, HostState]]] = {
    (_S.JOINING, Signal.APPLIED): {_S.ROLLOUT: _S.ROLLOUT},
    (_S.ROLLOUT, Signal.LAPSED): {_S.ROLLOUT: _S.JOINING},
    (_S.DRAINING, Signal.DRAINED): _END,
    (_S.LEAVING_TRAIN, Signal.LEFT): _END,
}
"""(State, end of its activity) -> goal -> next state. An end that comes in another state changes nothing.

Who was LOST has no more right to traffic than who comes from elsewhere: it joins again. The calls that it has go on."""

ACTIVITY: Final[dict[HostState, Activity]] = {
    _S.STARTING: Activity.REST,
    _S.JOINING: Activity.LOAD,
    _S.ROLLOUT: Activity.SERVE,
    _S.DRAINING: Activity.DRAIN,
    _S.TRAIN: Activity.TRAIN,
    _S.LEAVING_TRAIN: Activity.LEAVE,
    _S.CORDONED: Activity.REST,
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a host is and what it is to be."""

    state: HostState = HostState.STARTING
    target: Role = "rollout"
    epoch: int = -1
    """Of the last command obeyed; -1 before the first."""
    known: bool = False
    """Whether the active run has published weights."""
    stopping: bool = False


def goal(position: Position) -> HostState:
    """The state in which it would stay: STARTING, ROLLOUT, TRAIN or CORDONED."""
    if position.stopping or position.target == "cordoned":
        return HostState.CORDONED
    if not position.known:
        return HostState.STARTING
    return HostState.TRAIN if position.target == "train" else HostState.ROLLOUT


def obeys(position: Position, command: DesiredRole) -> bool:
    """Whether the command counts: only a greater epoch does, and none while the process ends."""
    return command.epoch > position.epoch and not position.stopping


def ended(position: Position) -> bool:
    """Whether a process that is to end has nothing more to finish."""
    return position.stopping and ACTIVITY[position.state] is Activity.REST


def advance(position: Position, event: Event) -> tuple[Position, tuple[Effect, ...]]:
    """The next position and what is done at once for it. Every event is allowed in every state."""
    before = position.state
    match event:
        case DesiredRole():
            if not obeys(position, event):
                return position, ()
            position = replace(position, target=event.role, epoch=event.epoch)
        case Signal.WEIGHTS:
            position = replace(position, known=True)
        case Signal.RUN_CHANGED:
            position = replace(position, known=False)
        case Signal.STOP:
            position = replace(position, stopping=True)
        case _:
            after = DONE.get((before, event), {}).get(goal(position), before)
            return _moved(position, after)
    return _moved(position, TURN[before][goal(position)])


def _moved(position: Position, after: HostState) -> tuple[Position, tuple[Effect, ...]]:
    before = position.state
    if after is before:
        return position, ()
    effects: tuple[Effect, ...] = ()
    if after is HostState.ROLLOUT:
        effects = (Effect.ADMIT,)
    elif before is HostState.ROLLOUT:
        effects = (Effect.REFUSE,)
    return replace(position, state=after), effects
