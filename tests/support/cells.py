"""An operator without mercy: a seeded sequence of drains, resumes, cordons and kills, and what the streams say of it.

Nothing here sleeps: an operation is followed by waiting for the cell to obey, for calls to be recorded, or by the next
operation at once; each wait has a bound.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.host import DesiredRole, HostState, HostStateChanged, HostStatus
from opengyre.proto.traj import Call, Ended, Resumed, Started, Suspended, TakenOver
from opengyre.shared.bus import Bucket, View, follow, read
from support.stack import Whole

VERBS = {"drain": 30, "resume": 35, "cordon": 20, "kill": 15}
SETTLED = {"rollout": HostState.ROLLOUT, "train": HostState.TRAIN, "cordoned": HostState.CORDONED}
OBEY_S = 90.0
CALLS_S = 2.0


@dataclass
class Tap:
    """The calls that were recorded so far."""

    calls: list[tuple[float, Call]] = field(default_factory=list)
    """With the broker's time stamps."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, at: float, call: Call) -> None:
        self.calls.append((at, call))
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait(self, condition: Callable[[], bool], bound_s: float) -> bool:
        """Wait for a call that makes it true; whether it came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                while not condition():
                    await self.changed.wait()
        return condition()


@dataclass
class Operator:
    stack: Whole
    hosts: View[HostStatus]
    tap: Tap
    random: random.Random
    verbs: Mapping[str, int] = field(default_factory=lambda: VERBS)
    """What it does, how often."""
    done: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)
    """The operations, for the message of a failure."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    """When, on the clock of the time stamps, and which host."""

    @property
    def serving(self) -> bool:
        return any(status.state is HostState.ROLLOUT for status in self.hosts.values.values())

    @property
    def names(self) -> list[str]:
        """Of all hosts, also of those that are on their way back and so have no heartbeat."""
        return sorted(name for name in self.stack.run.supervisor.children if name.startswith("host"))

    async def operate(self) -> None:
        """Do one operation, and perhaps wait for what comes of it."""
        names = self.names
        verb = self.random.choices(list(self.verbs), list(self.verbs.values()))[0]
        cell = self.random.choice(names)
        if verb == "kill" and self._pid(cell) is None:
            # All may be on their way: the supervisor starts who dies often only after a while.
            assert await self.stack.wait(lambda: any(map(self._pid, names)), OBEY_S)
            cell = next(name for name in names if self._pid(name) is not None)
        waits = self.random.random() < 0.5 and self._pid(cell) is not None
        if verb == "kill":
            self.kill(cell)
        else:
            await self.wish(cell, verb, waits=waits)
        self.done[verb] += 1
        self.said.append(f"{verb} {cell}")

    def _pid(self, name: str) -> int | None:
        return self.stack.run.supervisor.children[name].pid

    def kill(self, name: str) -> None:
        """kill -9; the supervisor starts it again."""
        pid = self._pid(name)
        assert pid is not None, f"no process of {name} is there to be killed"
        with contextlib.suppress(ProcessLookupError):  # killed before, which the supervisor is yet to hear of
            os.kill(pid, signal.SIGKILL)
        self.kills.append((time.time(), name))

    async def wish(self, cell: str, verb: str, *, waits: bool = True) -> None:
        await self.stack.api.post(f"/v1/cells/{cell}/{verb}", None)
        if waits:
            await self.obeyed(cell)

    async def obeyed(self, host: str) -> None:
        """Wait until the host is what the last command to it says."""
        bucket = Bucket(self.stack.bus, subjects.KV_DESIRED, DesiredRole)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OBEY_S
        while loop.time() < deadline:
            level = await bucket.get(host)
            status = self.hosts.values.get(host)
            if level is None:
                return
            if status is not None and status.epoch >= level[0].epoch and status.state is SETTLED[level[0].role]:
                return
            await self.hosts.changed(1.0)
        raise AssertionError(f"{host} does not obey: {self.hosts.values.get(host)}, {self.said[-8:]}")

    async def many(self, count: int, calls: int, between: Mapping[int, Callable[[], None]]) -> None:
        """`count` operations, spread evenly over the next `calls` recorded calls; `between`: done before the
        operation of that number.

        Where no host serves no call comes, and the next operation follows at once.
        """
        begun = len(self.tap.calls)
        for number in range(count):
            due = begun + calls * number // count
            while len(self.tap.calls) < due and self.serving:
                if not await self.tap.wait(lambda due=due: len(self.tap.calls) >= due, CALLS_S):
                    break
            between.get(number, lambda: None)()
            await self.operate()


@contextlib.asynccontextmanager
async def operator(stack: Whole, run: str, seed: int) -> AsyncIterator[Operator]:
    """An operator who looks on; in the block the run may be there or not."""
    tap = Tap()

    async def listen() -> None:
        async for stored in follow(stack.bus, subjects.TRAJ, subjects.traj(run, "*", "*", "call")):
            event = stored.event()
            assert isinstance(event, Call)
            tap.take(stored.timestamp, event)

    async with Bucket(stack.bus, subjects.KV_HOSTS, HostStatus).view() as hosts, asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        try:
            yield Operator(stack, hosts, tap, random.Random(seed))
        finally:
            listening.cancel()


# -- what the streams say


@dataclass(frozen=True)
class Log:
    """What was recorded, with the broker's time stamps, in order."""

    traj: tuple[tuple[float, Event], ...]
    changes: tuple[tuple[float, HostStateChanged], ...]

    @property
    def calls(self) -> list[Call]:
        return [event for _, event in self.traj if isinstance(event, Call)]

    @property
    def ended(self) -> dict[str, list[str]]:
        """Execution -> the reasons of its ends."""
        found: dict[str, list[str]] = {}
        for _, event in self.traj:
            if isinstance(event, Ended):
                found.setdefault(event.execution, []).append(event.reason)
        return found


async def recorded(stack: Whole, run: str) -> Log:
    traj = await read(stack.bus, subjects.TRAJ, f"{subjects.PREFIX}.traj.{run}.>")
    hosts = await read(stack.bus, subjects.HOSTS, subjects.host("*", "state"))
    changes = ((stored.timestamp, stored.event()) for stored in hosts)
    return Log(
        tuple((stored.timestamp, stored.event()) for stored in traj),
        tuple((at, event) for at, event in changes if isinstance(event, HostStateChanged)),
    )


def prompts(calls: Iterable[Call]) -> dict[tuple[str, str], tuple[int, ...]]:
    """(execution, call) -> the whole prompt, put together again from what each call added to its parent's."""
    whole: dict[tuple[str, str], tuple[int, ...]] = {}
    sampled: dict[tuple[str, str], tuple[int, ...]] = {}
    for call in calls:
        before: tuple[int, ...] = ()
        if call.parent is not None:
            parent = (call.execution, call.parent)
            before = (whole[parent] + sampled[parent])[: call.prefix_tokens]
        assert len(before) == call.prefix_tokens
        whole[call.execution, call.call] = before + call.prompt_ids
        sampled[call.execution, call.call] = call.sampled_ids
    return whole


def gaps(log: Log, kills: Sequence[tuple[float, str]], until: float) -> list[tuple[float, float]]:
    """The times in which no host was in the rollout role, from the first that was."""
    marks: list[tuple[float, str, bool]] = [(at, host, False) for at, host in kills]
    marks += [(at, change.host, change.after is HostState.ROLLOUT) for at, change in log.changes]
    serving: set[str] = set()
    found: list[tuple[float, float]] = []
    since: float | None = None
    for at, host, serves in sorted(marks):
        before = bool(serving)
        serving = serving | {host} if serves else serving - {host}
        if before and not serving:
            since = at
        elif serving and since is not None:
            found.append((since, at))
            since = None
    if since is not None:
        found.append((since, until))
    return [(start, min(end, until)) for start, end in found if start < until]


def unexplained(log: Log, gap: tuple[float, float]) -> set[str]:
    """The executions that were live all through a gap and were never said to be SUSPENDED in it."""
    start, end = gap
    live: set[str] = set()
    suspended: set[str] = set()
    explained: set[str] = set()
    for at, event in log.traj:
        if at > end:
            break
        name = getattr(event, "execution", "")
        match event:
            case Started():
                live |= {name} if at <= start else set()
            case Suspended():
                suspended.add(name)
                explained |= {name} if at >= start else set()
            case Resumed() | TakenOver():
                explained |= {name} & suspended if at >= start else set()
                suspended.discard(name)
            case Ended():
                live.discard(name)
                suspended.discard(name)
            case _:
                pass
    return live - suspended - explained
