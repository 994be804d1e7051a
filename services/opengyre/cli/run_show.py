"""`gyre run show RUN`: what a run has recorded, an update a row, and what its held-out tasks say of each version.

Awaits: the broker, within `reachable`'s bounds.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from opengyre.cli.client import JsonOption, StateDirOption, console, listing_console, number, show_json
from opengyre.cli.run_changes import Run
from opengyre.cli.run_facts import RunFacts, facts
from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.ids import BadIdentifierError, check_run
from opengyre.proto.run import RunSpec
from opengyre.proto.task import TaskSubmitted
from opengyre.shared.bus import Bucket, Bus, BusError, follow

FIGURES: Final = ("update", "score", "held-out", "gap", "trained", "unique", "path", "d")
PHASES: Final = ("rollout", "training", "wait", "commit", "weights", "seconds")
COLUMNS: Final = (*FIGURES, *PHASES)

Part = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and lines of a table."""


def show(
    run: Run,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    nats: Annotated[str | None, typer.Option("--nats", help="URL of the broker; default: the stack's.")] = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show each update of a run: its score and that of held-out tasks, how far trainer and engine are apart, tokens,
    and the seconds of its phases. Then what held-out tasks say of each version that they evaluated, by family.

    Example: gyre run show shell
    """
    found = asyncio.run(_load(run, nats, state_dir))
    if json:
        show_json(msgspec.to_builtins(found))
        return
    out = listing_console()
    for columns, lines, cut in (
        (COLUMNS, rows(found), len(FIGURES)),
        (held_out_columns(found), held_out_rows(found), None),
    ):
        if not lines:
            continue
        if markdown:
            print(*markdown_lines(columns, lines), "", sep="\n")
        else:
            for part in parts(columns, lines, out.width, cut):
                out.print(table(*part))
    for line in remarks(found):
        console.print(line)
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


def held_out_columns(found: RunFacts) -> tuple[str, ...]:
    """A column for each family of held-out tasks; none where they name no families."""
    return ("version", "score", "solved", *found.families)


def held_out_rows(found: RunFacts) -> list[list[str]]:
    """An evaluated version a row: the mean score, how many tasks are solved, and the mean score of each family."""
    return [
        [
            *(str(one.version), number(one.score, 3), str(one.solved)),
            *(number(score.score if (score := one.families.get(family)) else None) for family in found.families),
        ]
        for one in found.evaluations
    ]


def remarks(found: RunFacts) -> list[str]:
    """How many held-out tasks stand behind a row, in one line where it is the same for all."""
    plain = {one.tasks for one in found.evaluations if not one.unscored and not one.overtaken}
    if len(plain) == 1 and not any(one.unscored or one.overtaken for one in found.evaluations):
        return [f"held-out tasks of each version: {plain.pop()}"]
    return [
        f"version {one.version}: {one.tasks} held-out tasks"
        + (f", {one.unscored} without a score" if one.unscored else "")
        + (f", {one.overtaken} scored after the next version was published" if one.overtaken else "")
        for one in found.evaluations
    ]


def markdown_lines(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; names of families are whatever tasks call them."""
    head = [name.replace("|", "\\|") for name in columns]
    return [f"| {' | '.join(line)} |" for line in (head, ["--:"] * len(head), *lines)]


def parts(columns: Sequence[str], lines: Sequence[Sequence[str]], width: int, cut: int | None = None) -> list[Part]:
    """The table where `width` holds it, else tables that it does hold, each with the first column: cut before the
    column `cut`, and wherever that is not enough. One that is wider by itself stands alone beside the first.
    """
    sizes = [max(map(cell_len, cells)) for cells in zip(columns, *lines, strict=True)]
    if table_width(sizes) <= width:
        return [(columns, lines)]
    groups: list[list[int]] = [[0]]
    for column in range(1, len(columns)):
        full = table_width([sizes[at] for at in (*groups[-1], column)]) > width
        if len(groups[-1]) > 1 and (column == cut or full):
            groups.append([0])
        groups[-1].append(column)
    return [([columns[at] for at in group], [[line[at] for at in group] for line in lines]) for group in groups]


def table_width(sizes: Sequence[int]) -> int:
    """Of a `table` whose columns are of these sizes: a space after each, one between two, and one at both edges."""
    return sum(sizes) + 2 * len(sizes) + 1


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """The rows for a terminal. What is wider than that by itself goes on in the next line."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        result.add_column(escape(name), justify="right", overflow="fold")
    for line in lines:
        result.add_row(*line)
    return result


async def _load(run: str, nats: str | None, state_dir: Path | None) -> RunFacts:
    """Raises `StackError` in one sentence."""
    try:
        check_run(run)
        async with connected(nats, state_dir) as bus:
            events = await _events(bus, run)
            found = facts(run, events)
            known = () if found.updates or found.evaluations else await _runs(bus)
    except (BadIdentifierError, BusError) as error:
        raise StackError(str(error)) from error
    if not found.updates and not found.evaluations:
        if run not in known:
            raise StackError(f"there is no run {run}; there are: {', '.join(known) or 'none yet'}")
        raise StackError(f"run {run} has recorded no update and no evaluation yet; `gyre waits` says what it waits for")
    return found


async def _runs(bus: Bus) -> Sequence[str]:
    async with Bucket(bus, subjects.KV_RUNS, RunSpec).view() as runs:
        return sorted(runs.values)


async def _events(bus: Bus, run: str) -> list[tuple[float, Event]]:
    wanted = {
        subjects.TASKS: [subjects.task(run, "*", event) for event in ("submitted", "admitted", "scored")],
        subjects.UPDATES: [subjects.update(run, "contributed"), subjects.update(run, "committed")],
        subjects.WEIGHTS: [subjects.weights(run, "published"), subjects.weights(run, "applied")],
    }
    return [
        (stored.timestamp, event)
        for stream, filters in wanted.items()
        async for stored in follow(bus, stream, filters, to_end=True)
        # Specs of tasks are large, and there are many; only those of held-out ones are asked for.
        if (event := stored.readable()) is not None and not _trains(event)
    ]


def _trains(event: Event) -> bool:
    return isinstance(event, TaskSubmitted) and event.spec.purpose == "train"
