"""`gyre knobs`: the staleness knobs of other systems as phi and mu, and the reverse."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from opengyre.cli.client import JsonOption, console, show_json
from opengyre.cli.stack import StackError
from opengyre.elastic.knobs import SYSTEMS, InvalidKnobError, Translation, reverse, translate


def register(app: typer.Typer) -> None:
    app.command("knobs")(knobs)


def knobs(
    system: Annotated[str | None, typer.Argument(help=f"One of {', '.join(SYSTEMS)}; default: all.")] = None,
    values: Annotated[list[str] | None, typer.Argument(help="KNOB=VALUE of that system.")] = None,
    phi: Annotated[float | None, typer.Option(help="The reverse: phi in their words.")] = None,
    mu: Annotated[int | None, typer.Option(help="The reverse: mu in their words.")] = None,
    json: JsonOption = False,
) -> None:
    """Translate the knobs of AReaL, verl, ROLL, TRL and Tinker to phi, mu and E[d], or phi and mu to theirs.

    Examples: gyre knobs verl staleness_threshold=0.5 trigger_parameter_sync_step=4, or gyre knobs --phi 0.5 --mu 2
    """
    try:
        made = _made(system, values or [], phi, mu)
    except InvalidKnobError as error:
        raise StackError(str(error)) from error
    if json:
        show_json(made)
        return
    console.print(table(made))
    for one in made:
        for note in one.notes:
            console.print(f"{one.system}: {note}", markup=False, soft_wrap=True)


def _made(system: str | None, values: list[str], phi: float | None, mu: int | None) -> list[Translation]:
    if phi is None and mu is None:
        if system is None:
            raise InvalidKnobError(
                f"name a system and its knobs, or --phi and --mu; allowed systems: {', '.join(SYSTEMS)}"
            )
        return [translate(system, dict(map(_value, values)))]
    if values:
        raise InvalidKnobError("knobs are given beside --phi and --mu; allowed is one of the two")
    return [reverse(name, phi or 0.0, 1 if mu is None else mu) for name in ([system] if system else SYSTEMS)]


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise InvalidKnobError(f"{text!r} is no knob; allowed is KNOB=NUMBER") from error


def table(made: list[Translation]) -> Table:
    """One row a system."""
    rows = Table("system", "", "phi", "mu", "E\\[d]", "worst", "d_max", "exact", box=SIMPLE_HEAD)
    for column in rows.columns:
        column.no_wrap = True
    for one in made:
        theirs = "\n".join(f"{name}={value:g}" for name, value in one.knobs.items())
        bound = "-" if one.d_max is None else f"{one.d_max} {one.on_stale}"
        rows.add_row(
            *(one.system, theirs, f"{one.phi:g}", str(one.mu), f"{one.staleness:g}", str(one.worst), bound),
            "yes" if one.exact else "no",
        )
    return rows
