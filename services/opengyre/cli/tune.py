"""`gyre tune`: search (phi, mu, close_at) and the cells of each role for the best expected throughput."""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from opengyre.cli import recorded_run
from opengyre.cli.client import JsonOption, StateDirOption, console, errors, number, show_json
from opengyre.cli.sim_recipe import read_sim_recipe
from opengyre.cli.sim_views import narrow
from opengyre.cli.stack import StackError
from opengyre.sim.gyre import Setting
from opengyre.sim.tune import Advice, Search, tune
from opengyre.sim.workload import PAPER

SHOWN = 12


def register(app: typer.Typer) -> None:
    app.command("tune")(tune_command)


def tune_command(
    max_staleness: Annotated[
        float, typer.Option(min=0, max=64, help="Bound of the mean staleness by execution, in updates.")
    ],
    from_run: Annotated[str | None, typer.Option("--from", help="Episodes and costs of this recorded run.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Or: the workload and present setting of a recipe.")] = None,
    updates: Annotated[int, typer.Option(min=2, max=1000, help="Simulated for each candidate.")] = 12,
    seeds: Annotated[int, typer.Option(min=1, max=100)] = 3,
    whole_groups: Annotated[bool, typer.Option(help="Do not try close_at below the group's size.")] = False,
    nats: Annotated[str | None, typer.Option("--nats", help="NATS URL; default: the stack's.")] = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Say which setting is expected to train the most, what it gains, and whether elastic cells help at all.

    Without --from and --recipe the workload is the paper's.

    Example: gyre tune --max-staleness 1.5 --from demo
    """
    if from_run is not None and recipe is not None:
        raise StackError("--from and --recipe name two workloads; give one of them")
    workload, present, notes = PAPER, None, ()
    if from_run is not None:
        spec, found = asyncio.run(recorded_run.load(from_run, nats, state_dir))
        workload, notes = found.workload, found.notes
        elastic = msgspec.structs.replace(spec.elastic, dwell_s=0.0, grain=1)
        present = Setting(spec.dispatch, elastic, updates)
    elif recipe is not None:
        read = read_sim_recipe(recipe, "a recipe (a TOML file)")
        workload, present = read.workload, Setting(read.dispatch, read.elastic, updates)
    search = Search(workload, max_staleness, updates, seeds, not whole_groups)
    with Progress(console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        try:
            advice = tune(search, present, lambda done, of: bar.update(task, completed=done, total=of))
        except ValueError as error:
            raise StackError(f"--max-staleness: {error}") from error
    if json:
        show_json(msgspec.to_builtins(advice) | {"notes": notes})
        return
    console.print(_table(advice, workload.group_size))
    for sentence in (*advice.says, *notes):
        console.print(f"- {escape(sentence)}", soft_wrap=True)


def _table(advice: Advice, group_size: int) -> Table:
    shown = narrow("", "setting", "exec. / h", "d", "max", "of floor", "switches / update")
    listed = [("present", advice.present), *((str(n), c) for n, c in enumerate(advice.candidates[:SHOWN], 1))]
    if advice.best_static is not None and advice.best_static not in advice.candidates[:SHOWN]:
        listed.append(("best fixed split", advice.best_static))
    for name, candidate in listed:
        if candidate is not None:
            shown.add_row(
                name, candidate.describe(group_size), number(candidate.executions_per_hour, 1),
                number(candidate.staleness_mean), str(candidate.staleness_max), f"{candidate.efficiency:.0%}",
                number(candidate.switches_per_update, 1),
            )  # fmt: skip
    return shown
