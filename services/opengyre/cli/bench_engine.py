"""`gyre bench engine`: vLLM as a host runs it: start, calls with and without a cached prefix, speed, new weights, end.

Each round is a life of an engine of its own, so that all of it is measured side by side.

Awaits: those of `opengyre.cli.bench_engine_life`, all bounded.
"""

import asyncio
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from opengyre.cli.bench_engine_facts import Facts, Range, facts
from opengyre.cli.bench_engine_life import FURTHER, Prompts, live
from opengyre.cli.bench_model import write_policy
from opengyre.cli.bench_options import tell
from opengyre.cli.client import JsonOption, console, errors, number
from opengyre.cli.stack import StackError
from opengyre.host.vllm import VllmEngine
from opengyre.host.vllm_arguments import VllmArgumentsError, checked_arguments
from opengyre.host.vllm_plan import facts_of
from opengyre.policy.describe import describe
from opengyre.shared.settings import HostSettings, load
from opengyre.shared.vllm import VllmMissingError, checked_interpreter
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.types import EngineError

SHORTEST = 256
"""Tokens of a prompt: a CPU caches blocks of 128, and of less than one nothing."""


def register(bench: typer.Typer) -> None:
    bench.command("engine")(engine)


def engine(
    model: Annotated[
        Path | None, typer.Option(help="Model directory; default: a small Llama with random weights.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Starts of the engine, each with all of it.")] = 3,
    prompt: Annotated[int, typer.Option(min=SHORTEST, help="Tokens of each call's prompt.")] = 1500,
    pairs: Annotated[int, typer.Option(min=1, max=100, help="Calls without and with a cache, in each round.")] = 3,
    calls: Annotated[int, typer.Option(min=1, help="In flight while tokens are counted and weights change.")] = 4,
    json: JsonOption = False,
) -> None:
    """Measure vLLM as a host runs it: start, a call with and without its prefix cached, speed, new weights, end.

    Settings of the host (`host.vllm_context`, `host.threads`, ...) are in force.

    Example: gyre bench engine --model runs/smollm2-135m --rounds 2
    """
    settings = load().host.model_copy(update={"engine": "vllm"})
    most = settings.vllm_context - FURTHER
    if most < SHORTEST:
        raise StackError(
            f"host.vllm_context is {settings.vllm_context}; allowed here are {SHORTEST + FURTHER} and more"
        )
    if prompt > most:
        raise StackError(
            f"--prompt is {prompt}; with host.vllm_context = {settings.vllm_context} allowed are {SHORTEST} to {most}"
        )
    if calls > settings.capacity:
        raise StackError(f"--calls is {calls}; with host.capacity = {settings.capacity:g} allowed are up to that")
    try:
        checked_arguments(checked_interpreter(settings.vllm_python), settings.vllm_arguments)
    except (VllmMissingError, VllmArgumentsError) as error:
        raise StackError(str(error)) from error
    if model is None and importlib.util.find_spec("torch") is None:
        raise StackError("a model is made with torch; name one with --model, or pip install 'opengyre[trainer]'")
    try:
        if model is not None:
            model = model.absolute()
            describe(model)
            facts_of(model)
        with tempfile.TemporaryDirectory(prefix="gyre-bench-engine-") as folder:
            found = asyncio.run(_measure(settings, model, Path(folder), rounds, prompt, pairs, calls))
    except ModelDirectoryError as error:
        raise StackError(f"--model: {error}" if model is not None else str(error)) from error
    except EngineError as error:
        raise StackError(str(error)) from error
    except TimeoutError as error:
        raise StackError("a call had no token within ten minutes") from error
    tell(found, json, _show)


async def _measure(
    settings: HostSettings, model: Path | None, folder: Path, rounds: int, prompt: int, pairs: int, calls: int
) -> Facts:
    directory = folder / "model" if model is None else model
    if model is None:
        await asyncio.to_thread(write_policy, directory, settings.vllm_context)
    prompts = Prompts((await asyncio.to_thread(facts_of, directory)).vocabulary, prompt)
    lives = []
    dtype = ""
    for turn in range(rounds):

        def say(what: str, turn: int = turn) -> None:
            errors.print(f"round {turn + 1} of {rounds}: {what}", markup=False, soft_wrap=True)

        say("starts")
        vllm = VllmEngine(settings)
        lives.append(await live(vllm, directory, prompts, pairs, calls, say))
        said = vllm.sampler()
        assert said is not None, "it was awake"
        dtype = said.dtype
    return facts(
        lives, model="random" if model is None else model.name, dtype=dtype,
        processors=len(os.sched_getaffinity(0)), threads=settings.threads, context=settings.vllm_context,
        stream_interval=settings.vllm_stream_interval, prompt=prompt, calls=calls,
    )  # fmt: skip


def _show(found: Facts) -> None:
    shown = Table("seconds", "lowest", "median", "highest")

    def add(what: str, one: Range, digits: int = 2) -> None:
        shown.add_row(what, *(number(value, digits) for value in (one.low, one.median, one.high)))

    add("start, until it is ready", found.start)
    add("a call's next token, nothing cached", found.cold)
    add("a call's next token, its prefix cached", found.warm)
    add("  of what it takes uncached", found.warm_of_cold, 3)
    add("tokens a second, all calls together", found.tokens_per_s, 0)
    add("another process waits for a processor, at most", found.late, 3)
    add("new weights: pause", found.pause, 3)
    add("new weights: load", found.load)
    add("new weights: resume", found.resume, 3)
    add("  the first call goes on after", found.first_token)
    add("  all calls go on after", found.every_token)
    add("  the first went without tokens for", found.gap)
    add("end", found.end)
    add("MiB held while it serves", found.serving_mib, 0)
    add("MiB held afterwards", found.after_mib, 0)
    shown.caption = (
        f"{found.model} in {found.dtype}, {found.processors} processors, {found.threads} threads, {found.rounds} "
        f"rounds; prompts of {found.prompt} tokens, {found.pairs} pairs of calls, {found.calls} in flight while tokens "
        f"are counted and weights change, whose tokens come {found.stream_interval} at a time"
    )
    console.print(shown)
