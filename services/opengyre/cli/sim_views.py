"""What `gyre simulate` shows: tables, a run's facts, the page in docs/."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from opengyre.cli.client import number
from opengyre.sim.frontier import Point
from opengyre.sim.gyre import Outcome, Setting
from opengyre.sim.table1 import RowResult, pooled
from opengyre.sim.workload import Workload

TIMELINE = 2_000
"""Moments of a timeline at most."""


def narrow(*names: str) -> Table:
    """A table whose second column gives way where the line is short."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place, name in enumerate(names):
        shown.add_column(name, no_wrap=True, overflow="ellipsis", min_width=None if place == 1 else len(name))
    return shown


def rows_table(rows: Sequence[RowResult]) -> Table:
    shown = narrow("id", "what", "phi, mu", "hours", "/ E0", "paper", "off by", "d", "max", "of floor")
    for row in rows:
        published = row.published_ratio
        shown.add_row(
            row.id, row.what, f"{row.phi:g}, {row.mu}", number(row.hours), number(row.ratio, 3),
            number(published, 3), "-" if published is None else f"{row.ratio / published - 1:+.1%}",
            number(row.staleness_mean), str(row.staleness_max), f"{row.efficiency:.1%}",
        )  # fmt: skip
    return shown


def frontier_table(points: Sequence[Point]) -> Table:
    shown = narrow("near", "what", "hours", "d", "max", "of floor", "switches", "")
    for point in points:
        shown.add_row(
            point.near, point.what, number(point.hours), number(point.staleness_mean), str(point.staleness_max),
            f"{point.efficiency:.1%}", f"{point.switches:.0f}", "best" if point.best else "",
        )  # fmt: skip
    return shown


def moments(outcome: Outcome) -> list[dict[str, Any]]:
    """The timeline, thinned; the last moment is in it."""
    every = max(1, len(outcome.timeline) // TIMELINE)
    chosen = outcome.timeline[::every]
    if chosen[-1] is not outcome.timeline[-1]:
        chosen.append(outcome.timeline[-1])
    return [msgspec.to_builtins(moment) for moment in chosen]


def outcome_facts(
    setting: Setting, workload: Workload, outcomes: Sequence[Outcome], notes: Sequence[str]
) -> dict[str, Any]:
    """Means over the seeds."""
    spread = pooled(outcomes)
    count = len(outcomes)
    dispatch = setting.dispatch
    return {
        "policy": setting.elastic.policy,
        "phi": dispatch.phi,
        "mu": dispatch.mu,
        "close_at": dispatch.close_at or workload.group_size,
        "cells": workload.cells,
        "updates": setting.updates,
        "seeds": count,
        "hours": round(sum(outcome.hours for outcome in outcomes) / count, 4),
        "floor_hours": round(outcomes[0].floor_h, 4),
        "efficiency": round(sum(outcome.efficiency for outcome in outcomes) / count, 4),
        "staleness_predicted": dispatch.phi + (dispatch.mu - 1) / 2,
        "staleness_mean": round(sum(d * n for d, n in spread.items()) / spread.total(), 4),
        "staleness_max": max(spread),
        "staleness": {str(d): n for d, n in sorted(spread.items())},
        "switches": round(sum(outcome.switches for outcome in outcomes) / count, 1),
        "suspended_hours": round(sum(outcome.suspended_h for outcome in outcomes) / count, 4),
        "notes": tuple(notes),
    }


def page_text(
    rows: Sequence[RowResult], free: Sequence[RowResult], points: Sequence[Point], shown: Sequence[str],
    workload: Workload,
) -> str:  # fmt: skip
    """The page beside the picture: the rows, with switches charged and free; the frontier; the ideas."""
    lines = [
        "# Table 1, simulated",
        "",
        "Made by `gyre simulate page`; do not edit.",
        "",
        "The allocator's own policy on a virtual clock, on the workload that reproduces Table 1 of QwenGyre",
        f"(arXiv 2609.33848): {workload.nodes} nodes, 12 updates of {workload.batch_groups} * {workload.group_size}",
        f"executions; {workload.switch_h:g} h are charged for every switch of a cell.",
        f"The picture is of seed 0; figures are means over {rows[0].seeds} seeds, the same for all rows.",
        "",
        "![Cells by role, demand of the rollouts, groups that wait and updates](table1.svg)",
        "",
        "Above: cells that serve, train or are on their way; the line is what the live executions need. Where it is",
        "above the cells that serve, rollouts are slowed. Below: groups that wait to be trained; each upright line is",
        f"an update. Columns: {', '.join(shown)}.",
        "",
        "## Rows",
        "",
        *_rows(rows),
        "",
        "`d` is staleness by execution, over these 12 updates; `ours` closes a group at 6 of its 8 members, trains the",
        "late ones late, and sends a cell to train only for two switch times of work at least.",
        "",
        "### With free switches",
        "",
        *_rows(free),
        "",
        "## The frontier",
        "",
        "Elastic cells with the gate, all (phi, mu) within 1/4 of the wished E[d], each at several `close_at`; shown",
        "are those that no other near the same E[d] beats in hours, mean and worst staleness at once.",
        "",
        "| E[d] near | setting | hours | mean d | worst d | of the floor | switches |",
        "|---|---|---|---|---|---|---|",
        *(_point(point) for point in points if point.best),
        "",
        "## Ideas, one at a time",
        "",
        "Each changes one thing of `ours`.",
        "",
        "| idea | what | hours | mean d | worst d | of the floor | switches |",
        "|---|---|---|---|---|---|---|",
        *(_point(point) for point in points if not point.near.replace(".", "").isdigit()),
    ]
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[RowResult]) -> list[str]:
    return [
        "| id | what | (phi, mu) | close at | hours | / E0 | paper | mean d | worst d | of the floor | switches |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.id} | {row.what} | ({row.phi:g}, {row.mu}) | {row.close_at} | {row.hours:.2f} | {row.ratio:.3f} "
            f"| {number(row.published_ratio, 3)} | {row.staleness_mean:.2f} | {row.staleness_max} "
            f"| {row.efficiency:.1%} | {row.switches:.0f} |"
            for row in rows
        ),
    ]


def _point(point: Point) -> str:
    return (
        f"| {point.near} | {point.what} | {point.hours:.2f} | {point.staleness_mean:.2f} | {point.staleness_max} "
        f"| {point.efficiency:.1%} | {point.switches:.0f} |"
    )
