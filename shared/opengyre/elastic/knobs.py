"""The staleness knobs of other systems in terms of `(phi, mu)`, and the reverse. Pure; docs/knobs.md has the sources.

All of them but one bound how many groups are started and not yet trained, and that is what `(phi + mu) * B` is, so
most translations are exact. `E[d]` is then `phi + (mu - 1) / 2`, reached while that depth is full; a system whose
rollouts are the bottleneck is fresher than that, there as here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from opengyre.proto.base import Record

HIGH = 64


class InvalidKnobError(ValueError):
    """A system, a knob or a value that there is not; the message names it and what is allowed."""


class Translation(Record, frozen=True, kw_only=True):
    """One setting in the words of another system and in ours."""

    system: str
    knobs: dict[str, float]
    """In their words."""
    phi: float
    mu: int
    staleness: float
    """`E[d] = phi + (mu - 1) / 2`, in updates."""
    worst: int
    """Greatest `d` while groups are consumed in the order of their admission: `ceil(phi) + mu - 1`."""
    d_max: int | None = None
    """The hard bound that they have beside it, in updates."""
    on_stale: Literal["drop"] | None = None
    """What becomes of what exceeds it."""
    exact: bool = True
    """The same groups are admitted at the same versions; where not, `notes` say what differs."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Knob:
    name: str
    low: int
    whole: bool = True


@dataclass(frozen=True)
class System:
    """`forward`: their knobs, checked, as a translation. `back`: phi and mu as their knobs."""

    name: str
    knobs: tuple[Knob, ...]
    forward: Callable[[Mapping[str, float]], Translation]
    back: Callable[[float, int], dict[str, float]]
    unlike: str = ""
    """What is different where `back` finds no setting that is the same."""


def translate(system: str, knobs: Mapping[str, float]) -> Translation:
    """`knobs` of another system as `(phi, mu)`. Raises `InvalidKnobError`."""
    known = system_of(system)
    names = [knob.name for knob in known.knobs]
    for name in knobs:
        if name not in names:
            raise InvalidKnobError(f"{system} has no knob {name}; allowed: {', '.join(names)}")
    return known.forward({knob.name: _checked(system, knob, knobs.get(knob.name)) for knob in known.knobs})


def reverse(system: str, phi: float, mu: int) -> Translation:
    """`(phi, mu)` in the words of another system: the same setting where it has one, else a near one, of which the
    answer's `phi`, `mu` and `notes` tell. Raises `InvalidKnobError`."""
    if not 0 <= phi <= HIGH:
        raise InvalidKnobError(f"phi is {phi:g}; allowed are values from 0 to {HIGH}")
    if not 1 <= mu <= HIGH:
        raise InvalidKnobError(f"mu is {mu}; allowed are whole values from 1 to {HIGH}")
    known = system_of(system)
    made = known.forward(known.back(phi, mu))
    if made.mu == mu and math.isclose(made.phi, phi):
        return made
    note = f"phi {phi:g} with mu {mu} cannot be said with these knobs: {known.unlike}"
    return msgspec.structs.replace(made, exact=False, notes=(note, *made.notes))


def system_of(name: str) -> System:
    """A system by its name. Raises `InvalidKnobError`."""
    found = SYSTEMS.get(name)
    if found is None:
        raise InvalidKnobError(f"there is no system {name!r}; allowed: {', '.join(SYSTEMS)}")
    return found


def _checked(system: str, knob: Knob, value: float | None) -> float:
    kind = "whole values" if knob.whole else "values"
    allowed = f"allowed are {kind} from {knob.low} to {HIGH}"
    if value is None:
        raise InvalidKnobError(f"{system}: {knob.name} is missing; {allowed}")
    if not knob.low <= value <= HIGH or (knob.whole and value != int(value)):
        raise InvalidKnobError(f"{system}: {knob.name} is {value:g}; {allowed}")
    return int(value) if knob.whole else value


def _said(system: str, knobs: Mapping[str, float], phi: float, mu: int, *notes: str) -> Translation:
    return Translation(
        system=system,
        knobs=dict(knobs),
        phi=phi,
        mu=mu,
        staleness=phi + (mu - 1) / 2,
        worst=math.ceil(phi) + mu - 1,
        notes=notes,
    )


_EACH = "weights are published after each update: mu is 1"
_DEPTH = "this is the greatest depth in whole updates that admits no more groups, with mu 1"


def _areal(knobs: Mapping[str, float]) -> Translation:
    less = "max_concurrent_rollouts may hold fewer than this depth"
    return _said("areal", knobs, knobs["max_head_offpolicyness"], 1, _EACH, less)


def _verl(knobs: Mapping[str, float]) -> Translation:
    mu = int(knobs["trigger_parameter_sync_step"])
    return _said(
        "verl",
        knobs,
        knobs["staleness_threshold"] * mu,
        mu,
        "B is require_batches * ppo_mini_batch_size",
        "the depth is cut to whole samples, and concurrency to 16 samples a server, which may hold fewer",
        "without partial_rollout a synchronisation waits for the episodes under way",
    )


def _roll(knobs: Mapping[str, float]) -> Translation:
    ratio = int(knobs["async_generation_ratio"])
    late = "a group that is not complete in time is dropped: discards are biased towards long episodes"
    made = _said("roll", knobs, ratio, 1, _EACH, late)
    return msgspec.structs.replace(made, d_max=ratio, on_stale="drop")


def _trl(knobs: Mapping[str, float]) -> Translation:
    mu = int(knobs["weight_sync_steps"])
    phi = knobs["max_staleness"] * mu
    made = _said(
        "trl",
        knobs,
        phi,
        mu,
        "max_staleness is a bound and no depth: (phi, mu) is the deepest setting that it lets through",
        "max_inflight_tasks, by default max_staleness batches of one step, may hold fewer: while few finished groups "
        "are queued, E[d] is about max_staleness + (weight_sync_steps - 1) / 2",
        "what exceeds the bound is dropped, in flight too: discards are biased towards long episodes",
    )
    return msgspec.structs.replace(made, exact=False, d_max=made.worst, on_stale="drop")


def _tinker(knobs: Mapping[str, float]) -> Translation:
    slow = "nothing is dropped: a slow episode trains when it ends, as stale as it is by then"
    return _said("tinker", knobs, knobs["sampling_steps_ahead"], 1, _EACH, slow)


def _whole_depth(knob: str) -> Callable[[float, int], dict[str, float]]:
    return lambda phi, mu: {knob: math.floor(phi + mu) - 1}


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("areal", (Knob("max_head_offpolicyness", 0),), _areal, _whole_depth("max_head_offpolicyness"), _DEPTH),
        System(
            "verl",
            (Knob("staleness_threshold", 0, whole=False), Knob("trigger_parameter_sync_step", 1)),
            _verl,
            lambda phi, mu: {"staleness_threshold": phi / mu, "trigger_parameter_sync_step": mu},
        ),
        System("roll", (Knob("async_generation_ratio", 0),), _roll, _whole_depth("async_generation_ratio"), _DEPTH),
        System(
            "trl",
            (Knob("max_staleness", 0), Knob("weight_sync_steps", 1)),
            _trl,
            lambda phi, mu: {"max_staleness": math.ceil(phi / mu), "weight_sync_steps": mu},
            "this is the least bound that drops nothing of it while groups are consumed in order",
        ),
        System("tinker", (Knob("sampling_steps_ahead", 0),), _tinker, _whole_depth("sampling_steps_ahead"), _DEPTH),
    )
}
