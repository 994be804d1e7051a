"""Hours against staleness: the whole frontier near a wished E[d], and the ideas that were tried beside it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from opengyre.sim.gyre import Outcome, Setting, simulate
from opengyre.sim.table1 import ROWS, pooled, setting_of
from opengyre.sim.workload import PAPER, Workload


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the seeds, of one setting."""

    near: str
    """The E[d] that it is near, or the idea that it tries."""
    what: str
    phi: float
    mu: int
    close_at: int
    hours: float
    staleness_mean: float
    staleness_max: int
    efficiency: float
    switches: float
    best: bool = False
    """No other point near the same E[d] takes fewer hours at the same or lower mean and worst staleness."""


@dataclass(frozen=True, slots=True)
class Try:
    near: str
    what: str
    setting: Setting
    workload: Workload


def near_points(workload: Workload, e_d: float) -> Iterator[Try]:
    """Settings with |phi + (mu - 1) / 2 - e_d| <= 1/4, each at several `close_at`."""
    size = workload.group_size
    for mu in range(1, int(2 * e_d) + 2):
        for quarters in range(int(4 * e_d) + 2):
            phi = quarters / 4
            if abs(phi + (mu - 1) / 2 - e_d) > 0.25 + 1e-9 or phi * workload.batch_groups % 1:
                continue
            for close_at in range(size, max(1, size // 2) - 1, -1):
                setting = setting_of(phi, mu, close_at, gate=2.0)
                yield Try(f"{e_d:g}", f"({phi:g}, {mu}), close at {close_at}", setting, workload)


def ideas(workload: Workload) -> Iterator[Try]:
    """Variations of `ours`, one thing each."""
    ours = ROWS["ours"].setting
    dispatch = ours.dispatch
    yield Try("ours", "as it is", ours, workload)
    yield Try("switches", "free", ours, replace(workload, switch_h=0.0))
    for gate in (0.0, 4.0, 8.0):
        elastic = msgspec.structs.replace(ours.elastic, gate=gate)
        yield Try("gate", f"{gate:g} switch times" if gate else "none", replace(ours, elastic=elastic), workload)
    for extra in (1, 2):
        whole = msgspec.structs.replace(dispatch, close_at=None)
        tried = replace(ours, dispatch=whole, redundant=extra)
        yield Try("redundant members", f"{extra} above {workload.group_size}, the slowest thrown away", tried, workload)
    for depth in (1.5, 1.75, 2.0):
        groups = round(depth * workload.batch_groups)
        continuous = msgspec.structs.replace(dispatch, mu=1, continuous=groups)
        yield Try("continuous dispatch", f"Q_c = {groups}, mu = 1", replace(ours, dispatch=continuous), workload)
    for nodes in (2, 4, 8):
        if workload.nodes % nodes == 0:
            coarser = replace(workload, cell_nodes=nodes)
            yield Try("coarser cells", f"{nodes} nodes each", ours, coarser)
    half = replace(
        workload, nodes=2 * workload.nodes, rollout_node_h=2 * workload.rollout_node_h,
        train_node_h=2 * workload.train_node_h,
    )  # fmt: skip
    yield Try("finer cells", "half a node each", ours, half)


def _point(tried: Try, outcomes: list[Outcome]) -> Point:
    spread = pooled(outcomes)
    dispatch = tried.setting.dispatch
    count = len(outcomes)
    return Point(
        near=tried.near,
        what=tried.what,
        phi=dispatch.phi,
        mu=dispatch.mu,
        close_at=dispatch.close_at or tried.workload.group_size,
        hours=round(sum(outcome.hours for outcome in outcomes) / count, 3),
        staleness_mean=round(sum(d * n for d, n in spread.items()) / spread.total(), 3),
        staleness_max=max(spread),
        efficiency=round(sum(outcome.efficiency for outcome in outcomes) / count, 4),
        switches=round(sum(outcome.switches for outcome in outcomes) / count, 1),
    )


def _dominated(point: Point, by: Point) -> bool:
    ours = (point.hours, point.staleness_mean, point.staleness_max)
    theirs = (by.hours, by.staleness_mean, by.staleness_max)
    return theirs != ours and all(b <= a for a, b in zip(ours, theirs, strict=True))


def frontier(
    *, workload: Workload = PAPER, targets: tuple[float, ...] = (1.0, 1.5), seeds: int = 8,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:  # fmt: skip
    """All points near each target, the undominated ones marked, then the ideas."""
    points: list[Point] = []
    for target in targets:
        found = []
        for tried in near_points(workload, target):
            progress(f"E[d] near {tried.near}: {tried.what}")
            found.append(_point(tried, _runs(tried, seeds)))
        points += [
            msgspec.structs.replace(point, best=not any(_dominated(point, other) for other in found)) for point in found
        ]
    for tried in ideas(workload):
        progress(f"{tried.near}: {tried.what}")
        points.append(_point(tried, _runs(tried, seeds)))
    return points


def _runs(tried: Try, seeds: int) -> list[Outcome]:
    return [simulate(tried.workload, tried.setting, seed, record=False) for seed in range(seeds)]
