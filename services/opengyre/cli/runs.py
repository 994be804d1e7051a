"""`gyre run RECIPE.toml`: create a run, submit its tasks, follow it live; and the verbs for runs that there are."""

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from opengyre.cli import hosts, run_changes, staleness
from opengyre.cli.client import (
    Api,
    ClientError,
    GatewayOption,
    JsonOption,
    KeyOption,
    StateDirOption,
    connect,
    console,
    errors,
    number,
    show_json,
)
from opengyre.cli.recipe import Plan, read_recipe
from opengyre.cli.task_files import TaskFileError
from opengyre.cli.tasks import PATIENCE_S, send
from opengyre.policy.directory import check_directory
from opengyre.tiny.config import ModelDirectoryError

START = "start"
LOOK_S = 1.0
AWAY_S = 120.0
"""How long the gateway may be away while a run is followed."""
SHOWN = 8


class RunGroup(TyperGroup):
    """`gyre run RECIPE.toml` is short for `gyre run start RECIPE.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [START, *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    runs = typer.Typer(
        name="run",
        help="Start a training run, change it or stop it. `gyre run RECIPE.toml` is short for `gyre run start`.",
        no_args_is_help=True,
        cls=RunGroup,
    )
    runs.command(START)(run)
    runs.command("set")(run_changes.set_fields)
    runs.command("stop")(run_changes.stop)
    runs.command("ls")(run_changes.ls)
    app.add_typer(runs)


def run(
    recipe: Annotated[Path, typer.Argument(help="TOML file with the tables `run` and `tasks`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe, say what it amounts to.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow the run until it is finished.")] = True,
    gateway: GatewayOption = None,
    api_key: KeyOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Start a training run and follow it. Ctrl-C ends the following, not the run.

    Example: gyre run recipes/shell.toml
    """
    plan = read_recipe(recipe)
    if dry_run:
        check_model(recipe, plan)
        _explain(plan, json)
        return
    api = connect(gateway, api_key, state_dir)
    body = msgspec.to_builtins(plan.run)
    del body["state"]
    api.patiently("POST", "/v1/runs", body, PATIENCE_S)
    try:
        send(api, list(plan.tasks), plan.run.run)
        if (lack := lacking(plan)) is not None:
            errors.print(lack)
        if follow:
            _follow(api, plan.run.run, json)
            return
    except KeyboardInterrupt:
        again = "`gyre run` with the same recipe follows it again and submits what is missing"
        errors.print(f"run {plan.run.run} goes on; {again}")
        return
    if json:
        show_json(api.get(f"/v1/runs/{plan.run.run}"))
    else:
        console.print(f"run [bold]{plan.run.run}[/] goes on; `gyre status` shows it")


def check_model(recipe: Path, plan: Plan) -> None:
    """Raise `TaskFileError` for a first policy that is on this machine and cannot be used."""
    model = Path(plan.run.model)
    if not model.is_dir():
        return  # An absolute path may be on the trainer's machine only.
    try:
        check_directory(model)
    except ModelDirectoryError as error:
        raise TaskFileError(f"{recipe}: run.model cannot be used: {error}") from error


def lacking(plan: Plan) -> str | None:
    """What the tasks fall short of, as a sentence."""
    needed = plan.groups_needed
    if needed is None or plan.groups >= needed:
        return None
    return f"the tasks make {plan.groups} groups and the updates take {needed}: the run waits for more tasks then"


def _explain(plan: Plan, json: bool) -> None:
    facts = {
        "run": msgspec.to_builtins(plan.run),
        "tasks": len(plan.tasks),
        "groups": plan.groups,
        "groups_needed": plan.groups_needed,
        "predicted_staleness": plan.predicted_staleness,
        "own_turns": plan.own_turns,
    }
    if json:
        show_json(facts)
        return
    dispatch = plan.run.dispatch
    console.print(f"run [bold]{plan.run.run}[/], first policy {plan.run.model}")
    console.print(
        f"{len(plan.tasks)} tasks make {plan.groups} groups of {dispatch.group_size} executions; "
        f"{plan.run.updates or 'any number of'} updates take {plan.groups_needed or 'what there is'}"
    )
    console.print(
        f"phi {dispatch.phi:g}, mu {dispatch.mu}, B {dispatch.batch_groups}: at most "
        f"{int((dispatch.phi + dispatch.mu) * dispatch.batch_groups)} groups unconsumed, "
        f"E\\[d] = {plan.predicted_staleness:g}"
    )
    for turns, tasks in plan.own_turns.items():
        console.print(
            f"{tasks} tasks say max_turns = {turns} themselves, which holds for them; "
            f"run.harness.max_turns = {plan.run.harness.max_turns} does not"
        )
    console.print(lacking(plan) or "the recipe is valid; nothing was started")


class Followed:
    """What is known of a run that is followed; `look` asks for what is new."""

    def __init__(self, api: Api, run: str) -> None:
        self._api = api
        self.run = run
        self.updates: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.hosts: dict[str, Any] = {}
        self.state = "active"
        self._after = 0

    def look(self) -> list[dict[str, Any]]:
        """Ask once; the updates that are new."""
        # The state first: what was committed before a run ended is then among the updates.
        self.state = self._api.get(f"/v1/runs/{self.run}")["spec"]["state"]
        new: list[dict[str, Any]] = []
        more: int | None = self._after
        while more is not None:
            page = self._api.get("/v1/updates", run=self.run, after=more, limit=500)
            new += page["updates"]
            more = page["next"]
        if new:
            self._after = new[-1]["sequence"]
        self.updates += new
        self.status = self._api.get("/v1/status")
        self.hosts = self._api.get("/v1/hosts")
        return new

    def view(self) -> RenderableType:
        """The run as it is now."""
        table = Table("update", "score", "published", "d mean", "d max", "tokens", "grad norm", "s", title=self.run)
        for update in self.updates[-SHOWN:]:
            table.add_row(
                str(update["update"]),
                number(update["score"], 3),
                "yes" if update["published"] else "",
                number(update["staleness_mean"]),
                "-" if update["staleness_max"] is None else str(update["staleness_max"]),
                str(update["tokens"]),
                number(update["gradient_norm"], 3),
                number(update["seconds"], 1),
            )
        parts: list[RenderableType] = [table]
        if self.hosts:
            parts.append(hosts.table(self.hosts))
        report = self.status.get("staleness")
        if report is not None:
            parts.append(staleness.books(report))
        parts += [Text(f"held: {sentence}") for sentence in self.status.get("held") or []]
        waits = self.status.get("waits") or []
        parts += [Text(f"{wait['service']} waits for {wait['what']} ({wait['since_s']:.0f} s)") for wait in waits[:5]]
        return Group(*parts)


def _follow(api: Api, run: str, json: bool) -> None:
    followed = Followed(api, run)
    if json or not console.is_terminal:
        _look_until_over(followed, lambda new: _lines(new, json))
    else:
        with Live(followed.view(), console=console, auto_refresh=False) as live:
            _look_until_over(followed, lambda _: live.update(followed.view(), refresh=True))
    if not json:
        console.print(f"run [bold]{run}[/] is {followed.state} after {len(followed.updates)} updates")


def _lines(new: list[dict[str, Any]], json: bool) -> None:
    for update in new:
        if json:
            show_json(update)
        else:
            console.print(
                f"update {update['update']}: score {number(update['score'], 3)}, version {update['version']}, "
                f"d {number(update['staleness_mean'])}, {update['tokens']} tokens, {number(update['seconds'], 1)} s"
            )
            for what in ("skipped", "alarm"):
                if update.get(what) is not None:
                    console.print(f"update {update['update']}: {what}: {update[what]}")


def _look_until_over(followed: Followed, show: Any) -> None:
    heard = time.monotonic()
    while True:
        try:
            new = followed.look()
        except ClientError as error:
            if not error.passing or time.monotonic() - heard > AWAY_S:
                raise
            new = []
        else:
            heard = time.monotonic()
        show(new)
        if followed.state != "active":
            return
        time.sleep(LOOK_S)
