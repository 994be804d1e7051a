"""`gyre staleness RUN`: the ledger, and staleness predicted and measured."""

from typing import Annotated, Any

import typer
from rich.table import Table

from opengyre.cli.client import (
    GatewayOption,
    JsonOption,
    KeyOption,
    StateDirOption,
    connect,
    console,
    number,
    segment,
    show_json,
)


def register(app: typer.Typer) -> None:
    app.command("staleness")(staleness)


def staleness(
    run: Annotated[str | None, typer.Argument(help="Default: the active run, or the last one.")] = None,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show how stale the trained groups were, beside what phi and mu predict, and whether the books balance.

    Example: gyre staleness demo
    """
    named = segment("run", run) if run is not None else None
    report = connect(gateway, api_key, state_dir).get("/v1/staleness", run=named)
    if json:
        show_json(report)
        return
    console.print(
        f"run [bold]{report['run']}[/]: phi {report['phi']:g}, mu {report['mu']}; "
        f"published version {report['published_version']}, trainer's version {report['trainer_version']}"
    )
    console.print(
        f"E\\[d] predicted {number(report['predicted'])}, measured {number(report['mean'])} "
        f"(max {report['maximum'] if report['maximum'] is not None else '-'}, "
        f"last {report['window']} groups {number(report['window_mean'])})"
    )
    distribution = report["distribution"]
    most = max(distribution.values(), default=1)
    for d in sorted(distribution, key=int):
        console.print(f"  d = {d:>3} {'█' * max(1, round(30 * distribution[d] / most))} {distribution[d]}")
    console.print(books(report))


def books(report: dict[str, Any]) -> Table:
    """The identity dispatched = trained + dropped + ready + live, for groups and executions."""
    table = Table("", "dispatched", "trained", "dropped", "ready", "live", "balances")
    for what in ("groups", "executions"):
        book = report[what]
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(book["dropped"].items())) or "0"
        table.add_row(
            what,
            *(str(book["dispatched"]), str(book["trained"]), dropped, str(book["ready"]), str(book["live"])),
            "yes" if book["balances"] else "[bold red]NO[/]",
        )
    return table
