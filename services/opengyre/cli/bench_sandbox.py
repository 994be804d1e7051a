"""`gyre bench sandbox`: starts, commands, forks, crowds, files and idle memory, beside a bare `docker exec` loop.

A NATS server on a free port, the sandbox service as a process of its own with a state of its own, and this process as
its client. What is measured is in `bench_sandbox_rows`; this one runs it and shows it.

Awaits: the service's first answer and its end, each with its bound.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from opengyre.cli.bench_facts import Spread, spread
from opengyre.cli.bench_options import chosen, numbers, tell
from opengyre.cli.bench_processes import process
from opengyre.cli.bench_sandbox_rows import Client, Crowd, Files, Idle, Latency, crowd, files, idle, latency
from opengyre.cli.client import JsonOption, console
from opengyre.cli.stack import StackError
from opengyre.cli.up import end_sandboxes
from opengyre.proto.sandbox import Capabilities
from opengyre.shared import embedded
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, BusError, RpcFailedError, bootstrap
from opengyre.shared.settings import load

PARTS = ("latency", "crowds", "files", "idle", "docker")
NODE = "bench"
AIMS_MS = {"start": 40.0, "exec": 8.0}
DOCKER_S = 60.0
errors = Console(stderr=True, highlight=False)


class Docker(msgspec.Struct, frozen=True, kw_only=True):
    """The `docker` command in a loop, without anything of ours."""

    image: str
    start: Spread
    exec: Spread
    destroy: Spread


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; a part that was not asked for is empty. `aims`: milliseconds, of bubblewrap's medians."""

    capabilities: Capabilities
    unenforced: tuple[str, ...]
    processors: int
    aims: Mapping[str, float] = msgspec.field(default_factory=lambda: dict(AIMS_MS))
    latency: Latency | None = None
    crowds: tuple[Crowd, ...] = ()
    files: Files | None = None
    idle: Idle | None = None
    docker: Docker | None = None
    docker_missing: str | None = None


def register(bench: typer.Typer) -> None:
    bench.command("sandbox")(sandbox)


def sandbox(
    parts: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PARTS)}.")] = ",".join(PARTS),
    starts: Annotated[int, typer.Option(min=2, max=1000, help="Sandboxes made one after another.")] = 100,
    execs: Annotated[int, typer.Option(min=2, max=10_000, help="Commands run one after another.")] = 300,
    crowds: Annotated[str, typer.Option(help="Sandboxes at once, comma-separated.")] = "64,200",
    idle_count: Annotated[int, typer.Option("--idle", min=1, max=8000, help="Sandboxes that do nothing.")] = 1000,
    image: Annotated[str | None, typer.Option(help="Image or root directory; default: the node's own folders.")] = None,
    docker_image: Annotated[
        str | None, typer.Option(help="Image of the bare loop; default: the engine's first.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the sandbox service as its clients see it, beside a bare `docker exec` loop.

    The backend is that of setting sandbox.backend.

    Example: gyre bench sandbox --parts latency,docker
    """
    wanted, sizes = chosen("--parts", parts, PARTS), numbers("--crowds", crowds, 1, 4000)
    try:
        found = asyncio.run(_measure(wanted, starts, execs, sizes, idle_count, image, docker_image))
    except (BusError, RpcFailedError, TimeoutError) as error:
        raise StackError(f"the bench could not go on: {error}") from error
    tell(found, json, _show)


async def _measure(
    parts: list[str], starts: int, execs: int, crowds: list[int], idle_count: int, image: str | None,
    docker_image: str | None,
) -> Facts:  # fmt: skip
    most = max([64, idle_count, *crowds]) + 8
    async with service(most) as (bus, folder, pid):
        client = Client(bus, NODE, image)
        await client.create("first")  # the answer says that the service is there
        await client.destroy("first")
        info = await client.info()
        found = Facts(
            capabilities=info.capabilities, unenforced=info.unenforced, processors=len(os.sched_getaffinity(0))
        )
        if "latency" in parts:
            errors.print("one at a time")
            one = await latency(client, starts, execs, forks=info.capabilities.fork)
            found = msgspec.structs.replace(found, latency=one)
        if "crowds" in parts:
            rows = []
            for size in crowds:
                errors.print(f"{size} at once")
                rows.append(await crowd(client, size))
            found = msgspec.structs.replace(found, crowds=tuple(rows))
        if "files" in parts:
            errors.print("a large file")
            async with Blobs(folder / "state" / "blobs", load().cache) as blobs:
                found = msgspec.structs.replace(found, files=await files(client, blobs))
        if "idle" in parts:
            errors.print(f"{idle_count} idle ones")
            found = msgspec.structs.replace(found, idle=await idle(client, idle_count, pid))
    if "docker" in parts:
        errors.print("docker exec")
        try:
            found = msgspec.structs.replace(found, docker=await docker(docker_image, starts // 5, execs // 5))
        except StackError as error:
            found = msgspec.structs.replace(found, docker_missing=str(error))
    return found


@contextlib.asynccontextmanager
async def service(most: int) -> AsyncIterator[tuple[Bus, Path, int]]:
    """A bus, the folder of everything, and the process id of a sandbox service on it; all of it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-sandbox-"))  # not by a thread, which a signal would not wait for
    port = embedded.free_port()
    url = f"nats://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "GYRE_BUS__URL": url,
        "GYRE_STATE_DIR": str(folder / "state"),
        "GYRE_LOG__LEVEL": "warning",
        "GYRE_SANDBOX__NODE": NODE,
        "GYRE_SANDBOX__MAX_SANDBOXES": str(most),
    }
    try:
        nats = embedded.nats_command(folder / "nats", port)
        async with process(nats, environment, folder / "nats.log"), Bus(url, "bench") as bus:
            await bootstrap(bus)
            command = [sys.executable, "-m", "opengyre.sandbox"]
            async with process(command, environment, folder / "sandbox.log") as pid:
                yield bus, folder, pid
    finally:
        await end_sandboxes(folder / "state")
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def docker(image: str | None, starts: int, execs: int) -> Docker:
    """Raises `StackError` where no engine answers or it has no image."""
    if shutil.which("docker") is None:
        raise StackError("docker is not on the PATH")
    found = (await _docker("images", "--format", "{{.Repository}}:{{.Tag}}")).split()
    chosen = image or next((name for name in found if "<none>" not in name), None)
    if chosen is None:
        raise StackError("the docker engine has no image; name one with --docker-image")
    start: list[float] = []
    run: list[float] = []
    gone: list[float] = []
    for number in range(max(starts, 2)):
        began = time.perf_counter()
        name = f"gyre-bench-{os.getpid()}-{number}"
        try:
            await _docker("run", "-d", "--name", name, "--init", "--network", "none", chosen, "sleep", "infinity")
            start.append(time.perf_counter() - began)
            for _ in range(max(execs, 2) if number == 0 else 0):
                began = time.perf_counter()
                await _docker("exec", name, "true")
                run.append(time.perf_counter() - began)
        finally:
            began = time.perf_counter()
            await _docker("rm", "-f", name)
            gone.append(time.perf_counter() - began)
    return Docker(image=chosen, start=spread(start), exec=spread(run), destroy=spread(gone))


async def _docker(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    bound = asyncio.get_running_loop().call_later(DOCKER_S, process.kill)
    try:
        output, complaint = await process.communicate()
    finally:
        await process.wait()  # also where a signal ends the bench: what is begun has to be there to be removed
        bound.cancel()
    if process.returncode == -signal.SIGKILL:
        raise StackError(f"docker {arguments[0]} did not end within {DOCKER_S:g} s")
    if process.returncode != 0:
        raise StackError(f"docker {arguments[0]}: {complaint.decode('utf-8', 'replace').strip()[:200]}")
    return output.decode()


def _show(found: Facts) -> None:
    console.print(f"{found.capabilities.backend} on {found.processors} processors, through NATS")
    if found.latency is not None:
        table = Table("one at a time", "median ms", "p99 ms", "of", "aim", "docker median", "docker p99")
        beside = {} if found.docker is None else msgspec.structs.asdict(found.docker)
        for name, value in msgspec.structs.asdict(found.latency).items():
            other = beside.get(name)
            aim = found.aims.get(name)
            table.add_row(
                name, _ms(value.median_ms), _ms(value.p99_ms), str(value.count), "-" if aim is None else f"< {aim:g}",
                _ms(other.median_ms if other else None), _ms(other.p99_ms if other else None),
            )  # fmt: skip
        console.print(table)
    if found.crowds:
        table = Table("at once", "start s", "exec s", "destroy s", "errors")
        for row in found.crowds:
            table.add_row(
                str(row.sandboxes), f"{row.start_s:g}", f"{row.exec_s:g}", f"{row.destroy_s:g}", str(row.errors)
            )
        console.print(table)
    if found.files is not None:
        same = "the same" if found.files.same else "NOT the same"
        console.print(f"{found.files.megabytes} MB in {found.files.write_s:g} s, out {found.files.read_s:g} s; {same}")
    if found.idle is not None:
        one = found.idle
        charged = "" if one.charged_kb is None else f", {one.charged_kb:g} KB charged to its cgroup"
        console.print(
            f"{one.sandboxes} of {one.asked} idle: {one.machine_kb:g} KB of the machine each{charged}, "
            f"{one.processes:g} processes each; the service {one.service_mb:g} MB",
            soft_wrap=True,
        )
        if one.why_fewer is not None:
            console.print(f"not more: {one.why_fewer}", markup=False, soft_wrap=True)
    if found.docker is not None and found.latency is None:
        console.print(f"docker exec: {_ms(found.docker.exec.median_ms)} ms (p99 {_ms(found.docker.exec.p99_ms)})")
    if found.docker_missing is not None:
        console.print(f"docker: {found.docker_missing}", markup=False, soft_wrap=True)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
