"""`gyre trajectory`: logs of any agent as trees, and our own executions, opened again and exported."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from opengyre.cli.client import JsonOption, console, errors, show_json
from opengyre.cli.stack import StackError
from opengyre.cli.trajectory_files import forest_for, open_log
from opengyre.formats import READERS, FormatError, TreeReport, read_tree

FILES = "A log: " + ", ".join(READERS) + "."


def register(app: typer.Typer) -> None:
    trajectory = typer.Typer(name="trajectory", help="Trees of executions and of foreign logs.", no_args_is_help=True)
    trajectory.command("tree")(tree)
    app.add_typer(trajectory)


def tree(
    file: Annotated[Path, typer.Argument(help=FILES)],
    format_name: Annotated[str | None, typer.Option("--format", help="Default: told from the content.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with a tokenizer.json: a tree of tokens also where the log has messages only."),
    ] = None,
    calls: Annotated[bool, typer.Option("--calls", help="Also tell what became of each call.")] = False,
    json: JsonOption = False,
) -> None:
    """Rebuild the tree of the model calls in a log: what repeats, what forks, what cannot be trained.

    Example: gyre trajectory tree session.jsonl --json
    """
    if format_name is not None and format_name not in READERS:
        raise StackError(f"--format is {format_name!r}; allowed are {', '.join(READERS)}")
    source, forest = open_log(file), forest_for(tokenizer)
    try:
        report = read_tree(source, forest, format_name, per_call=calls)
    except FormatError as error:
        raise StackError(f"{file}: {error}") from error
    if json:
        show_json(report)
        return
    _show(report)
    for warning in report.warnings:
        errors.print(f"warning: {warning}", markup=False)


def _show(report: TreeReport) -> None:
    console.print(
        f"[bold]{escape(report.file)}[/]: {report.format}, {report.calls} calls of {report.executions} executions, "
        f"counted in {report.unit}"
    )
    table = Table("figure", "value", show_header=False)
    for name in ("events", "path_tokens", "unique_nodes", "dedup_ratio", "leaves"):
        table.add_row(name, str(getattr(report, name)))
    for name in ("leaf_kinds", "transitions", "diagnoses", "agents", "ignored", "facts"):
        found = getattr(report, name)
        if found:
            table.add_row(name, escape(", ".join(f"{key} {value}" for key, value in found.items())))
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.refused.reasons.items())
    table.add_row("refused", f"{report.refused.count}{f' ({escape(reasons)})' if reasons else ''}")
    console.print(table)
    if report.per_call:
        rows = Table("call", "agent", "transition", "of", "shares", "sampled", "length", "why")
        for row in report.per_call:
            why = ", ".join(part for part in (row.diagnosis, row.refused) if part)
            figures = (str(row.offset), str(row.events), str(row.length))
            rows.add_row(escape(row.call), escape(row.agent), row.transition, escape(row.related or "-"), *figures, why)
        console.print(rows)
