"""The `gyre` command: every verb with --help and an example; faults of the user's side are one sentence."""

import importlib
import importlib.util
import sys

import typer

from opengyre.cli import doctor, updown
from opengyre.cli.stack import StackError
from opengyre.shared.embedded import MissingBinaryError
from opengyre.shared.settings import SettingsError

app = typer.Typer(
    name="gyre",
    help="OpenGyre: reinforcement learning for long-running LLM agents on elastic cells of GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

updown.register(app)
doctor.register(app)
for name in ("status", "runs", "tasks", "hosts", "staleness", "streams", "demo"):
    if importlib.util.find_spec(f"opengyre.cli.{name}") is not None:
        importlib.import_module(f"opengyre.cli.{name}").register(app)


def main() -> None:
    try:
        app()
    except (StackError, SettingsError, MissingBinaryError) as error:
        sys.exit(f"gyre: {error}")
