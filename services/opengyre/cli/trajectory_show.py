"""`gyre trajectory show`: an execution of ours, opened again, as tables."""

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opengyre.cli.client import number


def plain(text: str) -> str:
    """Text that others wrote, for a terminal: neither markup nor control characters have an effect."""
    return escape(printable(text))


def printable(text: str) -> str:
    """The text with a dot for each control character."""
    return "".join(char if char.isprintable() else "·" for char in text)


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


def lanes(tree: dict[str, Any]) -> Table:
    """The alternatives that it went on as."""
    title = f"lanes, from turn {tree['forked_at']} on"
    table = Table("lane", "calls", "tokens", "score", "advantage", "weight", "end", title=title, title_justify="left")
    for one in tree["lanes"]:
        score = number(one["score"], 4) if one["score"] is not None else f"none ({one['unscored']})"
        credit = "-" if one["advantage"] is None else f"{one['advantage']:+.4f}"
        sizes = (str(one[name]) for name in ("lane", "calls", "tokens"))
        table.add_row(*sizes, score, credit, number(one["weight"], 4), one["end_reason"] or "not yet")
    return table


def paths(tree: dict[str, Any]) -> Table:
    """What was chosen."""
    table = Table("path", "role", "tokens", "trained", "masked", "calls", title="chosen", title_justify="left")
    for place, path in enumerate(tree["paths"]):
        sizes = (str(path[name]) for name in ("tokens", "trained_tokens", "masked_tokens"))
        table.add_row(str(place), path["role"], *sizes, plain(" ".join(path["calls"])))
    return table


def calls(tree: dict[str, Any]) -> Table:
    """What became of each call, indented by how deep in the tree it goes on. Columns that say one thing of all calls
    are left out; a text gives way where the terminal is narrow."""
    rows = tree["per_call"]
    measured = any(one["potential"] is not None for one in rows)
    forked = bool(tree["lanes"])
    own = any(one["advantage"] not in (None, tree["advantage"]) for one in rows)
    nothing = common_reason(tree)
    table = Table()
    for name in ("call", *(("lane",) if forked else ()), "turn", "role", "how", "prompt", "new"):
        table.add_column(name, min_width=16 if name == "how" else len(name), no_wrap=name != "how")
    for name, wanted in (("worth", measured), ("credit", own)):
        if wanted:
            table.add_column(name, min_width=len(name), no_wrap=True)
    table.add_column("outcome", min_width=len("outcome"))
    table.add_column("text", min_width=8, max_width=40)
    depth: dict[str, int] = {}
    for one in rows:
        goes_on = one["transition"] in ("extend", "root")
        level = depth.get(one["related"] or "", 0) + (0 if goes_on else 1)
        depth[one["call"]] = level
        how = one["transition"] if goes_on else f"{one['transition']} of {one['related']} at {one['offset']}"
        if one["diagnosis"]:
            how += f" ({one['diagnosis']})"
        figures = [number(one["potential"])] if measured else []
        if own:
            figures.append("-" if one["advantage"] is None else f"{one['advantage']:+.2f}")
        lane = ["-" if one["lane"] is None else str(one["lane"])] if forked else []
        table.add_row(
            f"{'  ' * level}{plain(one['call'])}", *lane, str(one["turn"]), one["role"], plain(how),
            str(one["prompt_tokens"]), str(one["sampled_tokens"]), *figures, plain(_outcome(one, nothing)),
            Text(printable(" ".join(one["text"].split())), no_wrap=True, overflow="ellipsis"),
        )  # fmt: skip
    return table


def common_reason(tree: dict[str, Any]) -> str | None:
    """Why no call of the execution is trained, where that is one reason."""
    reasons = {one["reason"] for one in tree["per_call"] if one["outcome"] == "not_trained"}
    trained = any(one["outcome"] == "trained" for one in tree["per_call"])
    return reasons.pop() if len(reasons) == 1 and not trained else None


def _outcome(one: dict[str, Any], nothing: str | None) -> str:
    if one["outcome"] == "trained":
        return f"path {one['path']}"
    name = one["outcome"].replace("_", " ")
    if one["outcome"] == "left_out" or one["reason"] in (None, nothing):
        return name  # The reason is said once, by the heading or by the name itself.
    return f"{name}: {one['reason']}"


def show(console: Console, report: dict[str, Any]) -> None:
    """Print an answer of GET /v1/executions/EXECUTION/tree."""
    tree = report["tree"]
    console.print(heading(report))
    nothing = common_reason(tree)
    if nothing is not None:
        console.print(f"not trained: {plain(nothing)}")
    chosen = (paths(tree),) if tree["paths"] else ()
    measured = (progress(tree),) if tree["progress"] else ()
    parted = (lanes(tree),) if tree["lanes"] else ()
    console.print(Group(figures(tree), *measured, *parted, *chosen, calls(tree)))
