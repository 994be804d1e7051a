"""What a row of the bench amounts to, from the streams and the services' metrics once its last update is in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from opengyre.cli.demo_client import Api
from opengyre.proto import ids, subjects
from opengyre.proto.decision import Decision, StalenessReport
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import HostCommand, HostState, HostStateChanged
from opengyre.proto.run import RunSpec
from opengyre.proto.service import ServiceStatus
from opengyre.proto.traj import Call, Started
from opengyre.proto.update import Committed
from opengyre.rollout.synthetic import total_tokens
from opengyre.shared.bus import Bucket, Bus, Stored, read
from opengyre.sim.gyre import Setting, simulate
from opengyre.sim.workload import Workload

T = TypeVar("T")
INTERRUPTED = "gyre_episodes_interrupted"
ARRIVED = (HostState.ROLLOUT, HostState.TRAIN, HostState.CORDONED)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of real time."""

    count: int
    median_ms: float | None
    p99_ms: float | None


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One row as it was measured. Hours are of the emulated time."""

    id: str
    hours: float
    simulated_hours: float
    """The simulator on the very episodes of this row."""
    efficiency: float
    staleness_mean: float
    """By execution, of the updates that were measured."""
    staleness_max: int
    episodes_interrupted: int
    switches: int
    moved_calls: int
    parked_calls: int
    calls: int
    decision: Spread
    """The policy's own time, of decisions that moved a cell."""
    command_written: Spread
    """From a decision on the bus to each of its commands."""
    command_told: Spread
    """From a command on the bus to the host's first change of state."""
    command_obeyed: Spread
    """From a command on the bus to the host's arrival in the role, without the emulated duration of the switch."""
    move: Spread
    """How long nobody worked on a call that was moved."""
    commits: tuple[float, ...]
    """Hour of each update."""
    books_balance: bool


def spread(seconds: Iterable[float]) -> Spread:
    """Median and 99th percentile (nearest rank)."""
    ordered = sorted(seconds)
    if not ordered:
        return Spread(count=0, median_ms=None, p99_ms=None)
    last = len(ordered) - 1
    return Spread(
        count=len(ordered),
        median_ms=round(1e3 * ordered[round(0.5 * last)], 2),
        p99_ms=round(1e3 * ordered[round(0.99 * last)], 2),
    )


def command_delays(stored: Sequence[Stored], switch_s: float) -> tuple[list[float], list[float]]:
    """Seconds from each command to the first change of state under its epoch, and to arrival less `switch_s`."""
    told: list[float] = []
    obeyed: list[float] = []
    waiting: dict[tuple[str, int], tuple[float, bool]] = {}
    for message in stored:
        event = message.event()
        if isinstance(event, HostCommand):
            waiting[event.desired.host, event.desired.epoch] = (message.timestamp, False)
        elif isinstance(event, HostStateChanged) and (event.host, event.epoch) in waiting:
            since, heard = waiting[event.host, event.epoch]
            if not heard:
                told.append(message.timestamp - since)
                waiting[event.host, event.epoch] = (since, True)
            if event.after in ARRIVED:
                obeyed.append(max(0.0, message.timestamp - since - switch_s))
                del waiting[event.host, event.epoch]
    return told, obeyed


def written(stored: Iterable[Stored], decided: Mapping[str, float]) -> list[float]:
    """Seconds from each decision (name -> when it was on the bus) to its commands."""
    commands = [(event, message.timestamp) for message in stored if isinstance(event := message.event(), HostCommand)]
    return [when - decided[c.decision] for c, when in commands if c.decision is not None and c.decision in decided]


def staleness(commit: Committed) -> list[int]:
    """`d` of each execution that was trained."""
    of_group = dict(zip(commit.groups, commit.staleness, strict=True))
    return [of_group[ids.group_of(execution)] for execution in commit.executions]


def durations(started: Iterable[EpisodeDispatch], workload: Workload, tokens: float) -> tuple[tuple[float, ...], ...]:
    """Hours at full speed of the members of each group that was begun whole, in the order of admission."""
    groups: dict[str, dict[str, float]] = {}
    for dispatch in started:
        hours = total_tokens(dispatch) * workload.mean_h / tokens
        groups.setdefault(dispatch.group, {})[dispatch.execution] = hours
    size = workload.group_size
    whole = [group for _, group in sorted(groups.items()) if len(group) == size]
    return tuple(tuple(hours for _, hours in sorted(group.items())) for group in whole)


async def gather(
    row: str, updates: int, spec: RunSpec, hours: Sequence[float], workload: Workload, time_scale: float, bus: Bus,
    api: Api,
) -> RunFacts:  # fmt: skip
    """Read everything that the row has left behind."""
    run = spec.run
    report = await api.get(f"/v1/staleness?run={run}", StalenessReport)
    hosts = await read(bus, subjects.HOSTS, [subjects.host("*", "command"), subjects.host("*", "state")])
    told, obeyed = command_delays(hosts, workload.switch_h * 3600 / time_scale)
    commits = await _events(bus, subjects.UPDATES, subjects.update(run, "committed"), Committed)
    calls = await _events(bus, subjects.TRAJ, subjects.traj(run, "*", "*", "call"), Call)
    started = await _events(bus, subjects.TRAJ, subjects.traj(run, "*", "*", "started"), Started)
    logged = await read(bus, subjects.DECISIONS, subjects.decision(run))
    decisions = [(event, stored.timestamp) for stored in logged if isinstance(event := stored.event(), Decision)]
    stale = [d for commit in commits if commit.version <= updates for d in staleness(commit)]
    drawn = durations((event.dispatch for event in started), workload, spec.harness.synthetic_tokens)
    same = replace(workload, episodes=drawn, in_order=True)
    simulated = simulate(same, Setting(spec.dispatch, spec.elastic, updates), 0, record=False)
    return RunFacts(
        id=row,
        hours=round(hours[updates - 1], 3),
        simulated_hours=round(simulated.hours, 3),
        efficiency=round(workload.floor_h(updates) / hours[updates - 1], 4),
        staleness_mean=round(sum(stale) / len(stale), 4),
        staleness_max=max(stale),
        episodes_interrupted=await interrupted(bus),
        switches=sum(len(decision.changes) for decision, _ in decisions),
        moved_calls=sum(bool(call.moves_s) for call in calls),
        parked_calls=sum(call.parked_s > 0 for call in calls),
        calls=len(calls),
        decision=spread(decision.took_s for decision, _ in decisions if decision.kind == "roles"),
        command_written=spread(written(hosts, {decision.decision: when for decision, when in decisions})),
        command_told=spread(told),
        command_obeyed=spread(obeyed),
        move=spread(seconds for call in calls for seconds in call.moves_s),
        commits=tuple(round(hour, 3) for hour in hours),
        books_balance=report.groups.balances and report.executions.balances,
    )


async def _events(bus: Bus, stream: str, subject: str, kind: type[T]) -> list[T]:
    return [event for stored in await read(bus, stream, subject) if isinstance(event := stored.event(), kind)]


async def interrupted(bus: Bus) -> int:
    """`gyre_episodes_interrupted_total` over all services."""
    total = 0.0
    async with Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
        urls = {status.url for status in services.values.values() if status.service == "rollout"}
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in sorted(urls):
            async with session.get(f"{url}/metrics") as response:
                families = text_string_to_metric_families(await response.text())
                total += sum(s.value for f in families if f.name == INTERRUPTED for s in f.samples if "total" in s.name)
    return int(total)
