"""The supervisor: keeps the programs of a plan running, tells which died and why, and stops them in order.

Invariants: it signals its own children only; each program has one process at most; the pure machine of
`supervisor_state` decides, this shell does. States are its.

Awaits: a child's task is woken by its exit; `wait_ready` and `stop` by `changed`, which every transition sets, or by
their bounds; `_follow_statuses` by a heartbeat or within a second.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opengyre.cli import supervisor_child as child_processes
from opengyre.cli.supervisor_plan import Program, stages
from opengyre.cli.supervisor_state import Do, Effect, Event, Kind, Life, State, advance
from opengyre.proto import subjects
from opengyre.proto.service import ServiceStatus
from opengyre.shared.bus import Bucket, Bus, BusError

log = logging.getLogger("gyre.supervisor")

FROZEN_S = 60.0
"""A service that has given no sign for so long while the broker answers is killed, to be started again."""
KILL_S = 5.0


@dataclass
class Child:
    """A program, its life, and its present process if it has one."""

    program: Program
    log: Path
    life: Life = field(default_factory=Life)
    process: asyncio.subprocess.Process | None = None
    started: float = 0.0
    log_start: int = 0
    """Size of the log when the present process was started."""
    seen: float = 0.0
    """When it last gave a sign, on the loop's clock."""
    missing: str | None = "not started"
    last_end: str | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None


class Supervisor:
    """Use as `async with Supervisor(...) as s`, then `start`, `wait_ready`, `stop`; leaving the block stops all."""

    def __init__(self, logs: Path, report: Callable[[str], None]) -> None:
        self._logs = logs
        self._report = report
        self._tasks = asyncio.TaskGroup()
        self._changed = asyncio.Event()
        self._helpers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.children: dict[str, Child] = {}

    async def __aenter__(self) -> "Supervisor":
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            # A second Ctrl-C or the caller's bound may cancel this; what is left is killed then.
            await self.stop()
        finally:
            for child in self.children.values():
                if child.pid is not None and child.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.kill()
            await self._tasks.__aexit__(None, None, None)

    # -- what callers do

    def start(self, programs: Iterable[Program]) -> None:
        """Begin to keep these running; their logs are rotated."""
        for program in programs:
            path = self._logs / f"{program.name}.log"
            child_processes.rotate(path)
            self.children[program.name] = Child(program, path)
            self._give(self.children[program.name], Event(Kind.START))

    def follow(self, url: str) -> None:
        """Take readiness from the services' statuses on the bus at `url`."""
        self._helpers.append(self._tasks.create_task(self._follow_statuses(url)))

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next transition, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def wait_ready(self, names: Sequence[str], bound_s: float) -> dict[str, str]:
        """Wait until these run, `bound_s` at most; return what is missing still, by name."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + bound_s
        while lacking := self.missing(names):
            left = deadline - loop.time()
            if left <= 0:
                return lacking
            await self.changed(min(left, 1.0))
        return {}

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Name -> why it does not run, of those of `names` that do not."""
        return {
            name: self.children[name].missing or self.children[name].life.state.value
            for name in names
            if self.children[name].life.state is not State.RUNNING
        }

    async def stop(self) -> None:
        """Stop everything in the order of the stages; each has its bound, then it is killed."""
        self._stopping = True
        for helper in self._helpers:  # before the broker goes that they are connected to
            helper.cancel()
        for stage in stages([child.program for child in self.children.values()]):
            members = [self.children[program.name] for program in stage]
            for child in members:
                self._give(child, Event(Kind.STOP))
            while any(child.life.state is not State.DOWN for child in members):
                await self.changed(1.0)

    # -- transitions

    def _give(self, child: Child, event: Event) -> None:
        child.life, effects = advance(child.life, event)
        for effect in effects:
            self._do(child, effect)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _do(self, child: Child, effect: Effect) -> None:
        loop = asyncio.get_running_loop()
        if effect.do is Do.SPAWN:
            self._tasks.create_task(self._live(child))
        elif effect.do is Do.WAIT:
            loop.call_later(effect.delay_s, self._give, child, Event(Kind.DUE))
        elif effect.do is Do.TERMINATE:
            self._signal(child, signal.SIGTERM)
            loop.call_later(child.program.stop_s, self._give, child, Event(Kind.OVERDUE))
        elif effect.do is Do.KILL:
            self._report(f"{child.program.name} did not end within {child.program.stop_s:g} s and is killed")
            self._signal(child, signal.SIGKILL)
        else:
            self._explain(child, effect)

    def _explain(self, child: Child, effect: Effect) -> None:
        child.last_end = _manner(effect.code)
        child.missing = f"{child.last_end}; started again in {effect.delay_s:g} s"
        lines = child_processes.tail(child.log, start=child.log_start)
        self._report(
            f"{child.program.name} {child.missing}"
            + (f"; the end of {child.log}:\n  " + "\n  ".join(line[:400] for line in lines) if lines else "")
        )

    @staticmethod
    def _signal(child: Child, number: int) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    # -- one process

    async def _live(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        child.started = child.seen = loop.time()
        child.log_start = child_processes.size(child.log)
        child.missing = "starting"
        code = 127
        try:
            child.process = process = await child_processes.spawn(child.program, child.log)
        except OSError as error:
            child.missing = f"cannot be started: {error.strerror}"
        else:
            if child.life.state in (State.STOPPING, State.KILLED):  # told to stop while it was being spawned
                self._signal(child, signal.SIGTERM if child.life.state is State.STOPPING else signal.SIGKILL)
            self._notify()
            probe = self._tasks.create_task(self._await_port(child)) if child.program.ready == "port" else None
            code = await process.wait()
            if probe is not None:
                probe.cancel()
        self._give(child, Event(Kind.EXITED, code=code, uptime_s=loop.time() - child.started))

    async def _await_port(self, child: Child) -> None:
        """Until its port accepts connections; its exit cancels this."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection("127.0.0.1", child.program.port, family=socket.AF_INET)
                writer.close()
                break
            await asyncio.sleep(0.05)
        child.missing = None
        self._give(child, Event(Kind.READY))

    # -- signs of life

    async def _follow_statuses(self, url: str) -> None:
        # Python 3.11's `wait_for`, which connecting is done with, may lose a cancellation that comes with its answer.
        while not self._stopping:
            try:
                async with (
                    Bus(url, "supervisor") as bus,
                    Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as view,
                ):
                    while not (bus.lost.is_set() or self._stopping):
                        self._take(list(view.values.values()), broker=bus.connected)
                        await view.changed(1.0)
            except* (BusError, OSError, TimeoutError) as errors:
                log.info("supervisor: the statuses are read anew (%r)", errors.exceptions[0])
            await asyncio.sleep(1)

    def _take(self, statuses: list[ServiceStatus], *, broker: bool) -> None:
        now = asyncio.get_running_loop().time()
        by_pid = {status.pid: status for status in statuses}
        for child in self.children.values():
            if child.program.ready != "status" or child.pid is None:
                continue
            status = by_pid.get(child.pid)
            if status is not None:
                child.seen = now
                child.missing = None if status.ready else status.missing or "not ready yet"
                self._give(child, Event(Kind.READY))
            elif not broker:
                child.seen = now
            elif now - child.seen > FROZEN_S and child.life.state in (State.STARTING, State.RUNNING):
                self._report(f"{child.program.name} gave no sign of life for {FROZEN_S:g} s and is killed")
                self._signal(child, signal.SIGKILL)
                child.seen = now


def _manner(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return "cannot be started" if code == 127 else f"ended with status {code}"
