"""What `gyre bench sandbox` measures of a sandbox service that answers on a bus, each part by itself.

Every figure is of whole calls, as a client of the service has them: message, service, machine, answer.

Awaits: answers of the service, each within `BOUND_S`.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from opengyre.cli.bench_facts import Spread, spread
from opengyre.proto.sandbox import (
    SERVICE,
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    InfoRequest,
    NodeInfo,
    ReadRequest,
    ReadResult,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    StatRequest,
    WriteRequest,
    WriteResult,
)
from opengyre.proto.sandbox_trees import (
    DropRequest,
    DropResult,
    ForkRequest,
    ForkResult,
    SnapshotInfo,
    SnapshotRequest,
)
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, BusError, RpcFailedError, call

BOUND_S = 120.0
OWNER = "bench"
FILE_MB = 100
FORK_FILES = 1000
BATCH = 32
SETTLE_S = 1.0
T = TypeVar("T")


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """One at a time. `nothing`: a call that only looks, so what message and answer take; `command`: what the sandbox's
    own record says that ``true`` took; `fork`: one new sandbox from a snapshot of 1,000 files, none where the backend
    cannot."""

    start: Spread
    first_exec: Spread
    exec: Spread
    destroy: Spread
    snapshot: Spread
    fork: Spread
    nothing: Spread
    command: Spread


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """So many at once: seconds until all have been made, have run ``true``, are gone."""

    sandboxes: int
    start_s: float
    exec_s: float
    destroy_s: float
    errors: int


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """One file in and out by way of the blob store; seconds of the service's call alone."""

    megabytes: int
    write_s: float
    read_s: float
    same: bool


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes in which nothing runs. `machine_kb`: what the machine's available memory fell by, for each;
    `charged_kb`: what the kernel charges to the cgroup of one, none where it has none; `processes`: for each."""

    sandboxes: int
    asked: int
    why_fewer: str | None
    machine_kb: float
    charged_kb: float | None
    processes: float
    service_mb: float


class Client:
    """Calls to one node."""

    def __init__(self, bus: Bus, node: str, image: str | None = None) -> None:
        self._bus = bus
        self._node = node
        self._image = image

    async def ask(self, verb: str, request: msgspec.Struct, reply: type[T], target: str | None = None) -> T:
        where = target or self._node
        return await call(self._bus, SERVICE, where, verb, request, reply, timeout_s=BOUND_S, patience_s=BOUND_S)

    async def create(self, name: str, **more: Any) -> None:
        spec = SandboxSpec(sandbox=name, owner=OWNER, ttl_s=3600, idle_ttl_s=3600, image=self._image, **more)
        await self.ask("create", spec, SandboxRef)

    async def exec(self, name: str, command: str = "true") -> ExecResult:
        request = ExecRequest(sandbox=name, exec_id=f"e{uuid.uuid4().hex[:12]}", command=command, timeout_s=BOUND_S / 2)
        done = await self.ask("exec", request, ExecResult)
        if done.exit_code != 0:
            raise RpcFailedError("infra_error", f"{command[:60]!r} ended with {done.exit_code}: {done.stderr[:200]}")
        return done

    async def destroy(self, name: str) -> None:
        await self.ask("destroy", DestroyRequest(sandbox=name), DestroyResult)

    async def info(self) -> NodeInfo:
        return await self.ask("info", InfoRequest(), NodeInfo)


async def _timed(work: Awaitable[object], seconds: list[float]) -> None:
    began = time.perf_counter()
    await work
    seconds.append(time.perf_counter() - began)


async def latency(client: Client, starts: int, execs: int, *, forks: bool) -> Latency:
    """One after another."""
    start: list[float] = []
    first: list[float] = []
    gone: list[float] = []
    for number in range(starts):
        name = f"start{number}"
        await _timed(client.create(name), start)
        await _timed(client.exec(name), first)
        await _timed(client.destroy(name), gone)
    name, run, nothing, command = "exec", [], [], []
    await client.create(name)
    await client.exec(name)
    for _ in range(execs):
        await _timed(client.ask("stat", StatRequest(sandbox=name), SandboxInfo), nothing)
        began = time.perf_counter()
        done = await client.exec(name)
        run.append(time.perf_counter() - began)
        command.append(done.duration_s)
    snapshot, fork = await _forks(client, name, starts // 2) if forks else ([], [])
    await client.destroy(name)
    return Latency(
        start=spread(start), first_exec=spread(first), exec=spread(run), destroy=spread(gone),
        snapshot=spread(snapshot), fork=spread(fork), nothing=spread(nothing), command=spread(command),
    )  # fmt: skip


async def _forks(client: Client, name: str, count: int) -> tuple[list[float], list[float]]:
    await client.exec(name, f"i=0; while [ $i -lt {FORK_FILES} ]; do echo $i > f$i; i=$((i+1)); done")
    snapshot: list[float] = []
    fork: list[float] = []
    for number in range(count):
        taken, made = f"snap{number}", f"fork{number}"
        await _timed(client.ask("snapshot", SnapshotRequest(sandbox=name, snapshot=taken), SnapshotInfo), snapshot)
        request = ForkRequest(snapshot=taken, sandboxes=(made,), owner=OWNER)
        await _timed(client.ask("fork", request, ForkResult), fork)
        await client.exec(made, f"[ $(ls | wc -l) = {FORK_FILES} ]")
        await client.destroy(made)
        await client.ask("drop", DropRequest(snapshot=taken), DropResult)
    return snapshot, fork


async def crowd(client: Client, count: int) -> Crowd:
    """All at once."""
    names = [f"crowd{number}" for number in range(count)]
    errors = 0

    async def together(work: Callable[[str], Awaitable[object]]) -> float:
        nonlocal errors
        began = time.perf_counter()
        ended = await asyncio.gather(*(work(name) for name in names), return_exceptions=True)
        for one in ended:
            if isinstance(one, (BusError, RpcFailedError)):
                errors += 1
            elif isinstance(one, BaseException):
                raise one
        return round(time.perf_counter() - began, 3)

    return Crowd(
        sandboxes=count,
        start_s=await together(client.create),
        exec_s=await together(client.exec),
        destroy_s=await together(client.destroy),
        errors=errors,
    )


async def files(client: Client, blobs: Blobs) -> Files:
    """A file of random bytes, which no one can shorten."""
    content = await asyncio.to_thread(_random, FILE_MB << 20)
    ref = await blobs.put(content, durable=False)
    await client.create("files", workspace_mb=2 * FILE_MB, memory_mb=5 * FILE_MB)
    write: list[float] = []
    read: list[float] = []
    await _timed(client.ask("write", WriteRequest(sandbox="files", path="big", blob=ref), WriteResult), write)
    began = time.perf_counter()
    request = ReadRequest(sandbox="files", path="big", limit=len(content), blob=True)
    found = await client.ask("read", request, ReadResult)
    read.append(time.perf_counter() - began)
    await client.destroy("files")
    return Files(
        megabytes=FILE_MB, write_s=round(write[0], 3), read_s=round(read[0], 3),
        same=(found.blob, found.size) == (ref, len(content)),
    )  # fmt: skip


def _random(size: int) -> bytes:
    with Path("/dev/urandom").open("rb") as source:
        return source.read(size)


async def idle(client: Client, count: int, service_pid: int) -> Idle:
    """As many as fit up to `count`, then what they take while nothing happens."""
    await asyncio.sleep(SETTLE_S)
    before, groups = _available_kb(), _processes()
    mine = f"idle{os.getpid()}-"
    names: list[str] = []
    why = None
    while len(names) < count and why is None:
        batch = [f"{mine}{number}" for number in range(len(names), min(count, len(names) + BATCH))]
        ended = await asyncio.gather(*(client.create(name) for name in batch), return_exceptions=True)
        failed = next((one for one in ended if isinstance(one, BaseException)), None)
        names += [name for name, one in zip(batch, ended, strict=True) if not isinstance(one, BaseException)]
        why = None if failed is None else str(failed)
    await asyncio.sleep(SETTLE_S)
    taken, processes = before - _available_kb(), _processes() - groups
    charged = [int(path.read_text()) / 1024 for path in _charges(mine)]
    service_mb = _resident_kb(service_pid) / 1024
    for start in range(0, len(names), BATCH):
        await asyncio.gather(*(client.destroy(name) for name in names[start : start + BATCH]))
    made = max(len(names), 1)
    return Idle(
        sandboxes=len(names), asked=count, why_fewer=why, machine_kb=round(taken / made, 1),
        charged_kb=round(sum(charged) / len(charged), 1) if charged else None,
        processes=round(processes / made, 2), service_mb=round(service_mb, 1),
    )  # fmt: skip


def _available_kb() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _processes() -> int:
    return sum(path.name.isdigit() for path in Path("/proc").iterdir())


def _resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _charges(prefix: str) -> list[Path]:
    """Files that say how many bytes are charged to sandboxes whose ids begin so."""
    top = Path("/sys/fs/cgroup")
    found: list[Path] = []
    for name in ("memory.usage_in_bytes", "memory.current"):
        found += top.rglob(f"gyre-*/{prefix}*/{name}")
    return found
