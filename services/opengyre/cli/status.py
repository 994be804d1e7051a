"""`gyre status` and `gyre waits`: what is waited for, what is missing, the books, the dead letters."""

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

SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command("status")(status)
    app.command("waits")(waits)


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
    _missing(report)
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
            f"{report['pending_tasks']} tasks not yet admitted{_parity(progress, report['gauges'])}",
            soft_wrap=True,
        )
        if progress["alarm"] is not None:
            console.print(
                f"[bold red]alarm:[/] update {progress['update']}: {escape(progress['alarm'])}", soft_wrap=True
            )
    if report["staleness"] is not None:
        console.print(books(report["staleness"]))
    elif run is not None:
        console.print(f"the books are not here: {report['staleness_missing']}")
    _held(report)
    if report["waits"]:
        console.print(waits_table(report["waits"], SHOWN))
    letters = report["dead_letters"]
    console.print(f"dead letters: {letters['count']}{'; `gyre stream dlq ls` shows them' if letters['count'] else ''}")


def _parity(progress: dict[str, Any], gauges: dict[str, float]) -> str:
    """How far trainer and engine were apart when it was measured last."""
    gap = progress["logprob_gap"] if progress["logprob_gap"] is not None else gauges.get("trainer.logprob_gap")
    return "" if gap is None else f"; trainer and engine are {gap:.1e} nats apart"


def _missing(report: dict[str, Any]) -> None:
    for name in report["missing"]:
        console.print(f"[bold red]{name}[/] is missing: no replica of it runs")
    for service in report["services"]:
        if not service["ready"]:
            why = escape(service.get("missing") or "it does not say why")
            console.print(
                f"[yellow]{service['service']}[/] (process {service['pid']}) is not ready: {why}", soft_wrap=True
            )


def _held(report: dict[str, Any]) -> None:
    for sentence in report["held"]:
        console.print(f"[yellow]held:[/] {escape(sentence)}", soft_wrap=True)


def waits_table(waits: list[dict[str, Any]], most: int | None = None) -> Table:
    """What each service waits for, the longest first; `most` rows at most."""
    table = Table("service", "waits for", "how many", "for", "bound")
    for wait in waits[:most]:
        bound = "-" if wait["bound_s"] is None else f"{wait['bound_s']:g} s"
        table.add_row(
            wait["service"], escape(wait["what"]), str(wait["count"]), f"{number(wait['since_s'], 1)} s", bound
        )
    return table


def waits(
    gateway: GatewayOption = None, api_key: KeyOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Show what everything is waiting for: what holds the run back, then the waits of all services, the longest first.

    Example: gyre waits
    """
    report = connect(gateway, api_key, state_dir).get("/v1/status")
    if json:
        show_json({name: report[name] for name in ("held", "waits", "missing", "not_ready", "staleness_missing")})
        return
    _missing(report)
    _held(report)
    if report["run"] is not None and report["staleness"] is None:
        console.print(f"what holds the run back is not known: {report['staleness_missing']}", soft_wrap=True)
    if not report["waits"]:
        console.print("no service waits for anything")
        return
    console.print(waits_table(report["waits"]))
