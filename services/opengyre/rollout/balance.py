"""Which host takes a call. Pure.

Only a host in the rollout role that serves this run is ever chosen. Among those the least loaded one is taken; the
host that served the call's parent is preferred while it is not noticeably busier, because it may still hold its keys
and values. A host with `QUEUE` times its capacity in hand takes no more: calls wait here, where they can still go
elsewhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opengyre.proto.host import HostState, HostStatus

QUEUE = 4
SLACK = 0.25
"""Load, in units of a host's capacity, that affinity may cost."""


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
        capacity = max(1, host.capacity)
        if ours >= QUEUE * capacity:
            continue
        load = max(ours, host.running) / capacity
        rank = (load - (SLACK if host.host == prefer else 0.0), host.host, host)
        if best is None or rank[:2] < best[:2]:
            best = rank
    return Choice(best[2] if best else None, serving)
