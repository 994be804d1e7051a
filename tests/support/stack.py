"""A whole stack in the test's own process, and a policy that is good enough to keep it busy."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from opengyre.cli.demo_client import Api
from opengyre.cli.demo_driver import Driver
from opengyre.cli.demo_plan import DemoOptions, warm_start_name
from opengyre.cli.demo_view import Shown
from opengyre.cli.supervisor_plan import MARK, EngineName
from opengyre.cli.up import Options, Running, running
from opengyre.proto.run import Dispatch, Elastic, Harness, RunSpec
from opengyre.shared.bus import Bus
from opengyre.shared.settings import load
from opengyre.shelltasks.warmstart import warm_start


def make_policy(folder: Path) -> Path:
    """A model directory after a few steps of cloning: it writes commands, seldom right ones. Takes seconds."""
    path = folder / "policy"
    warm_start(path, seed=1, steps=12, count=400)
    return path


def small_run(model: Path, updates: int, *, batch: int = 4, size: int = 4) -> RunSpec:
    return RunSpec(
        run="demo",
        model=str(model),
        updates=updates,
        dispatch=Dispatch(phi=0.5, mu=1, batch_groups=batch, group_size=size, min_members=1),
        harness=Harness(max_tokens=16),
        elastic=Elastic(dwell_s=0.2),
    )


@dataclass
class Whole:
    """A stack that is ready, with a driver for one run."""

    run: Running
    bus: Bus
    api: Api
    driver: Driver
    notes: list[str]

    async def restarted(self, name: str, before: int, bound_s: float = 150) -> None:
        """Wait until `name` runs as another process."""
        child = self.run.supervisor.children[name]
        assert await self.wait(lambda: child.pid not in (None, before), bound_s), f"{name} was not started again"
        assert await self.run.supervisor.wait_ready([name], bound_s) == {}, self.notes[-3:]

    async def wait(self, condition: Callable[[], bool], bound_s: float) -> bool:
        """Wait until `condition()`; whether it came true in time."""
        deadline = asyncio.get_running_loop().time() + bound_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await self.run.supervisor.changed(0.1)
        return True


@contextlib.asynccontextmanager
async def whole(
    state: Path,
    spec: RunSpec,
    *,
    hosts: int = 2,
    evaluation_tasks: int = 0,
    engine: EngineName = "tiny",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Whole]:
    """Start a stack with nothing but its defaults and `environment`, create the run, watch it.

    Every host is a process of its own, whatever its engine.
    """
    notes: list[str] = []
    settings = load(environment={})
    options = DemoOptions(updates=spec.updates or 1, hosts=hosts, evaluation_tasks=evaluation_tasks)
    made = Options(state, hosts, engine=engine, host_processes=hosts, environment=environment or {})
    async with running(made, settings, notes.append) as run:
        assert await run.wait_ready() == {}, notes
        async with Bus(run.stack.nats, "test") as bus, Api(run.stack.gateway, run.stack.api_key) as api:
            driver = Driver(bus, api, options, spec, Shown(updates=options.updates))
            await driver.create()
            async with driver.watching():
                yield Whole(run, bus, api, driver, notes)


def marked(state: Path) -> dict[int, str]:
    """Processes of a stack that are alive: pid -> command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={state}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    found.pop(os.getpid(), None)
    return found


async def get(url: str, key: str | None) -> tuple[int, object]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        return response.status, msgspec.json.decode(await response.read())


Done = subprocess.CompletedProcess[str]


def demonstrated(folder: Path, *options: str, timeout_s: float, **settings: str) -> tuple[Done, dict[str, Any]]:
    """`gyre demo` as a person starts it in a folder, with a policy that is made in seconds: its end, its summary."""
    cached = folder / "runs" / "cache" / warm_start_name(1)
    cached.parent.mkdir(parents=True)
    shutil.move(make_policy(folder), cached)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYRE_")}
    done = subprocess.run(
        [sys.executable, "-m", "opengyre.cli", "demo", "--headless", *options],
        cwd=folder, env={**environment, **settings}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    return done, json.loads((folder / "runs" / "demo" / "summary.json").read_text())
