"""`gyre trajectory show`: an execution of ours, opened again, as tables."""

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from opengyre.cli.client import number


def plain(text: str) -> str:
    """Text that others wrote, for a terminal: neither markup nor control characters have an effect."""
    return escape("".join(char if char.isprintable() else "·" for char in text))


def heading(report: dict[str, Any]) -> str:
    """What became of the execution, in two lines."""
    tree = report["tree"]
    state = tree["state"] if tree["end_reason"] is None else f"ended ({tree['end_reason']})"
    score = number(tree["score"]) if tree["score"] is not None else f"none ({tree['unscored'] or 'not yet'})"
    first = f"execution [bold]{tree['execution']}[/] of task {tree['task']}: {state}, score {score}"
    if tree["advantage"] is not None:
        first += f", advantage {tree['advantage']:+.4f} (baseline {number(tree['baseline'], 4)})"
    group = f"group {tree['group']}: {tree['group_state']}"
    if tree["group_reason"]:
        group += f" ({tree['group_reason']})"
    if tree["late"]:
        group += ", this member late"
    if report["trained_version"] is not None:
        group += f", trained at version {report['trained_version']} with staleness {report['staleness']}"
    elif report["dropped"]:
        group += f", dropped ({report['dropped']})"
    return f"{first}\n{group}"


def figures(tree: dict[str, Any]) -> Table:
    table = Table("figure", "value", show_header=False)
    for name in ("calls", "events", "path_tokens", "unique_nodes", "dedup_ratio", "leaves", "trained_tokens"):
        table.add_row(name, str(tree[name]))
    table.add_row("masked_tokens", str(tree["masked_tokens"]))
    for name in ("transitions", "diagnoses", "left_out", "refused"):
        if tree[name]:
            table.add_row(name, ", ".join(f"{key} {value}" for key, value in tree[name].items()))
    if tree["j_max"] is not None:
        table.add_row("j_max", str(tree["j_max"]))
    if tree["progress"]:
        table.add_row("credit", tree["credit"])
    return table


def progress(tree: dict[str, Any]) -> Table:
    """What the work was worth along the way."""
    table = Table("turn", "after", "potential", "why not", title="progress", title_justify="left")
    for one in tree["progress"]:
        table.add_row(
            str(one["turn"]), plain(one["call"] or "-"), number(one["potential"], 4), plain(one["infra_error"] or "")
        )
    return table


def paths(tree: dict[str, Any]) -> Table:
    """What was chosen."""
    table = Table("path", "role", "tokens", "trained", "masked", "calls", title="chosen", title_justify="left")
    for place, path in enumerate(tree["paths"]):
        sizes = (str(path[name]) for name in ("tokens", "trained_tokens", "masked_tokens"))
        table.add_row(str(place), path["role"], *sizes, plain(" ".join(path["calls"])))
    return table


def calls(tree: dict[str, Any]) -> Table:
    """What became of each call, indented by how deep in the tree it goes on."""
    table = Table(
        "call", "turn", "role", "transition", "prompt", "sampled", "potential", "advantage", "outcome", "why", "text"
    )
    depth: dict[str, int] = {}
    for one in tree["per_call"]:
        goes_on = one["transition"] in ("extend", "root")
        level = depth.get(one["related"] or "", 0) + (0 if goes_on else 1)
        depth[one["call"]] = level
        how = one["transition"] if goes_on else f"{one['transition']} of {one['related']} at {one['offset']}"
        outcome = f"path {one['path']}" if one["outcome"] == "trained" else one["outcome"]
        why = ", ".join(part for part in (one["diagnosis"], one["reason"]) if part)
        text = " ".join(one["text"].split())
        table.add_row(
            f"{'  ' * level}{plain(one['call'])}", str(one["turn"]), one["role"], plain(how),
            str(one["prompt_tokens"]), str(one["sampled_tokens"]), number(one["potential"], 4),
            "-" if one["advantage"] is None else f"{one['advantage']:+.4f}", outcome, plain(why),
            plain(text if len(text) <= 40 else f"{text[:39]}…"),
        )  # fmt: skip
    return table


def show(console: Console, report: dict[str, Any]) -> None:
    """Print an answer of GET /v1/executions/EXECUTION/tree."""
    tree = report["tree"]
    console.print(heading(report))
    chosen = (paths(tree),) if tree["paths"] else ()
    measured = (progress(tree),) if tree["progress"] else ()
    console.print(Group(figures(tree), *measured, *chosen, calls(tree)))
