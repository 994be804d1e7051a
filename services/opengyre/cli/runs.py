"""`gyre run RECIPE.toml`: create a run, submit its tasks, follow it live; and the verbs for runs that there are."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from opengyre.cli import run_changes, run_show
from opengyre.cli import stack as stacks
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
    show_json,
)
from opengyre.cli.estimate import Estimate, estimated
from opengyre.cli.estimate_view import shown
from opengyre.cli.prompts import check_prompts
from opengyre.cli.recipe import Plan, read_recipe
from opengyre.cli.run_fits import check_fits, estimated_on, settings_of
from opengyre.cli.run_follow import follow as follow_run
from opengyre.cli.stack import Stack
from opengyre.cli.task_files import TaskFileError
from opengyre.cli.tasks import PATIENCE_S, send
from opengyre.policy.describe import describe
from opengyre.shared.settings import load
from opengyre.tiny.config import ModelDirectoryError

START = "start"
NOT_FOUND = 404


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
    runs.command("show")(run_show.show)
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
    plan = read_recipe(recipe, dry=dry_run)
    check_model(recipe, plan)
    tight = check_prompts(recipe, plan)
    state = None if gateway else (state_dir or load().state_dir).absolute()
    if dry_run:
        stack = None if state is None or plan.hardware is not None else stacks.running(state)
        host = None if stack is None else settings_of(stack)
        if stack is None or host is None:
            _explain(plan, estimated(recipe, plan, load().host, plan.hardware), None, tight, json)
        else:
            _explain(plan, estimated_on(recipe, plan, stack, host), stack, tight, json)
        return
    api = connect(gateway, api_key, state_dir)
    _check_fits(recipe, plan, api, None if state is None else stacks.read(state))
    body = msgspec.to_builtins(plan.run)
    del body["state"]
    api.patiently("POST", "/v1/runs", body, PATIENCE_S)
    try:
        # Those that evaluate first: the first policy is evaluated before it has been trained.
        send(api, [*plan.evaluation, *plan.tasks], plan.run.run)
        for said in (tight, lacking(plan)):
            if said is not None:
                errors.print(said)
        if follow:
            follow_run(api, plan, json)
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
        facts = describe(model)
    except ModelDirectoryError as error:
        raise TaskFileError(f"{recipe}: run.model cannot be used: {error}") from error
    harness = plan.run.harness
    # A program may ask for completions of a text.
    if harness.agent == "shell" and harness.prompt == "chat" and not facts.chat_template:
        raise TaskFileError(
            f"{recipe}: run.harness.prompt is chat, and the model in {model} has no chat template; allowed is prompt = "
            '"transcript", or a model with chat_template in tokenizer_config.json or chat_template.jinja'
        )


def _check_fits(recipe: Path, plan: Plan, api: Api, stack: Stack | None) -> None:
    """Raise `TaskFileError` where the stack cannot do the run. One that is there already goes on, and is followed."""
    try:
        check_fits(recipe, plan, stack)
    except TaskFileError:
        try:
            api.get(f"/v1/runs/{plan.run.run}")
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
        else:
            return
        raise


def lacking(plan: Plan) -> str | None:
    """What the tasks fall short of, as a sentence."""
    needed = plan.groups_needed
    if needed is None or plan.groups >= needed:
        return None
    return f"the tasks make {plan.groups} groups and the updates take {needed}: the run waits for more tasks then"


def _explain(plan: Plan, estimate: Estimate | None, stack: Stack | None, tight: str | None, json: bool) -> None:
    """`stack`: the one whose hosts were looked at; None: settings in force here were."""
    there = Path(plan.run.model).is_dir()
    facts = {
        "run": msgspec.to_builtins(plan.run),
        "tasks": len(plan.tasks),
        "groups": plan.groups,
        "groups_needed": plan.groups_needed,
        "evaluated_versions": plan.evaluated_versions,
        "evaluations": len(plan.evaluation),
        "predicted_staleness": plan.predicted_staleness,
        "own_turns": plan.own_turns,
        "model_is_here": there,
        "notes": [said for said in (tight, lacking(plan)) if said is not None],
        "stack": stack and stack.state_dir,
        "estimate": estimate and msgspec.to_builtins(estimate),
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
    if plan.evaluation:
        versions = plan.evaluated_versions
        console.print(
            f"{len(plan.evaluation) // len(versions)} held-out tasks evaluate each of the versions "
            f"{', '.join(map(str, versions))}"
        )
    for turns, tasks in plan.own_turns.items():
        console.print(
            f"{tasks} tasks say max_turns = {turns} themselves, which holds for them; "
            f"run.harness.max_turns = {plan.run.harness.max_turns} does not"
        )
    whose = "by the settings in force here"
    if stack is not None:
        whose = f"the {stack.cells} of the stack in {stack.state_dir}, as they were started"
    console.print(f"hosts: {whose}", soft_wrap=True)
    for part in shown(estimate) if estimate is not None else ():
        console.print(part, soft_wrap=isinstance(part, str))
    if not there:
        console.print(
            f"{plan.run.model} is not on this machine: a run needs config.json, the weights as safetensors, "
            "tokenizer.json and a chat template there",
            soft_wrap=True,
        )
    elif estimate is None:
        console.print("memory and time are not worked out for this family of models on these hosts")
    for said in (tight, lacking(plan)):
        if said is not None:
            console.print(said, soft_wrap=True)
    console.print("the recipe is valid; nothing was started")
