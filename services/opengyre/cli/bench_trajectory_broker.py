"""Groups of executions over a real broker, through a real replica of the trajectory service.

A NATS server on a free port with the settings of the embedded stack, a process `opengyre.trajectory`, and this process
as all of `rollout`: it appends the events, and waits until every group is scored.

Awaits: the server's port, the replica's events and the broker's answers, each with its bound (`STALL_S`).
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import msgspec

from opengyre.cli.bench_trajectory_events import RUN, group
from opengyre.cli.bench_trajectory_load import Shape
from opengyre.proto import codec, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.task import GroupScored
from opengyre.proto.traj import Call, TrajEvent
from opengyre.shared import embedded
from opengyre.shared.bus import Bus, bootstrap, follow, read
from opengyre.trajectory.assemble import LogEvent, assemble
from opengyre.trajectory.tree import paths, tree_of

STALL_S = 300.0
EXECUTION = Shape(100_000, 70, sub_agents=2, compactions=1)
WRITERS = 16
"""Executions that are appended at a time."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seconds: float
    tokens_per_s: float


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
    tokens_per_s: float
    stages: tuple[Stage, ...]


@contextlib.asynccontextmanager
async def _process(command: list[str], environment: dict[str, str], log: Path) -> AsyncIterator[None]:
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=out, stderr=out)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(15):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


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
        server = _process(embedded.nats_command(folder / "nats", port), environment, folder / "nats.log")
        replica = [sys.executable, "-m", "opengyre.trajectory"]
        async with server, Bus(url, "bench") as bus:
            await bootstrap(bus)
            async with _process(replica, environment, folder / "trajectory.log"):
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


async def _stages(bus: Bus, logs: list[list[TrajEvent]]) -> tuple[Stage, ...]:
    """Where the time of one group goes, one step after the other."""
    name = logs[0][0].group
    tokens = sum(_tokens(event) for log in logs for event in log)
    stages: list[Stage] = []

    def stage(what: str, since: float) -> float:
        now = time.perf_counter()
        stages.append(Stage(name=what, seconds=round(now - since, 4), tokens_per_s=round(tokens / (now - since))))
        return time.perf_counter()

    at = time.perf_counter()
    payloads = [codec.encode(event) for log in logs for event in log]
    at = stage("encode the events", at)
    stored = await read(bus, subjects.TRAJ, subjects.traj(RUN, name, "*", "*"))
    at = stage("read the log from the broker", at)
    events: list[LogEvent] = [e for message in stored if isinstance(e := message.event(), TrajEvent)]
    at = stage("decode it", at)
    calls = [[event for event in log if isinstance(event, Call)] for log in logs]
    at = time.perf_counter()
    for of_execution in calls:
        tree_of(of_execution)
    at = stage("build the trees", at)
    for of_execution in calls:
        paths(of_execution)
    at = stage("build the trees, choose and write out paths", at)
    (part,) = assemble(events)
    at = stage("assemble, all of it", at)
    assert part.ready is not None
    encoded = msgspec.json.encode(part.ready.members)
    stage("encode the group", at)
    assert len(payloads) == len(stored)
    assert encoded
    return tuple(stages)
