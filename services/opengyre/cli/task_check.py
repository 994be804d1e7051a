"""`gyre task check`: what a task pays for nothing, and for its reference solution.

Each task is made twice in fresh sandboxes of this machine, without a stack: once nothing is done in it, once its
solution is run; then its tests are.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from opengyre.cli.client import JsonOption, StateDirOption, console, errors, show_listing
from opengyre.shared.settings import load

if TYPE_CHECKING:
    from opengyre.cli.task_check_run import Facts

BackendName = Literal["bubblewrap", "docker"]


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Tasks' directories, or folders of these.")],
    backend: Annotated[BackendName | None, typer.Option(help="Default: the setting sandbox.backend.")] = None,
    stand_in_image: Annotated[
        str | None,
        typer.Option(
            "--stand-in",
            help="Image that takes the place of a base that is not here; host: this machine's programs (bubblewrap).",
        ),
    ] = None,
    network_tools: Annotated[
        bool | None,
        typer.Option("--offline/--no-offline", help="Stand-ins of apt-get, curl, pip, uv, uvx first on PATH."),
    ] = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Run tasks with nothing done and with their reference solution, and show what both are worth.

    Exit status 1 where a task cannot be evaluated or its solution earns less than 1 on any reward.

    Example: gyre task check tasks/ --stand-in host
    """
    # Not at the top: what reads tasks is an extra, and the other commands do without it.
    try:
        from opengyre.cli.task_check_node import check_all, found
        from opengyre.sandbox.core import SandboxError
        from opengyre.tasks.errors import TaskError
    except ModuleNotFoundError as error:
        errors.print(f"[red]error:[/] {error.name} is missing: pip install 'opengyre\\[sandbox]'", soft_wrap=True)
        raise typer.Exit(1) from error

    def tell(name: str) -> None:
        if not json and errors.is_terminal:
            errors.print(f"checking {escape(name)}")

    try:
        tasks = found(paths)
        loaded = load()
        settings = loaded.sandbox
        chosen = settings.model_copy(
            update={
                "backend": backend or settings.backend,
                "stand_in": stand_in_image or settings.stand_in,
                "offline": settings.offline if network_tools is None else network_tools,
            }
        )
        facts = asyncio.run(check_all(tasks, chosen, (state_dir or loaded.state_dir).absolute(), tell))
    except (TaskError, SandboxError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    if json:
        print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    else:
        show(facts)
    if not all(fact.ok for fact in facts):
        raise typer.Exit(1)


def show(facts: "list[Facts]") -> None:
    """A table of tasks, and what is to be said of each."""
    table = Table("task", "nothing done", "reference", "tests", "verdict")
    for fact in facts:
        solved = fact.reference
        table.add_row(
            escape(fact.task),
            escape(fact.nothing.text()),
            "none" if solved is None else escape(solved.text()),
            "-"
            if solved is None or not solved.total
            else f"{fact.nothing.passed} to {solved.passed} of {solved.total}",
            "[green]ok[/]" if fact.ok else "[red]not ok[/]",
        )
    show_listing(table)
    for fact in facts:
        console.print(f"{fact.task}: environment: {fact.environment or 'not made'}", markup=False, soft_wrap=True)
        for remark in fact.remarks:
            console.print(f"{fact.task}: {remark}", markup=False, soft_wrap=True)
