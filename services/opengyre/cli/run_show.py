"""`gyre run show RUN`: what a run has recorded, an update a row. Awaits: the broker, within `reachable`'s bounds."""

import asyncio
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich import box
from rich.table import Table

from opengyre.cli.client import JsonOption, StateDirOption, console, number, show_json
from opengyre.cli.run_changes import Run
from opengyre.cli.run_facts import RunFacts, facts
from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.shared.bus import Bus, BusError, read

COLUMNS: Final = (
    *("update", "score", "held-out", "gap", "trained", "unique", "path", "d"),
    *("rollout", "training", "wait", "commit", "weights", "seconds"),
)


def show(
    run: Run,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    nats: Annotated[str | None, typer.Option("--nats", help="URL of the broker; default: the stack's.")] = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show each update of a run: its score and that of held-out tasks, how far trainer and engine are apart, tokens,
    and the seconds of its phases.

    Example: gyre run show shell
    """
    found = asyncio.run(_load(run, nats, state_dir))
    if json:
        show_json(msgspec.to_builtins(found))
        return
    if markdown:
        for line in (COLUMNS, ["--:"] * len(COLUMNS), *rows(found)):
            print(f"| {' | '.join(line)} |")
        print()
    else:
        console.print(table(found))
    for one in found.evaluations:
        beside = f", {one.unscored} without a score" if one.unscored else ""
        late = f", {one.overtaken} after the next version was published" if one.overtaken else ""
        console.print(
            f"version {one.version}: held-out score {number(one.score, 3)} of {one.tasks} tasks{beside}{late}"
        )
    for row in found.updates:
        for what, sentence in (("skipped", row.skipped), ("alarm", row.alarm)):
            if sentence is not None:
                console.print(f"update {row.update}: {what}: {sentence}", markup=False)


def rows(found: RunFacts) -> list[list[str]]:
    """An update a row; times are seconds, the gap is in nats, tokens are counted."""
    return [
        [
            *(str(row.update), number(row.score, 3), number(row.held_out, 3)),
            "-" if row.gap is None else f"{row.gap:.1e}",
            *(str(row.tokens), str(row.unique_tokens), str(row.path_tokens), number(row.staleness)),
            *(number(row.phases.rollout, 1), number(row.phases.training, 1), number(row.phases.wait, 1)),
            *(number(row.phases.commit, 1), number(row.phases.weights, 1), number(row.seconds, 1)),
        ]
        for row in found.updates
    ]


def table(found: RunFacts) -> Table:
    """The rows for a terminal."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows(found):
        result.add_row(*row)
    return result


async def _load(run: str, nats: str | None, state_dir: Path | None) -> RunFacts:
    """Raises `StackError` in one sentence."""
    try:
        async with connected(nats, state_dir) as bus:
            events = await _events(bus, run)
    except BusError as error:
        raise StackError(str(error)) from error
    found = facts(run, events)
    if not found.updates and not found.evaluations:
        raise StackError(f"run {run!r} has recorded no update and no evaluation yet; `gyre run ls` lists runs")
    return found


async def _events(bus: Bus, run: str) -> list[tuple[float, Event]]:
    wanted = {
        subjects.TASKS: [subjects.task(run, "*", "admitted"), subjects.task(run, "*", "scored")],
        subjects.UPDATES: [subjects.update(run, "contributed"), subjects.update(run, "committed")],
        subjects.WEIGHTS: [subjects.weights(run, "published"), subjects.weights(run, "applied")],
    }
    return [
        (stored.timestamp, event)
        for stream, filters in wanted.items()
        for stored in await read(bus, stream, filters)
        if (event := stored.readable()) is not None
    ]
