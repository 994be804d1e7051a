"""Cells over time, by role, with the demand of the rollouts and the updates: one column for each row, as one SVG.

matplotlib is imported here only; it comes with the extra `plots`.
"""

import bisect
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from opengyre.sim.gyre import Moment, Outcome
from opengyre.sim.workload import Workload

COLOURS = {"serve": "#4c78a8", "train": "#f58518", "switch": "#bab0ac", "demand": "#1b1b1b", "ready": "#54a24b"}
SHOWN = 240
"""Points of a line at most."""


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    """The moment that holds at each of `SHOWN` even times, and the last."""
    last = moments[-1].hour
    starts = [moment.hour for moment in moments]
    times = [last * n / SHOWN for n in range(SHOWN)]
    return [replace(moments[bisect.bisect_right(starts, hour) - 1], hour=hour) for hour in times] + [moments[-1]]


def _column(cells: Any, groups: Any, title: str, workload: Workload, outcome: Outcome, last_h: float) -> None:
    moments = _thinned(outcome.timeline)
    hours = [moment.hour for moment in moments]
    serve = [moment.serving for moment in moments]
    train = [moment.training for moment in moments]
    switch = [moment.switching for moment in moments]
    cells.stackplot(
        hours, serve, train, switch, step="post", labels=("serve", "train", "on their way"),
        colors=(COLOURS["serve"], COLOURS["train"], COLOURS["switch"]), alpha=0.85, linewidth=0,
    )  # fmt: skip
    demand = [moment.live / workload.capacity for moment in moments]
    cells.step(hours, demand, where="post", color=COLOURS["demand"], linewidth=1.0, label="demand of the rollouts")
    cells.set_ylim(0, workload.cells * 1.4)
    cells.set_title(f"{title}\n{outcome.hours:.2f} h, {outcome.efficiency:.0%} of the floor", fontsize=10)
    ready = [moment.ready / workload.group_size for moment in moments]
    groups.fill_between(hours, ready, step="post", color=COLOURS["ready"], alpha=0.6, label="groups ready to train")
    for number, hour in enumerate(outcome.commits, 1):
        groups.axvline(hour, color="#b0b0b0", linewidth=0.8, label="an update" if number == 1 else None)
    groups.set_xlabel("hours")
    for axis in (cells, groups):
        axis.set_xlim(0, last_h)
        axis.spines[["top", "right"]].set_visible(False)


def svg(columns: Sequence[tuple[str, Workload, Outcome]]) -> str:
    """The picture. The same outcomes give the same bytes. Raises `ModuleNotFoundError` without matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    last_h = max(outcome.hours for _, _, outcome in columns)
    with mpl.rc_context({"svg.hashsalt": "opengyre", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.2 * len(columns), 5.2), layout="constrained")
        axes = figure.subplots(2, len(columns), sharey="row", squeeze=False, height_ratios=(2, 1))
        for column, (title, workload, outcome) in enumerate(columns):
            _column(axes[0][column], axes[1][column], title, workload, outcome, last_h)
        axes[0][0].set_ylabel("cells")
        axes[1][0].set_ylabel("groups")
        handles, labels = axes[0][0].get_legend_handles_labels()
        more, names = axes[1][0].get_legend_handles_labels()
        figure.legend([*handles, *more], [*labels, *names], loc="outside lower center", ncols=6, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "gyre simulate page"})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
