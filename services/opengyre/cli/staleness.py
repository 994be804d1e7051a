"""`gyre staleness RUN`: the ledger, and staleness predicted and measured."""

from collections.abc import Mapping
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

BAR = 30


def register(app: typer.Typer) -> None:
    app.command("staleness")(staleness)


def staleness(
    run: Annotated[str | None, typer.Argument(help="Default: the active run, or the last one.")] = None,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show how stale the trained groups, executions and tokens were, beside what phi and mu predict; what was
    discarded; and whether the books balance.

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
        f"(max {_whole(report['maximum'])}, last {report['window']} groups {number(report['window_mean'])})"
    )
    console.print(measured(report))
    _bars("groups", report["distribution"])
    if report["by_execution_mean"] != report["mean"]:
        _bars("executions", report["by_execution"])
    if report["discards"]:
        console.print(discards(report))
    console.print(books(report))


def measured(report: dict[str, Any]) -> Table:
    """Mean, worst and recent staleness, in updates, by what is counted."""
    table = Table("d of", "mean", "max", f"last {report['window']} groups")
    table.add_row("groups", number(report["mean"]), _whole(report["maximum"]), number(report["window_mean"]))
    table.add_row(
        "executions",
        number(report["by_execution_mean"]),
        _whole(report["by_execution_maximum"]),
        number(report["by_execution_window_mean"]),
    )
    table.add_row("tokens", number(report["by_token_mean"]), "-", "-")
    return table


def discards(report: dict[str, Any]) -> Table:
    """What left training, and how long it was beside what was trained: discards are not random."""
    table = Table("discarded for", "executions", "mean tokens", "trained have")
    trained = number(report["trained_mean_tokens"], 1)
    for reason, one in sorted(report["discards"].items()):
        table.add_row(reason, str(one["executions"]), number(one["mean_tokens"], 1), trained)
    return table


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _bars(what: str, distribution: Mapping[str, int]) -> None:
    most = max(distribution.values(), default=1)
    for d in sorted(distribution, key=int):
        bar = "█" * max(1, round(BAR * distribution[d] / most))
        console.print(f"  d = {d:>3} {bar} {distribution[d]} {what}")


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
