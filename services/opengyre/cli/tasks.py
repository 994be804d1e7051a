"""`gyre task submit`, `check`, `ls` and `show`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from opengyre.cli import task_check
from opengyre.cli.client import (
    Api,
    GatewayOption,
    JsonOption,
    KeyOption,
    StateDirOption,
    connect,
    console,
    errors,
    number,
    segment,
    show_json,
    show_listing,
)
from opengyre.cli.task_files import batches, load_tasks
from opengyre.proto.task import TaskSpec

PATIENCE_S = 300.0
"""How long a submission waits for room (429) or for the gateway to come back."""

RunOption = Annotated[str | None, typer.Option("--run", help="Default: the active run.")]


def register(app: typer.Typer) -> None:
    tasks = typer.Typer(name="task", help="Submit tasks and see what becomes of them.", no_args_is_help=True)
    tasks.command("submit")(submit)
    tasks.command("check")(task_check.check)
    tasks.command("ls")(ls)
    tasks.command("show")(show)
    app.add_typer(tasks)


def submit(
    path: Annotated[Path, typer.Argument(help="A .toml, .json or .jsonl file, a task's directory, or a folder.")],
    run: RunOption = None,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Check tasks here, then submit them in order. The same tasks again change nothing.

    Example: gyre task submit tasks/ --run demo
    """
    tasks = load_tasks(path)
    reply = send(connect(gateway, api_key, state_dir), tasks, segment("run", run) if run is not None else None)
    if json:
        show_json(reply)
    else:
        console.print(f"{len(reply['tasks'])} tasks are in run [bold]{reply['run']}[/]; {reply['pending']} are pending")


def send(api: Api, tasks: list[TaskSpec], run: str | None) -> dict[str, Any]:
    """Submit in batches, waiting where the gateway says so; one answer for all."""
    name, stored, pending = run, [], 0
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("submitting", total=len(tasks))
        for batch in batches(tasks):
            body: dict[str, Any] = {"tasks": msgspec.to_builtins(batch)}
            if name is not None:
                body["run"] = name
            reply = api.patiently("POST", "/v1/tasks", body, PATIENCE_S)
            name, pending = reply["run"], reply["pending"]
            stored += reply["tasks"]
            progress.advance(bar, len(batch))
    return {"run": name, "tasks": stored, "pending": pending}


def ls(
    run: RunOption = None,
    state: Annotated[
        Literal["submitted", "live", "done"] | None, typer.Option(help="Only tasks in this state.")
    ] = None,
    after: Annotated[int, typer.Option(min=0, help="Sequence after which to list (the end of the page before).")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 50,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the tasks of a run.

    Example: gyre task ls --run demo --state live
    """
    api = connect(gateway, api_key, state_dir)
    report = api.get("/v1/tasks", run=run, state=state, after=after, limit=limit)
    if json:
        show_json(report)
        return
    table = Table("sequence", "task", "purpose", "family", "state", "groups", "mean score")
    for task in report["tasks"]:
        made = sum(task["groups"].values())
        table.add_row(
            str(task["sequence"]),
            task["task"],
            task["purpose"],
            escape(task["family"] or "-"),
            task["state"],
            f"{made}/{task['repeat']}",
            number(task["mean_score"]),
        )
    show_listing(table)
    if report["next"] is not None:
        console.print(f"there are more: --after {report['next']}")


def show(
    task: Annotated[str, typer.Argument(help="Identifier of the task.")],
    run: RunOption = None,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show a task and its groups.

    Example: gyre task show write-train-s1-000000 --run demo
    """
    api = connect(gateway, api_key, state_dir)
    name = run or api.get("/v1/tasks", limit=1)["run"]
    report = api.get(f"/v1/tasks/{segment('run', name)}/{segment('task', task)}")
    if json:
        show_json(report)
        return
    spec, summary = report["spec"], report["summary"]
    console.print(f"{spec['task']} ({spec['purpose']}, {summary['state']}): {spec['instruction']}", markup=False)
    for check in spec["checks"]:
        console.print(f"  {check['weight']:.2f} {check['name']}: {check['command']}", markup=False)
    table = Table("group", "state", "v_d", "v_t", "scores")
    for group in report["groups"]:
        scores = " ".join(number(score) for _, score in sorted(group["scores"].items())) or group["reason"] or "-"
        admitted, consumed = group["admitted_version"], group["consumed_version"]
        table.add_row(
            group["group"],
            group["state"],
            "-" if admitted is None else str(admitted),
            "-" if consumed is None else str(consumed),
            scores,
        )
    show_listing(table)
