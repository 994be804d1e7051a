"""`gyre hosts`, `drain`, `resume` and `cordon`: the cells and their roles."""

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
    show_listing,
)

Cell = Annotated[str, typer.Argument(help="Name of a cell; `gyre hosts` lists them.")]


def register(app: typer.Typer) -> None:
    app.command("hosts")(hosts)
    app.command("drain")(drain)
    app.command("resume")(resume)
    app.command("cordon")(cordon)


def hosts(
    gateway: GatewayOption = None, api_key: KeyOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Show hosts, their cells and roles.

    Example: gyre hosts
    """
    report = connect(gateway, api_key, state_dir).get("/v1/hosts")
    if json:
        show_json(report)
        return
    show_listing(table(report))
    if report["cells_missing"]:
        console.print(f"cells: {report['cells_missing']}")


def table(report: dict[str, Any]) -> Table:
    """Hosts as a table, with what the allocator says of their cells; lost cells follow."""
    cells = {cell["cell"]: cell for cell in report["cells"]}
    rows = Table("host", "cell", "state", "told", "wish", "version", "calls", "tok/s", "for")
    for host in report["hosts"]:
        cell = cells.get(host["cell"], {})
        rows.add_row(
            host["host"],
            host["cell"],
            "refused" if cell.get("refused") else host["state"],
            cell.get("role") or "-",
            cell.get("wish") or "-",
            "-" if host["version"] < 0 else str(host["version"]),
            f"{host['running']}/{host['capacity']:g}",
            number(host["tokens_per_s"], 0),
            f"{number(host['since_s'], 1)} s",
        )
    present = {host["host"] for host in report["hosts"]}
    for cell in cells.values():
        for name in cell["hosts"]:
            if name not in present:
                rows.add_row(name, cell["cell"], "lost", cell["role"] or "-", cell["wish"] or "-", *["-"] * 4)
    return rows


def drain(
    cell: Cell,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Take a cell out of the rollout: calls end or move, then it trains.

    Example: gyre drain host0
    """
    _wish("drain", cell, gateway, api_key, state_dir, json)


def resume(
    cell: Cell,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Give a cell back to the policy after a drain or a cordon.

    Example: gyre resume host0
    """
    _wish("resume", cell, gateway, api_key, state_dir, json)


def cordon(
    cell: Cell,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Keep a cell out of rollout and training.

    Example: gyre cordon host0
    """
    _wish("cordon", cell, gateway, api_key, state_dir, json)


def _wish(
    wish: str, cell: str, gateway: str | None, api_key: str | None, state_dir: StateDirOption, json: bool
) -> None:
    reply = connect(gateway, api_key, state_dir).post(f"/v1/cells/{segment('cell', cell)}/{wish}")
    if json:
        show_json(reply)
    else:
        console.print(f"cell {reply['cell']}: [bold]{reply['wish']}[/] is asked for; its state is {reply['state']}")
