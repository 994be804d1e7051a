"""`gyre trajectory`: logs of any agent as trees, and our own executions, opened again and exported."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from opengyre.cli.client import (
    GatewayOption,
    JsonOption,
    KeyOption,
    StateDirOption,
    connect,
    console,
    errors,
    segment,
    show_json,
)
from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.cli.streams import NatsOption, run_bounded
from opengyre.cli.trajectory_export import WRITERS, export
from opengyre.cli.trajectory_files import blob_store, forest_for, open_log
from opengyre.cli.trajectory_show import plain, show
from opengyre.formats import READERS, FormatError, TreeReport, read_tree
from opengyre.shared.blobs import Blobs
from opengyre.shared.settings import CacheSettings

FILES = "A log: " + ", ".join(READERS) + "."


def register(app: typer.Typer) -> None:
    trajectory = typer.Typer(name="trajectory", help="Trees of executions and of foreign logs.", no_args_is_help=True)
    trajectory.command("tree")(tree)
    trajectory.command("show")(show_command)
    trajectory.command("export")(export_command)
    app.add_typer(trajectory)


def tree(
    file: Annotated[Path, typer.Argument(help=FILES)],
    format_name: Annotated[str | None, typer.Option("--format", help="Default: told from the content.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with a tokenizer.json: a tree of tokens also where the log has messages only."),
    ] = None,
    blobs: Annotated[
        Path | None,
        typer.Option(help="Blob store, for ids that were too large for their event; default: the stack's."),
    ] = None,
    calls: Annotated[bool, typer.Option("--calls", help="Also tell what became of each call.")] = False,
    json: JsonOption = False,
) -> None:
    """Rebuild the tree of the model calls in a log: what repeats, what forks, what cannot be trained.

    Example: gyre trajectory tree session.jsonl --json
    """
    if format_name is not None and format_name not in READERS:
        raise StackError(f"--format is {format_name!r}; allowed are {', '.join(READERS)}")
    source, forest = open_log(file, blobs or blob_store(None)), forest_for(tokenizer)
    try:
        report = read_tree(source, forest, format_name, per_call=calls)
    except FormatError as error:
        raise StackError(f"{file}: {error}") from error
    if json:
        show_json(report)
        return
    _show(report)
    for warning in report.warnings:
        errors.print(f"warning: {plain(warning)}")


def show_command(
    execution: Annotated[str, typer.Argument(help="An execution, like demo-g000003-e01.")],
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Open an execution again: its tree, what was chosen, masked and refused, and why.

    Example: gyre trajectory show demo-g000003-e01
    """
    name = segment("execution", execution)
    report = connect(gateway, api_key, state_dir).get(f"/v1/executions/{name}/tree")
    if json:
        show_json(report)
    else:
        show(console, report)


def export_command(
    out: Annotated[Path, typer.Option(help="File to write: JSON, JSON lines with --run, or Parquet.")],
    execution: Annotated[str | None, typer.Argument(help="An execution; or all of --run.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="All executions of a run.")] = None,
    format_name: Annotated[Literal["atif", "parquet"], typer.Option("--format")] = "atif",
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Write executions as ATIF documents, or as a Parquet table with a row for each call.

    Example: gyre trajectory export --run demo --format parquet --out demo.parquet
    """
    if out.is_dir():
        raise StackError(f"--out is {str(out)!r}; allowed is the name of a file to write")

    async def work() -> tuple[int, int]:
        async with connected(nats, state_dir) as bus, Blobs(blob_store(state_dir), CacheSettings()) as blobs:
            return await export(bus, blobs, execution, run, out, WRITERS[format_name])

    executions, calls = run_bounded(work())
    if json:
        show_json({"out": str(out), "format": format_name, "executions": executions, "calls": calls})
    else:
        console.print(f"{calls} calls of {executions} executions are in {escape(str(out))}")


def _show(report: TreeReport) -> None:
    console.print(
        f"[bold]{plain(report.file)}[/]: {report.format}, {report.calls} calls of {report.executions} executions, "
        f"counted in {report.unit}"
    )
    table = Table("figure", "value", show_header=False)
    for name in ("events", "path_tokens", "unique_nodes", "dedup_ratio", "leaves"):
        table.add_row(name, str(getattr(report, name)))
    for name in ("leaf_kinds", "transitions", "diagnoses", "agents", "roles", "ignored", "facts"):
        found = getattr(report, name)
        if found:
            table.add_row(name, plain(", ".join(f"{key} {value}" for key, value in found.items())))
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.refused.reasons.items())
    table.add_row("refused", f"{report.refused.count}{f' ({plain(reasons)})' if reasons else ''}")
    console.print(table)
    if report.per_call:
        rows = Table("call", "agent", "role", "transition", "of", "shares", "sampled", "length", "why")
        for row in report.per_call:
            why = ", ".join(part for part in (row.diagnosis, row.refused) if part)
            figures = (str(row.offset), str(row.events), str(row.length))
            rows.add_row(
                plain(row.call), plain(row.agent), row.role, row.transition, plain(row.related or "-"), *figures, why
            )
        console.print(rows)
