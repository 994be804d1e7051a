"""The `gyre` command: every verb with --help and an example; faults of the user's side are one sentence."""

import logging
import sys

import typer

from opengyre.cli import (
    bench,
    decisions,
    demo,
    doctor,
    hosts,
    knobs,
    model,
    runs,
    sandbox,
    simulate,
    staleness,
    status,
    streams,
    tasks,
    trajectory,
    tune,
    updown,
)
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

MODULES = (
    updown, demo, doctor, status, runs, tasks, hosts, staleness, decisions, knobs, streams, simulate, tune, bench,
    trajectory, sandbox, model,
)  # fmt: skip
for module in MODULES:
    module.register(app)


def main() -> None:
    # A verb says its one sentence; what the client of the bus warns of on the way there is not for the terminal.
    logging.getLogger("gyre.bus").addHandler(logging.NullHandler())
    try:
        app()
    except (StackError, SettingsError, MissingBinaryError) as error:
        sys.exit(f"gyre: {error}")
