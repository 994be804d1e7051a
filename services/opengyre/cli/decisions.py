"""`gyre decisions ls` and `replay`: what the allocator decided, and whether it would decide the same again."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
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
from opengyre.cli.stack import StackError
from opengyre.elastic.replay import Replay, replay
from opengyre.proto.codec import UndecodableError, decode
from opengyre.proto.decision import Decision

PAGE = 200
LOOK_S = 0.5
AWAY_S = 60.0
"""How long the gateway may be away while decisions are followed."""
SHOWN = 50

RunArgument = Annotated[str | None, typer.Argument(help="Default: the active run, or the last one.")]


def register(app: typer.Typer) -> None:
    decisions = typer.Typer(name="decisions", help="What the allocator decided, and why.", no_args_is_help=True)
    decisions.command("ls")(ls)
    decisions.command("replay")(again)
    app.add_typer(decisions)


def ls(
    run: RunArgument = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="How many, the last ones.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List decisions, the newest last. `none` names those that were made without a run.

    Example: gyre decisions ls demo --follow
    """
    api = connect(gateway, api_key, state_dir)
    named = segment("run", run) if run is not None else None
    report = api.get("/v1/decisions", run=named, limit=limit, last="true", inputs="true" if json else "false")
    _show(report["decisions"], json)
    if not follow:
        return
    try:
        _follow(api, report, json)
    except KeyboardInterrupt:
        return


def _follow(api: Api, report: dict[str, Any], json: bool) -> None:
    after = report["decisions"][-1]["sequence"] if report["decisions"] else 0
    heard = time.monotonic()
    while True:
        try:
            inputs = "true" if json else "false"
            more = api.get("/v1/decisions", run=report["run"], after=after, limit=PAGE, inputs=inputs)
        except ClientError as error:
            if not error.passing or time.monotonic() - heard > AWAY_S:
                raise
            more = {"decisions": [], "next": None}
        else:
            heard = time.monotonic()
        _show(more["decisions"], json)
        if more["decisions"]:
            after = more["decisions"][-1]["sequence"]
        if more["next"] is None:
            time.sleep(LOOK_S)


def _show(found: list[dict[str, Any]], json: bool) -> None:
    for one in found:
        if json:
            show_json(one)
        else:
            console.print(line(one), soft_wrap=True, markup=False)


def line(one: dict[str, Any]) -> str:
    """A decision as one line: when, which, what, why."""
    decision = one["decision"]
    when = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    head = f"{when} {decision['decision']:>8} {decision['kind']:<9}"
    if decision["kind"] == "admission":
        note = f" ({decision['note']})" if decision["note"] else ""
        groups = decision["admitted"]
        names = groups[0] if len(groups) == 1 else f"{groups[0]} to {groups[-1]}" if groups else "none"
        return f"{head} {len(groups)} groups at version {decision['version']}, {names}{note}"
    changes = "; ".join(f"{change['cell']} to {change['role']}" for change in decision["changes"])
    reasons = "; ".join(dict.fromkeys(change["reason"] for change in decision["changes"]))
    suspends = " [episodes are SUSPENDED]" if decision["suspends"] else ""
    return f"{head} {changes}{suspends}: {reasons}"


def again(
    run: RunArgument = None,
    file: Annotated[
        Path | None, typer.Option("--from", help="A file that `gyre stream replay DECISIONS --out FILE` made.")
    ] = None,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Decide every decision of a run again from its recorded inputs; exit status 1 if any comes out otherwise.

    Example: gyre decisions replay demo
    """
    if file is not None:
        decisions = list(_recorded(file, None))
        chosen = [decision for decision in decisions if run in (None, decision.run)]
        if not chosen:
            held = ", ".join(sorted({decision.run for decision in decisions})) or "none"
            wanted = "a decision" if run is None else f"a decision of run {run}"
            raise StackError(f"{file} does not hold {wanted}; runs in it: {held}")
        report = replay(run or str(file), chosen)
    else:
        api = connect(gateway, api_key, state_dir)
        named = segment("run", run) if run is not None else None
        name = named if named == "none" else api.get("/v1/decisions", run=named, limit=1, inputs="false")["run"]
        report = replay(name, _stored(api, name))
    if json:
        show_json(report)
    else:
        _report(report)
    if report.differences:
        raise typer.Exit(1)


def _stored(api: Api, run: str) -> Iterator[Decision]:
    after: int | None = 0
    while after is not None:
        page = api.get("/v1/decisions", run=run, after=after, limit=PAGE)
        for one in page["decisions"]:
            yield msgspec.convert(one["decision"], Decision)
        after = page["next"]


def _recorded(file: Path, run: str | None) -> Iterator[Decision]:
    try:
        with file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                try:
                    event = decode(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["event"])
                except (msgspec.DecodeError, KeyError, UndecodableError) as error:
                    raise StackError(f"{file}: line {number} holds no decision: {error}") from error
                if isinstance(event, Decision) and run in (None, event.run):
                    yield event
    except OSError as error:
        raise StackError(f"{file} cannot be read: {error.strerror}") from error


def _report(report: Replay) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()) or "none"
    console.print(f"run [bold]{report.run}[/]: {report.decisions} decisions ({kinds}) were decided again")
    if report.without_inputs:
        console.print(f"{report.without_inputs} of them have no recorded inputs and were left out")
    if not report.differences:
        console.print("every one comes out the same")
        return
    table = Table("decision", "kind", "field", "recorded", "decided again")
    for one in report.differences[:SHOWN]:
        table.add_row(one.decision, one.kind, one.field, escape(_short(one.recorded)), escape(_short(one.decided)))
    console.print(table)
    if len(report.differences) > SHOWN:
        console.print(f"and {len(report.differences) - SHOWN} more; --json shows all")


def _short(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
