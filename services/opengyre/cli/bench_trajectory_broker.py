"""Groups of executions over a real broker, through a real replica of the trajectory service.

A NATS server on a free port with the settings of the embedded stack, a process `opengyre.trajectory`, and this process
as all of `rollout`: it appends the events, and waits until every group is scored.

Awaits: the server's port, the replica's events and the broker's answers, each with its bound (`STALL_S`).
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from opengyre.cli.bench_processes import process
from opengyre.cli.bench_trajectory_events import RUN, group
from opengyre.cli.bench_trajectory_load import Shape
from opengyre.proto import codec, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.task import GroupScored
from opengyre.proto.traj import Call, TrajEvent
from opengyre.shared import embedded
from opengyre.shared.bus import Bus, bootstrap, follow, read
from opengyre.trajectory.assemble import LogEvent, assemble
from opengyre.trajectory.tree import draw, paths, tree_of

STALL_S = 300.0
EXECUTION = Shape(100_000, 70, sub_agents=2, compactions=1)
WRITERS = 16
"""Executions that are appended at a time."""


AIM = 5_000_000
"""New tokens a second of a core that building trees is to reach."""
TREES = "build the trees"
SHORT = 1e-3
"""Processor time that is too short for a rate."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A step of its own, without those before it. `processor_s` is of this process alone, and what `tokens_per_s` (new
    tokens a second of a core) is told by (none below `SHORT`); `share` is of all stages' processor time."""

    name: str
    seconds: float
    processor_s: float
    tokens_per_s: int | None
    share: float
    aim_tokens_per_s: int | None = None


class BrokerRow(msgspec.Struct, frozen=True, kw_only=True):
    """`end_to_end_s`: from the first event that is appended to the last group that is scored. `stages`: of one group,
    alone and in one process; tokens are new ones."""

    groups: int
    group_size: int
    new_tokens: int
    events: int
    megabytes: float
    append_s: float
    end_to_end_s: float
    tokens_per_s: int
    stages: tuple[Stage, ...]


async def measure(groups: int, size: int) -> BrokerRow:
    """Raises `TimeoutError` when a group is not scored within `STALL_S`."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-trajectory-"))
    try:
        logs = [group(number, size, EXECUTION) for number in range(groups)]
        port = embedded.free_port()
        url = f"nats://127.0.0.1:{port}"
        environment = {
            **os.environ, "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(folder / "state"), "GYRE_LOG__LEVEL": "warning",
        }  # fmt: skip
        server = process(embedded.nats_command(folder / "nats", port), environment, folder / "nats.log")
        replica = [sys.executable, "-m", "opengyre.trajectory"]
        async with server, Bus(url, "bench") as bus:
            await bootstrap(bus)
            async with process(replica, environment, folder / "trajectory.log"):
                return await _run(bus, logs)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _run(bus: Bus, logs: list[list[list[TrajEvent]]]) -> BrokerRow:
    events = [event for of_group in logs for log in of_group for event in log]
    tokens = sum(_tokens(event) for event in events)
    size = sum(len(codec.encode(event)) for event in events)
    last = 0.0
    slots = asyncio.Semaphore(WRITERS)

    async def append(log: list[TrajEvent]) -> None:
        async with slots:
            for event in log:
                kind = tag_of(event).split(".")[1]
                await bus.publish(subjects.traj(event.run, event.group, event.execution, kind), event)
            nonlocal last
            last = time.perf_counter()

    await _warm(bus, append)
    started = time.perf_counter()
    async with asyncio.timeout(STALL_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(_scored(bus, {log[0].group for of_group in logs for log in of_group}))
        for of_group in logs:
            for log in of_group:
                tasks.create_task(append(log))
    ended = time.perf_counter()
    return BrokerRow(
        groups=len(logs),
        group_size=len(logs[0]),
        new_tokens=tokens,
        events=len(events),
        megabytes=round(size / 1e6, 1),
        append_s=round(last - started, 2),
        end_to_end_s=round(ended - started, 2),
        tokens_per_s=round(tokens / (ended - started)),
        stages=await _stages(bus, logs[0]),
    )


async def _warm(bus: Bus, append: Callable[[list[TrajEvent]], Coroutine[None, None, None]]) -> None:
    """Until the replica works: what its start costs is no part of this."""
    logs = group(999_999, 2, Shape(200, 4, sub_agents=0, compactions=0))
    async with asyncio.timeout(STALL_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(_scored(bus, {logs[0][0].group}))
        for log in logs:
            tasks.create_task(append(log))


async def _scored(bus: Bus, groups: set[str]) -> None:
    found: set[str] = set()
    async for stored in follow(bus, subjects.TASKS, subjects.task(RUN, "*", "scored"), batch=1):
        if isinstance(event := stored.event(), GroupScored):
            found.add(event.group)
        if groups <= found:
            return


def _tokens(event: TrajEvent) -> int:
    return len(event.prompt_ids) + len(event.sampled_ids) if isinstance(event, Call) else 0


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(before: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    return now[0] - before[0], now[1] - before[1]


def _least(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time of the best of three."""
    found: list[tuple[float, float]] = []
    for _ in range(3):
        before = _now()
        work()
        found.append(_since(before))
    return min(wall for wall, _ in found), min(processor for _, processor in found)


async def _stages(bus: Bus, logs: list[list[TrajEvent]]) -> tuple[Stage, ...]:
    """Where the time of one group goes, each step without those before it."""
    name = logs[0][0].group
    tokens = sum(_tokens(event) for log in logs for event in log)
    before = _now()
    stored = await read(bus, subjects.TRAJ, subjects.traj(RUN, name, "*", "*"))
    reading = _since(before)
    events: list[LogEvent] = [e for message in stored if isinstance(e := message.event(), TrajEvent)]
    calls = [[event for event in log if isinstance(event, Call)] for log in logs]
    (part,) = assemble(events)
    assert part.ready is not None
    members = part.ready.members
    trees = _least(lambda: [tree_of(of_execution) for of_execution in calls])
    drawn = _least(lambda: [draw(of_execution) for of_execution in calls])
    written = _least(lambda: [paths(of_execution) for of_execution in calls])
    steps = {
        "encode the events": _least(lambda: [codec.encode(event) for log in logs for event in log]),
        "read the log from the broker": reading,
        "decode it": _least(lambda: [message.event() for message in stored]),
        TREES: trees,
        "choose the paths": _less(drawn, trees),
        "write the paths out": _less(written, drawn),
        "order, scores, advantages": _less(_least(lambda: assemble(events)), written),
        "encode the group": _least(lambda: msgspec.json.encode(members)),
    }
    whole = sum(processor for _, processor in steps.values())
    return tuple(
        Stage(
            name=step,
            seconds=round(wall, 4),
            processor_s=round(processor, 4),
            tokens_per_s=round(tokens / processor) if processor > SHORT else None,
            share=round(processor / whole, 3),
            aim_tokens_per_s=AIM if step == TREES else None,
        )
        for step, (wall, processor) in steps.items()
    )


def _less(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(0.0, one[0] - other[0]), max(0.0, one[1] - other[1])
