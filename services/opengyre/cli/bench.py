"""`gyre bench NAME`: measurements side by side, in one run."""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from opengyre.cli import bench_engine, bench_membership, bench_router, bench_sandbox, bench_trainer, bench_trajectory
from opengyre.cli.bench_facts import RunFacts, Spread
from opengyre.cli.bench_options import chosen, until_signal
from opengyre.cli.bench_table1 import Bench, BenchError, measure
from opengyre.cli.client import JsonOption, console, number, show_json
from opengyre.cli.sim_views import narrow
from opengyre.cli.stack import StackError
from opengyre.shared.settings import Settings, load
from opengyre.sim.table1 import ROWS, table
from opengyre.sim.workload import PAPER

errors = Console(stderr=True, highlight=False)
app = typer.Typer(help="Measure OpenGyre, side by side in one run.", no_args_is_help=True)


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` and `simulated_ratio`: hours over those of E0, as measured and as simulated (means over eight seeds);
    `same_episodes`: measured hours over the simulator's on the very episodes of this row."""

    facts: RunFacts
    ratio: float | None
    simulated_ratio: float
    deviation: float | None
    """Of the measured ratio from the simulated one."""
    same_episodes: float


def register(parent: typer.Typer) -> None:
    bench_trajectory.register(app)
    bench_membership.register(app)
    bench_trainer.register(app)
    bench_sandbox.register(app)
    bench_router.register(app)
    bench_engine.register(app)
    for command in app.registered_commands:
        assert command.callback is not None, "each is a function"
        command.callback = until_signal()(command.callback)
    parent.add_typer(app, name="bench")


@app.command("table1")
def table1(
    rows: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(ROWS)}.")] = "A0,C0,E0,ours",
    time_scale: Annotated[float, typer.Option(min=1, max=100_000, help="Emulated seconds in a real one.")] = 360,
    updates: Annotated[int, typer.Option(min=1, max=1000, help="Updates that are measured.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of every row's run, so that all meet the same episodes.")] = 0,
    processes: Annotated[int, typer.Option(min=1, max=32, help="Processes that the emulated hosts share.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Keep the rows' state and logs below this directory.")] = None,
    json: JsonOption = False,
) -> None:
    """Run rows of the paper's Table 1 on the real services over a real NATS, with 32 emulated nodes.

    Example: gyre bench table1 --rows E0,ours --time-scale 360
    """
    wanted = chosen("--rows", rows, ROWS)
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StackError(f"--keep: {keep} cannot be made: {error.strerror}") from error
    bench = Bench(time_scale, updates, seed, processes, PAPER, keep)
    try:
        facts = asyncio.run(_measure(wanted, bench, load()))
    except BenchError as error:
        raise StackError(str(error)) from error
    found = _compared(facts)
    if json:
        show_json(found)
    else:
        for shown in (_hours(found), _overheads(found)):
            console.print(shown)


async def _measure(rows: list[str], bench: Bench, settings: Settings) -> list[RunFacts]:
    return [
        await measure(row, bench, settings, lambda line: errors.print(line, markup=False, soft_wrap=True))
        for row in rows
    ]


def _compared(facts: list[RunFacts]) -> list[BenchRow]:
    simulated = {row.id: row.ratio for row in table([fact.id for fact in facts])}
    e0 = next((fact.hours for fact in facts if fact.id == "E0"), None)
    found = []
    for fact in facts:
        ratio = fact.hours / e0 if e0 else None
        found.append(
            BenchRow(
                facts=fact,
                ratio=None if ratio is None else round(ratio, 4),
                simulated_ratio=simulated[fact.id],
                deviation=None if ratio is None else round(ratio / simulated[fact.id] - 1, 4),
                same_episodes=round(fact.hours / fact.simulated_hours, 4),
            )
        )
    return found


def _hours(rows: list[BenchRow]) -> Table:
    shown = narrow("id", "", "hours", "/ E0", "sim.", "off by", "same ep.", "d", "max", "of floor", "interrupted")
    for row in rows:
        fact = row.facts
        shown.add_row(
            fact.id, "", number(fact.hours), number(row.ratio, 3), number(row.simulated_ratio, 3),
            "-" if row.deviation is None else f"{row.deviation:+.1%}", f"{row.same_episodes - 1:+.1%}",
            number(fact.staleness_mean), str(fact.staleness_max), f"{fact.efficiency:.1%}",
            str(fact.episodes_interrupted),
        )  # fmt: skip
    return shown


def _overheads(rows: list[BenchRow]) -> Table:
    shown = Table("id", "switches", "decide", "written", "told", "obeyed", "move", "moved", "parked", "of calls")
    for row in rows:
        fact = row.facts
        shown.add_row(
            fact.id, str(fact.switches),
            *map(_spread, (fact.decision, fact.command_written, fact.command_told, fact.command_obeyed, fact.move)),
            str(fact.moved_calls), str(fact.parked_calls), str(fact.calls),
        )  # fmt: skip
    shown.caption = "median / 99th percentile, milliseconds"
    return shown


def _spread(spread: Spread) -> str:
    return "-" if spread.median_ms is None else f"{spread.median_ms:g} / {spread.p99_ms:g}"
