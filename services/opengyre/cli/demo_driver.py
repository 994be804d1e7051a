"""Drives the demo against a stack that runs: evaluate, train, evaluate; everything over REST, looking on by the bus.

Invariants: every step may be repeated (its posts are idempotent by content), so any service, the broker and the cache
may be killed while it runs; what is shown may lag, what is concluded is read anew from the streams at the end.

Awaits: `_until` is woken by the next event or looks again every second; it gives up when nothing happened for
`STALL_S` (with vLLM `VLLM_STALL_S`), naming what the services say they wait for.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from opengyre.cli.demo_client import Api, ApiError
from opengyre.cli.demo_facts import Facts, account
from opengyre.cli.demo_plan import DemoOptions, evaluation, tasks
from opengyre.cli.demo_view import Shown
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.codec import UndecodableError
from opengyre.proto.decision import StalenessReport
from opengyre.proto.host import HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.service import ServiceStatus
from opengyre.proto.task import TaskSpec
from opengyre.shared.bus import Bucket, Bus, BusError, follow, read

STALL_S = 180.0
VLLM_STALL_S = 480.0
"""A server's start alone may take `host.vllm_start_s`, and those of several cells share a machine."""
BATCH = 100


class DemoError(Exception):
    """The demo cannot go on; one sentence."""


def sources(run: str) -> list[tuple[str, list[str]]]:
    """The streams and subjects that hold a run's facts."""
    return [
        (subjects.UPDATES, [subjects.update(run, "committed"), subjects.update(run, "finished")]),
        (subjects.WEIGHTS, [subjects.weights(run, "*")]),
        (subjects.HOSTS, [subjects.host("*", "state")]),
        (subjects.TASKS, [subjects.task(run, "*", "scored")]),
        (
            subjects.TRAJ,
            [subjects.traj(run, "*", "*", event) for event in ("started", "suspended", "resumed", "ended")],
        ),
    ]


@dataclass
class Driver:
    """One run of the demo."""

    bus: Bus
    api: Api
    options: DemoOptions
    spec: RunSpec
    shown: Shown
    first_host_event: int = 1
    """Sequence in HOSTS from which events belong to this run."""
    _happened: asyncio.Event = field(default_factory=asyncio.Event)
    _activity: float = 0.0

    @property
    def facts(self) -> Facts:
        return self.shown.facts

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep `shown` up to date while the block lasts."""
        self._activity = asyncio.get_running_loop().time()
        failure: DemoError | None = None  # kept out of the group, which would wrap it
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(self._follow(stream, filters)) for stream, filters in sources(self.spec.run)]
            watchers.append(group.create_task(self._look()))
            try:
                yield
            except DemoError as error:
                failure = error
            finally:
                for watcher in watchers:
                    watcher.cancel()
        if failure is not None:
            raise failure

    async def create(self) -> None:
        """Create the run, or find it there."""
        document = msgspec.to_builtins(self.spec)
        del document["state"]
        await self._post("/v1/runs", document)

    async def evaluate(self, phase: str) -> None:
        """Submit the held-out tasks and wait for all scores."""
        wanted = evaluation(self.options, "before" if phase == "before" else "after")
        await self._submit(wanted)
        names = {task.task for task in wanted}
        await self._until(lambda: names <= self.facts.evaluations.keys(), f"the evaluation {phase} training")

    async def train(self) -> None:
        """Submit the tasks and wait for the run's last update."""
        await self._submit(tasks(self.options, self.spec))
        await self._until(lambda: self.facts.finished, "the run's last update")

    async def conclude(self) -> tuple[Facts, StalenessReport | None]:
        """The final account, from the streams; and the ledger, once it has caught up with the trainer."""
        report: StalenessReport | None = None
        for _ in range(30):
            report = await self._staleness()
            settled = report is not None and report.groups.live == 0 and report.groups.ready == 0
            if settled:
                break
            await asyncio.sleep(1)
        events: list[tuple[float, Event]] = []
        for stream, filters in sources(self.spec.run):
            start = self.first_host_event if stream == subjects.HOSTS else 1
            for stored in await read(self.bus, stream, filters, start):
                with contextlib.suppress(UndecodableError):
                    events.append((stored.timestamp, stored.event()))
        return account(events), report

    # -- REST

    async def _post(self, path: str, body: object) -> None:
        try:
            await self.api.post(path, body)
        except ApiError as error:
            raise DemoError(str(error)) from error

    async def _submit(self, wanted: list[TaskSpec]) -> None:
        for first in range(0, len(wanted), BATCH):
            await self._post("/v1/tasks", {"run": self.spec.run, "tasks": wanted[first : first + BATCH]})

    async def _staleness(self) -> StalenessReport | None:
        with contextlib.suppress(ApiError):
            return await self.api.get(f"/v1/staleness?run={self.spec.run}", StalenessReport)
        return None

    # -- looking on

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        patience = VLLM_STALL_S if self.options.engine == "vllm" else STALL_S
        self._activity = loop.time()
        while not condition():
            if loop.time() - self._activity > patience:
                waits = "; ".join(self.shown.waits) or "nothing"
                raise DemoError(
                    f"nothing happened for {patience:g} s while waiting for {what}; services wait for: {waits}"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._happened.wait()

    async def _follow(self, stream: str, filters: list[str]) -> None:
        loop = asyncio.get_running_loop()
        position = self.first_host_event if stream == subjects.HOSTS else 1
        while True:
            try:
                async for stored in follow(self.bus, stream, filters, start=position):
                    position = stored.sequence + 1
                    with contextlib.suppress(UndecodableError):
                        self.facts.take(stored.event())
                    if stream != subjects.HOSTS:
                        self._activity = loop.time()
                    self._happened.set()
                    self._happened = asyncio.Event()
            except (BusError, OSError, TimeoutError) as error:
                self.shown.notes.append(f"{stream} is read anew: {error}")
            await asyncio.sleep(1)

    async def _look(self) -> None:
        """Roles, waits and books, every second."""
        async with (
            Bucket(self.bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
            Bucket(self.bus, subjects.KV_SERVICES, ServiceStatus).view() as services,
        ):
            while True:
                self.shown.cells = {status.cell: status.state.value for status in hosts.values.values()}
                statuses = list(services.values.values())
                self.shown.suspended = int(sum(status.gauges.get("suspended_episodes", 0) for status in statuses))
                self.shown.waits = [
                    f"{status.service}: {wait.what} ({wait.since_s:.0f} s)"
                    for status in statuses
                    for wait in status.waits
                ]
                report = await self._staleness()
                self.shown.staleness = report or self.shown.staleness
                await asyncio.sleep(1)
