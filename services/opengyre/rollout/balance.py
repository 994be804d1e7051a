"""Which host takes a call, and which gives calls away. Pure.

Only a host in the rollout role that serves this run is ever chosen. Among those the least loaded one is taken; the
host that served the call's parent (or else its execution's last call) is preferred while it is not noticeably busier,
because it may still hold its keys and values. How many calls a host serves at full speed it says itself: fewer than its
capacity where it has no memory for more (`HostStatus.serves`). A host with `QUEUE` times that in hand takes no more:
calls wait here, where they can still go elsewhere.

Hosts that begin to serve do not do so at the same instant: the first takes what was parked for all. So calls are taken
away again from a host that has more than `OVERLOAD` times its capacity in hand while others have room.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opengyre.proto.host import HostState, HostStatus

QUEUE = 4
SLACK = 0.25
"""Load, in units of a host's capacity, that affinity may cost."""
OVERLOAD = 1.0 + SLACK
"""Load from which a host gives calls away, down to its capacity. A move costs what the call's tokens so far cost to
read again, so a little more than the capacity is left alone."""


@dataclass(frozen=True)
class Choice:
    """A host; or none, and whether there is one in the rollout role at all."""

    host: HostStatus | None
    serving: bool


def choose(
    hosts: Iterable[HostStatus],
    run: str,
    in_flight: Mapping[str, int],
    avoided: frozenset[str] | set[str] = frozenset(),
    prefer: str | None = None,
) -> Choice:
    """`in_flight`: our own calls by host, which are newer than what the host last reported; `avoided`: hosts that
    failed us just now."""
    best: tuple[float, str, HostStatus] | None = None
    serving = False
    for host in hosts:
        if host.state is not HostState.ROLLOUT or host.run not in (None, run) or not host.url:
            continue
        if host.host in avoided:
            continue
        serving = True
        ours = in_flight.get(host.host, 0)
        capacity = host.serves
        if ours >= QUEUE * capacity:
            continue
        load = max(ours, host.running) / capacity
        rank = (load - (SLACK if host.host == prefer else 0.0), host.host, host)
        if best is None or rank[:2] < best[:2]:
            best = rank
    return Choice(best[2] if best else None, serving)


def spare(
    hosts: Iterable[HostStatus], run: str, in_flight: Mapping[str, int], avoided: frozenset[str] | set[str]
) -> HostStatus | None:
    """A host that serves one call more at full speed: who asks twice takes nobody's place."""
    host = choose(hosts, run, in_flight, avoided).host
    if host is None or max(in_flight.get(host.host, 0), host.running) + 1 > host.serves:
        return None
    return host


def surplus(hosts: Iterable[HostStatus], run: str, in_flight: Mapping[str, int]) -> dict[str, int]:
    """Host -> how many of our calls it gives away: none where no other serving host has room below its capacity."""
    over: list[tuple[float, str, int]] = []
    room = 0
    for host in hosts:
        if host.state is not HostState.ROLLOUT or host.run not in (None, run):
            continue
        ours, capacity = in_flight.get(host.host, 0), host.serves
        if ours > OVERLOAD * capacity:
            over.append((ours / capacity, host.host, ours - math.floor(capacity)))
        else:
            room += max(0, math.floor(capacity - max(ours, host.running)))
    given: dict[str, int] = {}
    for _, name, count in sorted(over, reverse=True):
        if taken := min(count, room):
            given[name] = taken
            room -= taken
    return given
