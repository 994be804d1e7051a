"""How the demo shows what it knows: one line every few seconds, or a live view with a sparkline. Pure rendering."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from opengyre.cli.demo_facts import Facts, balances
from opengyre.cli.demo_plan import DemoOptions
from opengyre.proto.decision import Book, StalenessReport

BARS = "▁▂▃▄▅▆▇█"
WINDOW = 8
WIDTH = 64


@dataclass
class Shown:
    """Everything that is on the screen."""

    facts: Facts = field(default_factory=Facts)
    phase: str = "starting"
    elapsed_s: float = 0.0
    updates: int = 0
    cells: dict[str, str] = field(default_factory=dict)
    """Cell -> state."""
    staleness: StalenessReport | None = None
    suspended: int = 0
    waits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """The last things worth a line: processes that ended, problems."""


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values in [0, 1] as bars, the last `width` of them."""
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in values[-width:])


def recent(facts: Facts) -> float | None:
    """Mean score of the last updates."""
    scores = facts.scores[-WINDOW:]
    return sum(scores) / len(scores) if scores else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _book(book: Book) -> str:
    dropped = sum(book.dropped.values())
    sign = "=" if balances(book) else "≠"
    return (
        f"{book.dispatched} {sign} {book.trained} trained + {dropped} dropped + {book.ready} ready + {book.live} live"
    )


def line(shown: Shown) -> str:
    """One line of progress."""
    facts, report = shown.facts, shown.staleness
    cells = " ".join(f"{cell}={state}" for cell, state in sorted(shown.cells.items())) or "none"
    parts = [
        f"[{shown.elapsed_s:5.0f} s] {shown.phase}",
        f"update {len(facts.curve)}/{shown.updates}",
        f"score {_number(recent(facts))}",
        f"versions {len(facts.published)} published {len(facts.applied)} applied",
        f"cells {cells} ({facts.switches_live} switches)",
        f"episodes {len(facts.live)} live {shown.suspended} suspended {facts.interrupted} interrupted",
    ]
    if report is not None:
        parts.append(f"staleness {_number(report.mean)} (predicted {report.predicted:.2f})")
        parts.append(f"groups {_book(report.groups)}")
    if len(facts.curve) == 0 and shown.waits:
        parts.append(f"waits for {shown.waits[0]}")
    return " | ".join(parts)


def panel(shown: Shown) -> Panel:
    """The live view."""
    facts, report = shown.facts, shown.staleness
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("update", f"{len(facts.curve)} of {shown.updates}")
    table.add_row("score", Text(f"{_number(recent(facts))}  {sparkline(facts.scores)}", style="green"))
    before, after = facts.evaluation("before"), facts.evaluation("after")
    table.add_row("held-out tasks", f"before {_number(before)}, after {_number(after)}")
    table.add_row("versions", f"{len(facts.published)} published, {len(facts.applied)} applied")
    cells = Text()
    for cell, state in sorted(shown.cells.items()):
        cells.append(f"{cell} ")
        cells.append(f"{state}  ", style={"rollout": "cyan", "train": "magenta"}.get(state, "yellow"))
    cells.append(f"({facts.switches_live} switches with episodes live)")
    table.add_row("cells", cells)
    table.add_row(
        "episodes",
        f"{len(facts.live)} live, {shown.suspended} suspended, {len(facts.ended)} ended, "
        f"{facts.interrupted} interrupted",
    )
    if report is not None:
        table.add_row(
            "staleness",
            f"mean {_number(report.mean)}, predicted {report.predicted:.2f}, max {report.maximum or 0}",
        )
        table.add_row("groups", _book(report.groups))
        table.add_row("executions", _book(report.executions))
    table.add_row("waits for", "; ".join(shown.waits[:2]) or "-")
    notes = Text("\n".join(note[:200] for note in shown.notes[-4:]), style="dim")
    return Panel(
        Group(table, notes), title=f"OpenGyre demo: {shown.phase}, {shown.elapsed_s:.0f} s", title_align="left"
    )


def ending(options: DemoOptions, *, left: bool) -> str:
    """Of a demo that was stopped; `left`: whether there is a state that it can go on from."""
    if options.attach:
        return f"stopped; the stack at {options.attach} goes on, and the run with it: `gyre run stop` ends that"
    said = "stopped; nothing runs any more"
    if left:
        said += f"; its state is in {options.state_dir}, and the same command with --keep goes on from there"
    return said


def closing(summary: dict[str, Any]) -> Table:
    """The closing table of a summary."""
    table = Table(title="OpenGyre demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    scores = [point["score"] for point in summary["curve"]]
    quarter = max(1, len(scores) // 4)
    if scores:
        first, last = sum(scores[:quarter]) / quarter, sum(scores[-quarter:]) / quarter
        table.add_row("updates", f"{len(scores)}")
        table.add_row("training score", f"{first:.3f} -> {last:.3f} (first and last quarter)  {sparkline(scores)}")
    evaluation = summary["evaluation"]
    table.add_row("held-out score", f"{_number(evaluation['before'])} -> {_number(evaluation['after'])}")
    versions = summary["weight_versions"]
    table.add_row("versions", f"{versions['published']} published, {versions['applied']} applied")
    table.add_row(
        "role switches", f"{summary['role_switches']} with episodes live, {summary['role_switches_all']} in all"
    )
    table.add_row("episodes", ", ".join(f"{n} {reason}" for reason, n in summary["episodes"].items()) or "none")
    table.add_row("interrupted", str(summary["episodes_interrupted"]))
    staleness = summary["staleness"]
    table.add_row(
        "staleness",
        f"mean {_number(staleness['mean'])}, predicted {_number(staleness['predicted'])}, max {staleness['max']}",
    )
    for name in ("groups", "executions"):
        terms = summary["accounting"][name]
        if terms:
            dropped = sum(terms["dropped"].values())
            sign = "=" if terms["balances"] else "≠"
            table.add_row(
                name,
                f"{terms['dispatched']} dispatched {sign} {terms['trained']} trained + {dropped} dropped"
                f" + {terms['ready']} ready + {terms['live']} live",
            )
    table.add_row("wall time", ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in summary["wall_s"].items()))
    table.add_row("promises", "all kept" if summary["passed"] else "; ".join(summary["shortfalls"]))
    return table
