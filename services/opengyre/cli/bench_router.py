"""`gyre bench router`: what proxy, router and record add to a call, beside a direct call to the same engine.

Blocks of the ways alternate, so that whatever else the machine does hits all of them.

Awaits: executions' agents to run and to have ended, calls' answers, all bounded.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from opengyre.cli import bench_router_stack as stacks
from opengyre.cli.bench_facts import Spread
from opengyre.cli.bench_options import numbers, tell
from opengyre.cli.bench_processes import place, processor_s
from opengyre.cli.bench_router_facts import Block, Facts, Turn, facts
from opengyre.cli.bench_router_stack import RUN, Where, dispatch, stack
from opengyre.cli.bench_router_talk import BOUND_S, TalkError, Way, lengths, ways
from opengyre.cli.client import JsonOption, console, number
from opengyre.cli.sim_views import narrow
from opengyre.cli.stack import StackError
from opengyre.host.vllm_arguments import VllmArgumentsError, checked_arguments
from opengyre.host.vllm_machine import free_memory, gpus_of
from opengyre.host.vllm_plan import kv_fault
from opengyre.proto import ids, subjects
from opengyre.shared.settings import load
from opengyre.shared.vllm import VllmMissingError, checked_interpreter
from opengyre.tiny.types import EngineSettings

errors = Console(stderr=True, highlight=False)
Engine = Literal["tiny", "emulated", "vllm"]
WARM_CALLS = 3
TURNS = 8
CONTEXT: Final = {"tiny": EngineSettings().max_context, "emulated": stacks.CONTEXT, "vllm": stacks.CONTEXT}
"""Tokens of prompt and completion that the engine takes."""
STAGGER_S = 0.01
"""Between the beginnings of a block's conversations."""
PROMPT = 60
"""Tokens that a turn adds to the prompt, about."""


def register(bench: typer.Typer) -> None:
    bench.command("router")(router)


def router(
    engine: Annotated[Engine, typer.Option(help="Of the host that is asked.")] = "emulated",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Blocks of each way at each concurrency.")] = 8,
    turns: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Calls of a conversation; default: 8, fewer where the context holds fewer."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="That a call samples, on average.")] = 32,
    concurrency: Annotated[str, typer.Option(help="Conversations side by side; comma-separated.")] = "1,8,32",
    apart: Annotated[
        bool,
        typer.Option(
            "--apart/--together",
            help="With vllm: half of the processors are its alone, as where a GPU does its work; or all are shared.",
        ),
    ] = True,
    json: JsonOption = False,
) -> None:
    """Measure what proxy, router and record add to a model call, and where the time goes.

    Example: gyre bench router --engine tiny --json
    """
    levels = sorted(numbers("--concurrency", concurrency, 1, 64))
    most = CONTEXT[engine] // (2 * tokens + PROMPT)
    if most < 1:
        fit = (CONTEXT[engine] - PROMPT) // 2
        raise StackError(f"--tokens is {tokens}; with --engine {engine} allowed are up to {fit}")
    if turns is not None and turns > most:
        raise StackError(f"--turns is {turns}; with --tokens {tokens} and --engine {engine} allowed are up to {most}")
    settings = load()
    if engine == "vllm":
        try:
            checked_arguments(checked_interpreter(settings.host.vllm_python), settings.host.vllm_arguments)
        except (VllmMissingError, VllmArgumentsError) as error:
            raise StackError(str(error)) from error
        if not gpus_of(os.environ) and (fault := kv_fault(settings.host, free_memory())) is not None:
            raise StackError(fault)
    processors = sorted(os.sched_getaffinity(0))
    own = processors[: len(processors) // 2] if apart and engine == "vllm" else []
    turns = min(TURNS, most) if turns is None else turns
    # Outside of the loop, whose threads may write to it until it has ended.
    with tempfile.TemporaryDirectory(prefix="gyre-bench-router-", ignore_cleanup_errors=True) as folder:
        try:
            found = asyncio.run(_measure(engine, Path(folder), rounds, turns, tokens, levels, own))
        except (TimeoutError, TalkError, ExceptionGroup) as error:
            raise _sentence(error) from error
    tell(found, json, _show)


def _sentence(error: Exception) -> Exception:
    """What is told of a fault; of several that came together the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return StackError("the services were not ready, or an execution did not end, in time")
    return StackError(str(error)) if isinstance(error, TalkError) else error


async def _measure(
    engine: Engine, folder: Path, rounds: int, turns: int, tokens: int, levels: Sequence[int], own: Sequence[int]
) -> Facts:
    """`folder`: for the files of what is measured; `own`: processors that are the engine's alone, none
    where it shares them all."""
    processors = os.sched_getaffinity(0)
    connector = aiohttp.TCPConnector(limit=0)
    bound = aiohttp.ClientTimeout(total=BOUND_S)
    async with (
        stack(engine, max(levels), folder, _say) as where,
        aiohttp.ClientSession(connector=connector, timeout=bound) as session,
    ):
        if own:
            for name, pids in where.processes.items():
                place(pids, own if name == engine else processors.difference(own))
        bench = _Bench(where, session, tokens)
        chosen = ways(where, vllm=engine == "vllm")
        for way, begin in chosen.items():
            await bench.block(way, begin, max(levels), WARM_CALLS)
        blocks = []
        for level in levels:
            for turn in range(rounds):
                _say(f"{level} at a time: round {turn + 1} of {rounds}")
                # The order alternates as well: a machine that becomes busier favours neither.
                order = list(chosen.items())
                for way, begin in order if turn % 2 == 0 else reversed(order):
                    blocks.append(await bench.block(way, begin, level, turns))
    return facts(engine, len(processors), len(own), blocks)


def _say(what: str) -> None:
    errors.print(what, markup=False, soft_wrap=True)


class _Bench:
    def __init__(self, where: Where, session: aiohttp.ClientSession, tokens: int) -> None:
        self._where = where
        self._session = session
        self._tokens = tokens
        self._numbers = itertools.count()

    async def block(self, way: str, begin: Way, concurrency: int, turns: int) -> Block:
        """One conversation of each of so many clients."""
        if way == "via":
            async with self._executions(concurrency, turns) as names:
                return await self._talk(way, begin, names, turns)
        # Named as executions are, so that prompts are as long.
        names = [ids.execution_id(ids.group_id(RUN, next(self._numbers)), 0) for _ in range(concurrency)]
        return await self._talk(way, begin, names, turns)

    @asynccontextmanager
    async def _executions(self, count: int, turns: int) -> AsyncIterator[list[str]]:
        """Executions whose agents run. Raises `TimeoutError`."""
        dispatches = [dispatch(next(self._numbers), turns, 2 * self._tokens) for _ in range(count)]
        names = [one.execution for one in dispatches]
        for one in dispatches:
            await self._where.bus.publish(subjects.episode_dispatch(one.run), one)
        await self._where.sandboxes.running(names, count=count)
        yield names
        await self._where.sandboxes.end(names)

    async def _talk(self, way: str, begin: Way, names: Sequence[str], turns: int) -> Block:
        talks = [begin(self._session, name) for name in names]

        async def talk(client: int) -> list[Turn]:
            await asyncio.sleep(client * STAGGER_S)
            return [await talks[client].turn(length) for length in lengths(self._tokens, client, turns)]

        before = self._taken()
        began = time.perf_counter()
        found = await asyncio.gather(*(talk(client) for client in range(len(talks))))
        seconds = time.perf_counter() - began
        taken = {name: after - before[name] for name, after in self._taken().items()}
        return Block(way, len(names), seconds, tuple(turn for of in found for turn in of), taken)

    def _taken(self) -> dict[str, float]:
        return {name: processor_s(pids) for name, pids in self._where.processes.items()}


def _show(found: Facts) -> None:
    shown = narrow("at a time", "", "median +ms", "99th +ms", "around the engine ms", "throughput", "pairs")
    for row in found.overheads:
        low, middle, high = row.pairs
        shown.add_row(
            str(row.concurrency), "", number(row.median_ms), number(row.p99_ms), _both(row.around_engine),
            number(row.throughput_ratio, 3), f"{low:g} {middle:g} {high:g}",
        )  # fmt: skip
    shown.caption = f"via beside direct; aims: median +{found.aim_median_ms:g} ms, {found.aim_throughput_ratio:g}"
    if found.engine_processors:
        shown.caption += f"\n{found.engine_processors} of {found.processors} processors are the engine's alone"
    console.print(shown)
    console.print(stage_table(found))
    names = list(found.rows[0].processor_ms)
    rows = Table("at a time", "way", "calls", "prompt", "sampled", "ms", "tokens/s", *names)
    for row in found.rows:
        rows.add_row(
            str(row.concurrency), row.way, str(row.calls), number(row.prompt_tokens, 0), number(row.sampled_tokens, 1),
            _both(row.call), number(row.tokens_per_s, 0), *(number(row.processor_ms[name], 1) for name in names),
        )  # fmt: skip
    rows.caption = "the last columns: processor milliseconds of a call"
    console.print(rows)


def stage_table(found: Facts) -> Table:
    """Of each stage its time at the smallest and at the largest concurrency; once where these are one."""
    levels = sorted({row.concurrency for row in found.rows})
    crowded = len(levels) > 1
    stages = narrow("stage", "", *(("alone ms", "crowded ms") if crowded else (f"ms, {levels[0]} at a time",)))
    for stage in found.stages:
        stages.add_row(stage.name, "", _both(stage.alone), *((_both(stage.crowded),) if crowded else ()))
    stages.caption = "median / 99th percentile"
    return stages


def _both(spread: Spread) -> str:
    return "-" if spread.median_ms is None else f"{spread.median_ms:g} / {spread.p99_ms:g}"
