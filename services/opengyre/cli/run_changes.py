"""`gyre run set RUN FIELD=VALUE...`, `gyre run stop RUN` and `gyre run ls`: runs that there are."""

import contextlib
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from opengyre.cli.client import (
    Api,
    ClientError,
    GatewayOption,
    JsonOption,
    KeyOption,
    StateDirOption,
    connect,
    console,
    segment,
    show_json,
)

PARTS = ("dispatch", "elastic")
ALLOWED = "allowed is FIELD=VALUE like dispatch.phi=1, elastic.policy=static or dispatch.d_max=null"

Run = Annotated[str, typer.Argument(help="A run; `gyre run ls` lists them.")]


def set_fields(
    run: Run,
    fields: Annotated[list[str], typer.Argument(help="FIELD=VALUE: dispatch.phi=1 dispatch.mu=1 elastic.gate=0 ...")],
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Change how a live run dispatches groups and which cells it uses. All fields change, or none.

    Example: gyre run set demo dispatch.phi=1 dispatch.mu=1
    """
    change = parsed(fields)
    report = _patch(connect(gateway, api_key, state_dir), run, change)
    if json:
        show_json(report)
        return
    spec = report["spec"]
    said = [
        f"{part}.{name} is {_said(spec[part][name])}" for part in PARTS if part in change for name in change[part]
    ] or [f"it is {spec['state']}"]
    if "dispatch" in change:
        phi, mu = spec["dispatch"]["phi"], spec["dispatch"]["mu"]
        said.append(f"E\\[d] becomes {phi + (mu - 1) / 2:g}")
    console.print(f"run [bold]{run}[/]: {', '.join(said)}", soft_wrap=True)


def stop(
    run: Run,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Stop a run before its last update: no further group is admitted, and executions under way go on to their end. A
    run that was stopped stays so.

    Example: gyre run stop demo
    """
    api = connect(gateway, api_key, state_dir)
    report = _patch(api, run, {"state": "stopped"})
    if json:
        show_json(report)
        return
    console.print(f"run [bold]{run}[/] is {report['spec']['state']} after update {report['progress']['update']}")
    with contextlib.suppress(ClientError):  # it is stopped, whoever cannot say what goes on
        if (live := _live(api.get("/v1/status")["staleness"], run)) > 0:
            console.print(f"{live} {'execution goes on to its end' if live == 1 else 'executions go on to their end'}")


def ls(
    gateway: GatewayOption = None, api_key: KeyOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """List runs.

    Example: gyre run ls
    """
    api = connect(gateway, api_key, state_dir)
    runs: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = api.get("/v1/runs", after=after, limit=200)
        runs += page["runs"]
        after = page["next"]
        if after is None:
            break
    if json:
        show_json(runs)
        return
    table = Table("run", "state", "updates", "phi", "mu", "B", "G", "policy")
    for spec in runs:
        dispatch = spec["dispatch"]
        table.add_row(
            *(spec["run"], spec["state"], _said(spec["updates"]), f"{dispatch['phi']:g}", str(dispatch["mu"])),
            *(str(dispatch["batch_groups"]), str(dispatch["group_size"]), spec["elastic"]["policy"]),
        )
    console.print(table)


def _live(books: dict[str, Any] | None, run: str) -> int:
    """Executions of a run that have not ended."""
    if books is None or books["run"] != run:
        return 0
    known: int | None = books["live_executions"]
    return books["executions"]["live"] if known is None else known


def _patch(api: Api, run: str, change: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = api.patch(f"/v1/runs/{segment('run', run)}", change)
    return report


def _said(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def parsed(fields: list[str]) -> dict[str, Any]:
    """`dispatch.phi=1` and the like as the body of a change; raises `ClientError`.

    Which fields there are and may change is the API's to say; a name without a part goes there as it is.
    """
    change: dict[str, Any] = {}
    for field in fields:
        name, sign, text = field.partition("=")
        part, dot, rest = name.partition(".")
        if not sign or not name or (dot and (not part or not rest)):
            raise ClientError(0, f"{field!r} is no change; {ALLOWED}")
        target = change.setdefault(part, {}) if dot else change
        key = rest if dot else part
        if not isinstance(target, dict) or key in target:
            raise ClientError(0, f"{name} is given twice; {ALLOWED}")
        target[key] = _value(text)
    return change


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
