"""`gyre demo`: a policy that learns shell tasks through the whole stack, and a summary of what was promised and kept.

Phases: warm start (cached), start, evaluation before, training, evaluation after, stop. The stack is stopped at the
end and on Ctrl-C, however the demo ends; with `--attach` it is another's and stays.

Awaits: every phase is bounded: by the warm start's steps, by `READY_S`, and by the driver's `STALL_S` without events.
"""

import asyncio
import contextlib
import json as jsonlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live

from opengyre.cli import stack as stacks
from opengyre.cli.demo_client import Api
from opengyre.cli.demo_driver import DemoError, Driver
from opengyre.cli.demo_facts import shortfalls, summary
from opengyre.cli.demo_plan import DemoOptions, run_spec, warm_start_name
from opengyre.cli.demo_view import Shown, closing, ending, line, panel
from opengyre.cli.stack import StackError
from opengyre.cli.up import Options, check, end_leftovers, running
from opengyre.cli.updown import install_signals
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.settings import Settings, load

LINE_S = 3.0
console = Console(stderr=True, highlight=False)


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    headless: Annotated[bool, typer.Option("--headless", help="Lines instead of a live view.")] = False,
    updates: Annotated[int, typer.Option(min=1, max=10_000, help="Updates to train for.")] = DemoOptions.updates,
    hosts: Annotated[int, typer.Option(min=1, max=64, help="GPU hosts to emulate.")] = DemoOptions.hosts,
    engine: Annotated[
        Literal["tiny", "vllm"], typer.Option(help="What serves the policy; vllm needs the environment of `make vllm`.")
    ] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Of the policy, the tasks and the sampling.")] = DemoOptions.seed,
    out: Annotated[Path, typer.Option(help="Directory of summary.json.")] = DemoOptions.out,
    state_dir: Annotated[Path | None, typer.Option(help="State of the stack; default: `state` in --out.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Go on from that state instead of a fresh one.")] = False,
    attach: Annotated[str | None, typer.Option(help="Gateway URL of a stack that runs already.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Of that gateway.", envvar="GYRE_API_KEY")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON at the end.")] = False,
) -> None:
    """Train a small policy on shell tasks through all services, and show it.

    Example: gyre demo --headless --updates 16
    """
    options = DemoOptions(
        updates=updates,
        hosts=hosts,
        engine=engine,
        seed=seed,
        out=out,
        state_dir=state_dir or out / "state",
        keep=keep,
        attach=attach,
        api_key=api_key,
    )
    live = not headless and not json and console.is_terminal
    try:
        code = asyncio.run(until_signal(options, load(), live=live, json=json))
    except DemoError as error:
        sys.exit(f"gyre demo: {error}")
    raise typer.Exit(code)


async def until_signal(options: DemoOptions, settings: Settings, *, live: bool, json: bool) -> int:
    stopping = asyncio.Event()
    install_signals(stopping)
    demo = Demo(options, settings, live=live, json=json)
    work = asyncio.create_task(demo.run())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not work.done():
        demo.stopping()
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled() and isinstance(error := work.exception(), StackError | DemoError):
            raise error  # on the way to its end: something may be left
        left = not options.attach and (options.state_dir / stacks.FILE).exists()
        console.print(ending(options, left=left), markup=False, soft_wrap=True)
        return 130
    return work.result()


class Demo:
    """The phases, and where their times go."""

    def __init__(self, options: DemoOptions, settings: Settings, *, live: bool, json: bool) -> None:
        self.options = options
        self.settings = settings
        self.shown = Shown(updates=options.updates)
        self.wall_s: dict[str, float] = {}
        self._live = live
        self._json = json
        self._start = time.monotonic()

    async def run(self) -> int:
        """Exit status: 0 when every promise was kept."""
        async with self._showing():
            document = await self._phases()
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / "summary.json"
        path.write_text(jsonlib.dumps(document, indent=2) + "\n", encoding="utf-8")
        if self._json:
            print(jsonlib.dumps(document))
        else:
            Console(highlight=False).print(closing(document))
            console.print(f"summary in {path}")
        return 0 if document["passed"] else 1

    def stopping(self) -> None:
        """Say that it ends, wherever it is."""
        self.shown.phase = "stopping"
        console.print("stopping, which takes some seconds; once more ends it at once")

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.shown.phase = name.replace("_", " ")
        start = time.monotonic()
        try:
            yield
        finally:
            self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - start

    def _note(self, text: str) -> None:
        self.shown.notes.append(text)
        if not self._live:
            console.print(text, markup=False)

    @contextlib.asynccontextmanager
    async def _showing(self) -> AsyncIterator[None]:
        async def lines() -> None:
            while True:
                await asyncio.sleep(LINE_S)
                if self.shown.phase in ("starting", "warm start"):  # the warm start tells its steps itself
                    continue
                self.shown.elapsed_s = time.monotonic() - self._start
                console.print(line(self.shown), markup=False, soft_wrap=True)

        async def view() -> None:
            with Live(panel(self.shown), console=console, auto_refresh=False, transient=True) as screen:
                while True:
                    self.shown.elapsed_s = time.monotonic() - self._start
                    screen.update(panel(self.shown), refresh=True)
                    await asyncio.sleep(0.25)

        task = asyncio.create_task(view() if self._live else lines())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _phases(self) -> dict[str, object]:
        if not self.options.attach:
            await asyncio.to_thread(self._refuse)
        model = await self._model()
        async with contextlib.AsyncExitStack() as stack:
            with self._phase("start"):
                nats, gateway, key = await stack.enter_async_context(self._stack())
                bus = await stack.enter_async_context(Bus(nats, "demo"))
                api = await stack.enter_async_context(Api(gateway, key))
                spec = await self._spec(bus, model)
                first = (await bus.stream_info(subjects.HOSTS)).state.last_seq + 1 if not self.options.keep else 1
                driver = Driver(bus, api, self.options, spec, self.shown, first_host_event=first)
                await driver.create()
            async with driver.watching():
                with self._phase("evaluate_before"):
                    await driver.evaluate("before")
                with self._phase("train"):
                    await driver.train()
                with self._phase("evaluate_after"):
                    await driver.evaluate("after")
                facts, report = await driver.conclude()
            self.shown.phase = "stopping"
            stopping = time.monotonic()
        self.wall_s["stop"] = time.monotonic() - stopping
        self.wall_s["total"] = time.monotonic() - self._start
        settings = {
            "run": spec.run,
            "updates": self.options.updates,
            "hosts": self.options.hosts,
            "engine": self.options.engine,
            "seed": self.options.seed,
        }
        switches = None if self.options.engine == "tiny" else 1
        missed = shortfalls(facts, report, self.options.updates, switches)
        return summary(facts, report, self.wall_s, settings, missed)

    async def _spec(self, bus: Bus, model: Path) -> RunSpec:
        """The run to follow: the one that is active (a demo that goes on), or a new one with a free name."""
        runs = Bucket(bus, subjects.KV_RUNS, RunSpec)
        for number in range(1, 1000):
            name = "demo" if number == 1 else f"demo_{number}"
            there = await runs.get(name)
            if there is None:
                return run_spec(self.options, name, model)
            if there[0].state == "active":
                return there[0]
        raise DemoError("there are 999 runs of the demo here already; start without --keep")

    @contextlib.asynccontextmanager
    async def _stack(self) -> AsyncIterator[tuple[str, str, str | None]]:
        if self.options.attach:
            yield self.settings.bus.url, self.options.attach, self.options.api_key
            return
        if not self.options.keep:
            await asyncio.to_thread(_clear, self.options.state_dir.absolute())
        async with running(self._of_the_stack(), self.settings, self._note) as run:
            lacking = await run.wait_ready()
            if lacking:
                raise DemoError("not everything runs: " + "; ".join(f"{name}: {why}" for name, why in lacking.items()))
            yield run.stack.nats, run.stack.gateway, run.stack.api_key

    def _of_the_stack(self) -> Options:
        engine = self.options.engine
        # The demo's policy has so many positions, and cells switch too seldom to be tried beforehand.
        own = {"GYRE_HOST__VLLM_CONTEXT": "512", "GYRE_HOST__DRY_SWITCH": "false"} if engine == "vllm" else {}
        return Options(self.options.state_dir.absolute(), self.options.hosts, engine=engine, environment=own)

    def _refuse(self) -> None:
        """Raise `StackError` for what the stack would fail of, before the warm start and the end of what was there."""
        options = self._of_the_stack()
        _check_idle(options.state_dir)
        check(options, self.settings)

    async def _model(self) -> Path:
        """The initial policy; made once, and kept for later demos."""
        # A stack in containers sees its own state directory, and the model must be where it sees it.
        cache = self.settings.state_dir / "models" if self.options.attach else self.options.cache
        path = (cache / warm_start_name(self.options.seed)).absolute()
        with self._phase("warm_start"):
            if not path.exists():
                self._note(f"the initial policy is made by behaviour cloning, once, about a minute: {path}")
                await self._warm_start(path)
        return path

    async def _warm_start(self, path: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "opengyre.shelltasks.warmstart", "--out", str(path), "--seed", str(self.options.seed),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip
        assert process.stderr is not None
        said = ""
        try:
            async for raw in process.stderr:
                said = raw.decode("utf-8", "replace").rstrip()
                self._note(said)
            if await process.wait() != 0:
                raise DemoError(f"the warm start failed: {said}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _check_idle(state: Path) -> None:
    if state.exists() and stacks.owner(state) is not None:
        raise StackError(f"a stack runs in {state}; `gyre down --state-dir {state}` stops it")


def _clear(state: Path) -> None:
    """Empty the state directory of an earlier demo; nothing else is ever removed."""
    if not state.exists():
        return
    _check_idle(state)
    if not (state / stacks.FILE).exists() and any(state.iterdir()):
        raise StackError(f"{state} is not empty and not a stack's; name another --state-dir")
    end_leftovers(state)
    doomed = Path(tempfile.mkdtemp(prefix=f".{state.name}-", dir=state.parent))
    state.rename(doomed / "old")  # gone at once, whatever is slow to be removed
    shutil.rmtree(doomed, ignore_errors=True)
