"""`gyre simulate`: the allocator's policy on a virtual clock. What is computed is in `opengyre.sim`; here it is read
from a recipe or a recorded run, and shown."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from opengyre.cli import recorded_run
from opengyre.cli.client import JsonOption, StateDirOption, console, errors, show_json
from opengyre.cli.sim_recipe import read_sim_recipe
from opengyre.cli.sim_views import frontier_table, moments, narrow, outcome_facts, page_text, rows_table
from opengyre.cli.stack import StackError
from opengyre.elastic.explain import unfit
from opengyre.sim.frontier import frontier
from opengyre.sim.gyre import Outcome, Setting, StuckError, simulate
from opengyre.sim.scale import SCALES, measure
from opengyre.sim.table1 import PAPER_ROWS, ROWS, UPDATES, table
from opengyre.sim.workload import PAPER, Workload

WORDS = ("table1", "frontier", "scale", "page")
WHATS = "table1, frontier, scale, page, or a recipe (a TOML file)"
NatsOption = Annotated[str | None, typer.Option("--nats", help="NATS URL; default: the stack's.")]


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate_command)


def simulate_command(
    what: Annotated[str, typer.Argument(help=f"One of: {WHATS}.")],
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs that are averaged.")] = 8,
    switch_hours: Annotated[
        float | None, typer.Option(help="What a cell's switch costs, instead of the workload's 0.08 h.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, max=100_000, help="Of a recipe; default 12.")] = None,
    from_run: Annotated[
        str | None, typer.Option("--from", help="With a recipe: the episodes of this recorded run.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="With a recipe: write the first run's timeline (JSON).")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the page.")] = Path("docs"),
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate the paper's Table 1, the frontier of hours and staleness, the scale, or a recipe's run.

    Example: gyre simulate table1 --json
    """
    workload = _workload(switch_hours)
    if what in WORDS:
        _only_of_recipes(what, {"--updates": updates, "--from": from_run, "--timeline": timeline})
    match what:
        case "table1":
            rows = table([*PAPER_ROWS, "ours"], workload=workload, seeds=seeds, progress=_say)
            show_json(rows) if json else console.print(rows_table(rows))
        case "frontier":
            points = frontier(workload=workload, seeds=seeds, progress=_say)
            show_json(points) if json else console.print(frontier_table(points))
        case "scale":
            _scale(json)
        case "page":
            _page(workload, seeds, out, json)
        case _:
            _recipe(Path(what), seeds, updates, switch_hours, from_run, timeline, nats, state_dir, json)


def _only_of_recipes(what: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise StackError(f"{name} is for a recipe; {what} does not take it")


def _say(step: str) -> None:
    if errors.is_terminal:
        errors.print(f"simulating {step}", markup=False, highlight=False)


def _workload(switch_hours: float | None) -> Workload:
    if switch_hours is None:
        return PAPER
    try:
        return replace(PAPER, switch_h=switch_hours)
    except ValueError as error:
        raise StackError(f"--switch-hours: {error}") from error


def _scale(json: bool) -> None:
    facts = [measure(nodes) for nodes in SCALES if _say(f"{nodes} nodes") is None]
    if json:
        show_json(facts)
        return
    shown = narrow("nodes", "live", "events", "seconds", "us / event", "decisions", "p50 ms", "p99 ms", "max ms")
    for fact in facts:
        shown.add_row(
            str(fact.nodes), str(fact.live_most), str(fact.events), f"{fact.seconds:g}",
            f"{fact.microseconds_per_event:g}", str(fact.decisions), f"{fact.decision_ms_p50:.2f}",
            f"{fact.decision_ms_p99:.2f}", f"{fact.decision_ms_max:.2f}",
        )  # fmt: skip
    console.print(shown)


def _page(workload: Workload, seeds: int, out: Path, json: bool) -> None:
    from opengyre.sim.plot import svg

    rows = table([*PAPER_ROWS, "ours"], workload=workload, seeds=seeds, progress=_say)
    free = table(["E0", "ours"], workload=replace(workload, switch_h=0.0), seeds=seeds, progress=_say)
    points = frontier(workload=workload, seeds=seeds, progress=_say)
    shown = ("A0", "C0", "E0", "ours")
    columns = [(f"{name}: {ROWS[name].what}", workload, simulate(workload, ROWS[name].setting, 0)) for name in shown]
    try:
        picture = svg(columns)
    except ModuleNotFoundError as error:
        raise StackError("matplotlib is not there: pip install 'opengyre[plots]'") from error
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table1.svg").write_text(picture, encoding="utf-8")
        (out / "table1.md").write_text(page_text(rows, free, points, shown, workload), encoding="utf-8")
    except OSError as error:
        raise StackError(f"--out: {out} cannot be written: {error.strerror}") from error
    written = [str(out / "table1.md"), str(out / "table1.svg")]
    show_json(written) if json else console.print(f"wrote {' and '.join(written)}", soft_wrap=True)


def _recipe(
    path: Path, seeds: int, updates: int | None, switch_hours: float | None, run: str | None, timeline: Path | None,
    nats: str | None, state_dir: Path | None, json: bool,
) -> None:  # fmt: skip
    recipe = read_sim_recipe(path, WHATS)
    workload, notes = recipe.workload, ()
    if run is not None:
        _, found = asyncio.run(recorded_run.load(run, nats, state_dir))
        workload, notes = found.workload, found.notes
    try:
        if switch_hours is not None:
            workload = replace(workload, switch_h=switch_hours)
        if (lack := unfit(recipe.elastic, workload.cells)) is not None:
            raise StackError(f"{path}: {lack}")
        setting = Setting(recipe.dispatch, recipe.elastic, updates or recipe.updates or UPDATES)
        outcomes: list[Outcome] = []
        for seed in range(seeds):
            _say(f"seed {seed}")
            outcomes.append(simulate(workload, setting, seed))
    except (ValueError, StuckError) as error:
        raise StackError(f"{path}: {error}") from error
    if timeline is not None:
        try:
            timeline.write_bytes(msgspec.json.encode(moments(outcomes[0])))
        except OSError as error:
            raise StackError(f"--timeline: {timeline} cannot be written: {error.strerror}") from error
    facts = outcome_facts(setting, workload, outcomes, notes)
    if json:
        show_json(facts | {"timeline": moments(outcomes[0])})
        return
    shown = Table("", "")
    for key, value in facts.items():
        shown.add_row(key.replace("_", " "), "; ".join(value) if isinstance(value, tuple) else str(value))
    console.print(shown)
