"""`gyre bench trajectory`: trees of long executions, groups over a real broker, bounds on paths, and other aggregators.

The measurements are in modules of their own (`bench_trajectory_*`); this one runs them in turn and shows them.
"""

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from opengyre.cli import bench_trajectory_broker, bench_trajectory_cases
from opengyre.cli.bench_options import chosen, tell
from opengyre.cli.bench_trajectory_broker import BrokerRow
from opengyre.cli.bench_trajectory_cases import OTHERS, CaseRow
from opengyre.cli.bench_trajectory_tree import TreeRow, in_a_process
from opengyre.cli.client import JsonOption, console
from opengyre.cli.stack import StackError

PARTS = ("tree", "broker", "paths", "others")
FORMS = ((1, "arrays"), (2, "arrays"), (4, "arrays"), (1, "lists"), (1, "new"))
errors = Console(stderr=True, highlight=False)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; a part that was not asked for is empty."""

    tree: tuple[TreeRow, ...] = ()
    broker: BrokerRow | None = None
    paths: tuple[msgspec.Raw, ...] = ()
    others: tuple[CaseRow, ...] = ()


def register(bench: typer.Typer) -> None:
    bench.command("trajectory")(trajectory)


def trajectory(
    parts: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PARTS)}.")] = ",".join(PARTS),
    groups: Annotated[int, typer.Option(min=1, max=1000, help="Groups over the broker.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, max=64, help="Executions in a group.")] = 8,
    executions: Annotated[int, typer.Option(min=1, max=1000, help="That are trained under each bound.")] = 4,
    other: Annotated[
        list[str] | None,
        typer.Option(help=f"NAME=PYTHON: an aggregator and an interpreter that has it; names: {', '.join(OTHERS)}."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the trajectory processor: trees, a real broker, bounds on paths, other aggregators.

    Example: gyre bench trajectory --parts tree,broker
    """
    wanted = chosen("--parts", parts, PARTS)
    pythons = [_other(text) for text in other or []]
    facts = Facts()
    try:
        if "tree" in wanted:
            facts = msgspec.structs.replace(facts, tree=tuple(in_a_process(*form) for form in FORMS))
        if "broker" in wanted:
            measured = asyncio.run(bench_trajectory_broker.measure(groups, group_size))
            facts = msgspec.structs.replace(facts, broker=measured)
        if "paths" in wanted:
            facts = msgspec.structs.replace(facts, paths=_paths(executions))
        if "others" in wanted:
            facts = msgspec.structs.replace(facts, others=tuple(bench_trajectory_cases.measure(pythons)))
    except TimeoutError as error:
        raise StackError("the broker or the trajectory service did not finish in time") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        raise StackError(f"{error.cmd[0]} failed: {(said.strip().splitlines() or ['it said nothing'])[-1]}") from error
    tell(facts, json, _show)


def _other(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in OTHERS or not python:
        raise StackError(f"--other is {text!r}; allowed is NAME=PYTHON with a name of: {', '.join(OTHERS)}")
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise StackError(f"--other is {text!r} and {python} is no program; allowed is a Python interpreter's path")
    return name, Path(python)


def _paths(executions: int) -> tuple[msgspec.Raw, ...]:
    from opengyre.cli import bench_trajectory_paths  # imports torch

    return tuple(msgspec.Raw(msgspec.json.encode(row)) for row in bench_trajectory_paths.measure(executions))


def _show(facts: Facts) -> None:
    if facts.tree:
        shown = Table(
            "times",
            "calls as",
            "new tokens",
            "calls",
            "in prompts",
            "raw MB",
            "above MB",
            "s",
            "processor s",
            "tokens/s of a core",
        )
        for row in facts.tree:
            shown.add_row(
                f"{row.factor}", row.form, f"{row.new_tokens:,}", f"{row.calls}", f"{row.path_tokens:,}",
                f"{row.raw_mb:g}", f"{row.above_raw_mb:g}", f"{row.add_s + row.tree_s:.3f}", f"{row.processor_s:g}",
                f"{row.tokens_per_s:,}",
            )  # fmt: skip
        console.print(shown)
    if (broker := facts.broker) is not None:
        console.print(
            f"{broker.groups} groups of {broker.group_size}: {broker.new_tokens:,} new tokens, {broker.events} events, "
            f"{broker.megabytes:g} MB; appended in {broker.append_s:g} s, all scored after {broker.end_to_end_s:g} s: "
            f"{broker.tokens_per_s:,} tokens/s"
        )
        shown = Table("stage, of one group", "s", "processor s", "share", "tokens/s of a core", "aim")
        for stage in broker.stages:
            rates = ("" if rate is None else f"{rate:,}" for rate in (stage.tokens_per_s, stage.aim_tokens_per_s))
            shown.add_row(
                stage.name, f"{stage.seconds:g}", f"{stage.processor_s:g}", f"{stage.share:.0%}", *rates,
            )  # fmt: skip
        console.print(shown)
    if facts.paths:
        shown = Table("j_max", "paths", "trained", "of sampled", "row tokens", "s", "share")
        for raw in facts.paths:
            found = msgspec.json.decode(raw)
            shown.add_row(
                found["bound"], f"{found['paths']}", f"{found['trained_tokens']:,}",
                f"{found['trained_tokens'] / found['sampled_tokens']:.1%}", f"{found['row_tokens']:,}",
                f"{found['seconds']:g}", f"{found['share']:.1%}",
            )  # fmt: skip
        console.print(shown)
    if facts.others:
        shown = Table("history", "by", "rows", "row tokens", "trained", "wanted")
        for case in facts.others:
            shown.add_row(case.case, case.by, f"{case.rows}", f"{case.tokens:,}", f"{case.trained}", f"{case.wanted}")
        console.print(shown)
