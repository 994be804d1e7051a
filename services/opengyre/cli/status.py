"""`gyre status`: what is waited for, what is missing, the books, the dead letters."""

from typing import Any

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
    number,
    show_json,
)
from opengyre.cli.staleness import books


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    gateway: GatewayOption = None, api_key: KeyOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Show what is missing or waited for, the run, the books, the dead letters; exit status 1 if not all is ready.

    Example: gyre status
    """
    report = connect(gateway, api_key, state_dir).get("/v1/status")
    if json:
        show_json(report)
    else:
        _print(report)
    if not report["ready"]:
        raise typer.Exit(1)


def _print(report: dict[str, Any]) -> None:
    if report["ready"]:
        console.print("every service is there and ready")
    for name in report["missing"]:
        console.print(f"[bold red]{name}[/] is missing: no replica of it runs")
    for service in report["services"]:
        if not service["ready"]:
            why = escape(service.get("missing") or "it does not say why")
            console.print(
                f"[yellow]{service['service']}[/] (process {service['pid']}) is not ready: {why}", soft_wrap=True
            )
    run = report["run"]
    if run is None:
        console.print("there is no run yet; `gyre run RECIPE.toml` starts one")
    else:
        spec, progress = run["spec"], run["progress"]
        of = f" of {spec['updates']}" if spec["updates"] is not None else ""
        console.print(
            f"run [bold]{spec['run']}[/] is {spec['state']}: update {progress['update']}{of}, "
            f"score {number(progress['score'])}, published version "
            f"{progress['published_version'] if progress['published_version'] is not None else '-'}, "
            f"{report['pending_tasks']} tasks not yet admitted",
            soft_wrap=True,
        )
    if report["staleness"] is not None:
        console.print(books(report["staleness"]))
    elif run is not None:
        console.print(f"the books are not here: {report['staleness_missing']}")
    waits = report["waits"]
    if waits:
        table = Table("service", "waits for", "how many", "for", "bound")
        for wait in waits[:20]:
            bound = "-" if wait["bound_s"] is None else f"{wait['bound_s']:g} s"
            table.add_row(
                wait["service"], escape(wait["what"]), str(wait["count"]), f"{number(wait['since_s'], 1)} s", bound
            )
        console.print(table)
    letters = report["dead_letters"]
    console.print(f"dead letters: {letters['count']}{'; `gyre stream dlq ls` shows them' if letters['count'] else ''}")
