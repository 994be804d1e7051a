"""The search for `(phi, mu, close_at)` and the cells of each role with the best expected throughput. Pure.

Every candidate is simulated on the same seeds; one whose mean staleness by execution exceeds the wished bound is left
out. Throughput is trained executions an hour, over enough updates that the first burst does not decide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from opengyre.proto.run import Dispatch, Elastic
from opengyre.sim.gyre import Setting, StuckError, simulate
from opengyre.sim.table1 import pooled
from opengyre.sim.workload import Workload

WORTH = 0.02
"""A gain below this is within what the model can tell apart."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A setting and what it is expected to give."""

    policy: str
    train_cells: int | None
    """Of the static policy."""
    phi: float
    mu: int
    close_at: int
    executions_per_hour: float
    staleness_mean: float
    """By execution."""
    staleness_max: int
    efficiency: float
    switches_per_update: float

    def describe(self, group_size: int) -> str:
        where = f"static, {self.train_cells} cells train" if self.policy == "static" else self.policy
        close = "" if self.close_at == group_size else f", close_at = {self.close_at}"
        return f"{where}, phi = {self.phi:g}, mu = {self.mu}{close}"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`gain` is the best's throughput over the present setting's, less 1."""

    max_staleness: float
    present: Candidate | None
    best: Candidate
    best_static: Candidate | None
    gain: float | None
    elastic_gain: float | None
    """Of the best elastic setting over the best fixed split, less 1; None where there is but one cell."""
    says: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    """The best first."""


@dataclass(frozen=True, slots=True)
class Search:
    workload: Workload
    max_staleness: float
    updates: int = 12
    seeds: int = 3
    close: bool = True
    """Try `close_at` below the group's size too."""

    def dispatches(self) -> Iterator[Dispatch]:
        """Those whose E[d] is within the bound and whose depth is a whole number of groups."""
        size = self.workload.group_size
        closes = sorted({size, max(1, size - 1), max(1, size - size // 4), max(1, size // 2)}, reverse=True)
        for mu in range(1, int(2 * self.max_staleness) + 2):
            for quarters in range(int(4 * self.max_staleness) + 1):
                phi = quarters / 4
                if phi + (mu - 1) / 2 > self.max_staleness + 1e-9 or phi * self.workload.batch_groups % 1:
                    continue
                for close_at in closes if self.close else (size,):
                    yield Dispatch(phi=phi, mu=mu, close_at=close_at, min_members=1)

    def settings(self) -> Iterator[Setting]:
        """Elastic cells with each dispatch; each fixed split and Colocate with the whole groups."""
        common = {"dwell_s": 0.0, "grain": 1}
        size, cells = self.workload.group_size, self.workload.cells
        for dispatch in self.dispatches():
            yield Setting(dispatch, msgspec.convert({"policy": "fine", "gate": 2.0, **common}, Elastic), self.updates)
            if dispatch.close_at != size:
                continue
            if dispatch.phi == 0:
                together = {"policy": "global", "stream": False, **common}
                yield Setting(dispatch, msgspec.convert(together, Elastic), self.updates)
            for split in _splits(self.workload) if cells > 1 else ():
                static = {"policy": "static", "train_cells": split, **common}
                yield Setting(dispatch, msgspec.convert(static, Elastic), self.updates)


def _splits(workload: Workload) -> list[int]:
    """Cells that train in a fixed split: around the one that the costs ask for, and its neighbours."""
    fair = workload.cells * workload.train_node_h / (workload.train_node_h + workload.rollout_node_h)
    around = {round(fair * by) for by in (0.6, 0.8, 1.0, 1.25, 1.5)} | {int(fair), int(fair) + 1}
    return sorted(split for split in around if 1 <= split < workload.cells)


def measured(workload: Workload, setting: Setting, seeds: int) -> Candidate | None:
    """What a setting gives; None where it comes to a stop."""
    try:
        outcomes = [simulate(workload, setting, seed, record=False) for seed in range(seeds)]
    except StuckError:
        return None
    spread = pooled(outcomes)
    elastic, dispatch = setting.elastic, setting.dispatch
    hours = sum(outcome.hours for outcome in outcomes)
    return Candidate(
        policy=elastic.policy,
        train_cells=elastic.train_cells if elastic.policy == "static" else None,
        phi=dispatch.phi,
        mu=dispatch.mu,
        close_at=dispatch.close_at or workload.group_size,
        executions_per_hour=seeds * setting.updates * workload.update_executions / hours,
        staleness_mean=sum(d * count for d, count in spread.items()) / spread.total(),
        staleness_max=max(spread),
        efficiency=sum(outcome.efficiency for outcome in outcomes) / seeds,
        switches_per_update=sum(outcome.switches for outcome in outcomes) / seeds / setting.updates,
    )


def tune(search: Search, present: Setting | None = None, progress: Callable[[int, int], None] | None = None) -> Advice:
    """Try every setting. Raises `ValueError` where none keeps the bound."""
    settings = list(search.settings())
    found: list[Candidate] = []
    for number, setting in enumerate(settings):
        if progress is not None:
            progress(number, len(settings))
        candidate = measured(search.workload, setting, search.seeds)
        if candidate is not None and candidate.staleness_mean <= search.max_staleness + 1e-9:
            found.append(candidate)
    if not found:
        raise ValueError(f"no setting keeps a mean staleness of {search.max_staleness:g}; allowed are values from 0")
    found.sort(key=lambda candidate: -candidate.executions_per_hour)
    now = measured(search.workload, present, search.seeds) if present is not None else None
    static = next((candidate for candidate in found if candidate.policy == "static"), None)
    elastic = next((candidate for candidate in found if candidate.policy == "fine"), None)
    gain = found[0].executions_per_hour / now.executions_per_hour - 1 if now else None
    over = elastic.executions_per_hour / static.executions_per_hour - 1 if elastic and static else None
    return Advice(
        max_staleness=search.max_staleness,
        present=now,
        best=found[0],
        best_static=static,
        gain=gain,
        elastic_gain=over,
        says=tuple(_sentences(search, found[0], static, now, gain, over)),
        candidates=tuple(found),
    )


def _sentences(
    search: Search, best: Candidate, static: Candidate | None, now: Candidate | None, gain: float | None,
    over: float | None,
) -> Iterator[str]:  # fmt: skip
    size = search.workload.group_size
    yield (
        f"best: {best.describe(size)}: {best.executions_per_hour:.4g} executions an hour at a mean staleness of "
        f"{best.staleness_mean:.2f} (worst {best.staleness_max}), {best.efficiency:.0%} of what the cells could do"
    )
    if now is not None and gain is not None:
        yield _beside(search, now, gain)
    if over is None:
        yield "with one cell there is no split to compare: it has to alternate"
    elif over > WORTH:
        assert static is not None
        yield f"elastic cells give {over:+.1%} over the best fixed split ({static.train_cells} cells train)"
    else:
        yield (
            f"elasticity does not help here ({over:+.1%} over the best fixed split): switches cost "
            f"{search.workload.switch_h * 3600:.3g} s and work for each role is even enough; set policy = static"
        )


def _beside(search: Search, now: Candidate, gain: float) -> str:
    if now.staleness_mean > search.max_staleness + 1e-9:
        return (
            f"the present setting has a mean staleness of {now.staleness_mean:.2f}, above the bound of "
            f"{search.max_staleness:g}; to keep the bound changes the throughput by {gain:+.1%}"
        )
    if gain > WORTH:
        return f"expected gain over the present setting: {gain:+.1%}"
    return f"the present setting is as good as any within {WORTH:.0%}: leave it"
