"""kill -9 of the sandbox service, 200 times at random moments, with 32 live sandboxes and clients at work.

What is there afterwards is counted on the system itself: processes, cgroups, mounts, folders.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from opengyre.proto.sandbox import (
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    ListRequest,
    ListResult,
    SandboxRef,
    SandboxSpec,
    VerifyRequest,
    VerifyResult,
)
from opengyre.proto.sandbox_jobs import JobStatus, PollRequest, SpawnRequest
from opengyre.proto.task import Check
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.clear import clear
from opengyre.sandbox.records import Processes, load
from opengyre.shared.bus import Bus, RpcFailedError, call
from support import eventually
from support.sandboxes import Node, attached, left_of, needs_sandboxes

KILLS = 200
LIVE = 32
CLIENTS = 3
NODE = "n3"
SEED = 6
T = TypeVar("T")
# The service's own program, forked from a process that has imported it: 200 starts need not import it each time.
NURSERY = """
import os, signal, sys
import opengyre.sandbox.service
from opengyre.shared.lifecycle import main
child = 0
for line in sys.stdin:
    if line == "start\\n":
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            main("sandbox", "opengyre.sandbox.service:SandboxService")
        print(child, flush=True)
    else:
        os.kill(child, signal.SIGKILL if line == "kill\\n" else signal.SIGTERM)
        print(os.waitpid(child, 0)[1], flush=True)
"""


class Nursery:
    """Starts and kills the service."""

    def __init__(self, url: str, state: Path) -> None:
        self.log = state.with_suffix(".log")
        environment = {
            **os.environ,
            "GYRE_BUS__URL": url,
            "GYRE_STATE_DIR": str(state),
            "GYRE_SANDBOX__NODE": NODE,
            "GYRE_SANDBOX__WORKSPACE_MB": "4",
            "GYRE_SANDBOX__MEMORY_MB": "64",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", NURSERY],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pid = 0

    async def tell(self, word: str) -> int:
        """Say a word; the number that is answered, within a bound."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        async with asyncio.timeout(60):
            return int(await asyncio.to_thread(self.process.stdout.readline))

    async def start(self) -> None:
        self.pid = await self.tell("start")

    async def kill(self) -> None:
        assert os.waitstatus_to_exitcode(await self.tell("kill")) == -signal.SIGKILL, self.log.read_text()[-3000:]
        self.pid = 0

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def nursery(url: str, state: Path) -> Iterator[Nursery]:
    made = Nursery(url, state)
    try:
        yield made
    finally:
        made.close()


class Calls:
    """Calls to the node that go on until they are answered, through as many deaths as it takes."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def ask(self, verb: str, request: msgspec.Struct, reply: type[T], target: str = NODE) -> T:
        while True:
            try:
                return await call(self.bus, "sandbox", target, verb, request, reply, timeout_s=1.0, patience_s=120.0)
            except RpcFailedError as error:
                if error.kind != "sandbox_busy":
                    raise
                await asyncio.sleep(0.05)  # busy with what the last life had begun

    async def create(self, name: str, **more: float) -> None:
        await self.ask("create", SandboxSpec(sandbox=name, owner="chaos", **more), SandboxRef, target="any")  # type: ignore[arg-type]  # times to live by name

    async def exec(self, name: str, exec_id: str, command: str) -> ExecResult:
        return await self.ask("exec", ExecRequest(sandbox=name, exec_id=exec_id, command=command), ExecResult)

    async def end_of(self, name: str, exec_id: str) -> ExecResult:
        """Of a background command that is on its way there."""
        look = PollRequest(sandbox=name, exec_id=exec_id, wait_s=0.5)
        async with asyncio.timeout(90):
            while (status := await self.ask("poll", look, JobStatus)).result is None:
                pass
        return status.result

    async def destroy(self, name: str) -> None:
        await self.ask("destroy", DestroyRequest(sandbox=name), DestroyResult)

    async def names(self) -> set[str]:
        return {info.sandbox for info in (await self.ask("list", ListRequest(), ListResult)).sandboxes}


async def work(calls: Calls, client: int, done: list[str], stop: asyncio.Event) -> None:
    """What the rollout service does, over and over: each command runs once, whatever dies meanwhile."""
    checks = (Check(name="once", command="[ $(wc -l < count) = 2 ]", weight=1.0),)
    number = 0
    while not stop.is_set():
        name = f"w{client}-{number}"
        number += 1
        await calls.create(name, ttl_s=900.0)
        for turn in range(2):
            ended = await calls.exec(name, f"t{turn}", "echo x >> count; wc -l < count")
            assert (ended.stdout, ended.exit_code) == (f"{turn + 1}\n", 0), (name, turn, ended)
        mode = "separate" if number % 2 else "shared"
        request = VerifyRequest(sandbox=name, verify_id="v", checks=checks, mode=mode)
        verdict = await calls.ask("verify", request, VerifyResult)
        assert (verdict.valid, verdict.passed) == (True, 1), (name, verdict)
        await calls.destroy(name)
        done.append(name)


def first_processes(root: Path) -> dict[str, tuple[int, int]]:
    """Process id and start time of each live sandbox's first process, as they are written down."""
    found = {}
    for index in range(LIVE):
        record = load(root / "sandboxes" / f"l{index}" / "processes.json", Processes)
        assert record is not None
        found[f"l{index}"] = (record.pid, record.started)
    return found


def processes_in(left: list[str]) -> list[str]:
    return [one for one in left if one.startswith("process")]


def shown(left: list[str]) -> list[str]:
    """With what the processes are."""
    found = []
    for one in sorted(left, key=lambda line: line.split(".")[-1]):
        command = ""
        if one.startswith("process"):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{one.split()[1]}/cmdline").read_text().replace("\0", " ")
        found.append(f"{one} {command}")
    return found


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[Path]:
    """Where the service has its state; what a failed test leaves there is ended."""
    yield tmp_path / "state"
    await clear(tmp_path / "state")


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.timeout(1200)
@needs_sandboxes
async def test_a_service_that_is_killed_200_times_loses_and_leaks_nothing(
    bus: Bus, nats_server, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(SEED)
    root = state / "sandbox" / NODE
    calls = Calls(bus)
    live = {f"l{index}" for index in range(LIVE)}
    with nursery(nats_server.url, state) as service:
        await service.start()
        await asyncio.gather(*(calls.create(name, ttl_s=3600.0, idle_ttl_s=3600.0) for name in live))
        # Nobody renews these: their owner is dead.
        await asyncio.gather(*(calls.create(f"o{index}", ttl_s=10.0) for index in range(8)))
        for index, name in enumerate(sorted(live)):
            command = f"mkfifo go; echo x >> begun; read line < go; exit {index + 40}"
            spawned = SpawnRequest(sandbox=name, exec_id="job", command=command, timeout_s=3000.0)
            assert (await calls.ask("spawn", spawned, JobStatus)).running
        before = first_processes(root)

        done: list[str] = []
        stop = asyncio.Event()
        clients = [asyncio.create_task(work(calls, client, done, stop)) for client in range(CLIENTS)]
        for number in range(KILLS):
            if number % 2:  # while it serves; else while it starts, on a machine that others load
                await calls.names()
            await asyncio.sleep(chosen.random() * (0.15 if number % 2 else 0.4))
            await service.kill()
            await service.start()
            for one in clients:
                assert not one.done(), one.exception()
        # What clients have begun goes on to its end, and they remove it.
        stop.set()
        async with asyncio.timeout(240):
            await asyncio.gather(*clients)
        assert len(done) >= CLIENTS

        # All live ones were taken up, each the same processes, with its background command and its own status.
        await eventually(lambda: _only(calls, live), 90.0)
        assert first_processes(root) == before
        for index, name in enumerate(sorted(live)):
            await calls.exec(name, "go", "echo > go")
            ended = await calls.end_of(name, "job")
            assert (name, ended.exit_code) == (name, index + 40)
            assert (await calls.exec(name, "count", "wc -l < begun")).stdout == "1\n"

        # On the system: a process, a folder, a cgroup for each, nothing else, and one launcher.
        probe = Bubblewrap(root)
        await eventually(lambda: len(attached(root / "launcher.log")) == 1)
        with contextlib.suppress(TimeoutError):  # what commands have just left behind ends by itself
            await eventually(lambda: len(processes_in(left_of(root, probe))) == LIVE)
        left = left_of(root, probe)
        assert len(processes_in(left)) == LIVE, shown(left)
        assert {one.split("/")[-1].split(".")[-1] for one in left if not one.startswith("process")} == live, left
        assert not [one for one in left if one.startswith("mount")]

        # The service dies for good; whoever starts next, after the leases, finds them over and leaves nothing.
        await service.kill()
        await eventually(lambda: not attached(root / "launcher.log"))
    later = time.monotonic() + 3601.0
    monkeypatch.setattr("opengyre.sandbox.manager._now", lambda: later)
    after = Node(root)
    await after.manager.start()
    reaping = asyncio.create_task(after.manager.reap())
    await eventually(lambda: after.left() == [], 60.0)
    reaping.cancel()
    await asyncio.wait([reaping])
    await after.close()
    assert after.left() == []
    assert attached(root / "launcher.log") == []


async def _only(calls: Calls, live: set[str]) -> bool:
    """Whether no other sandboxes are left: those of the dead owner go with their leases."""
    found = await calls.names()
    assert live <= found
    return found == live
