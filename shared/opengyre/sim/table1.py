"""Table 1 of QwenGyre (arXiv 2609.33848): its rows as settings of the policy, its hours, and a row of our own."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from opengyre.proto.run import Dispatch, Elastic
from opengyre.sim.gyre import Outcome, Setting, simulate
from opengyre.sim.workload import PAPER, Workload

UPDATES = 12
SEEDS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """`published_h`: what the paper reports; None for what is not in it."""

    id: str
    what: str
    setting: Setting
    published_h: float | None = None


def setting_of(phi: float, mu: int, close_at: int | None = None, **elastic: object) -> Setting:
    """Of `UPDATES` updates; `elastic` overrides the simulator's defaults."""
    # A simulated cell may turn at once, and a cell's share of the training is one execution.
    values = {"dwell_s": 0.0, "gate": 0.0, "grain": 1, **elastic}
    dispatch = Dispatch(phi=phi, mu=mu, close_at=close_at, min_members=1)
    return Setting(dispatch, msgspec.convert(values, Elastic), UPDATES)


ROWS: dict[str, Row] = {
    row.id: row
    for row in (
        Row("A0", "Async, 16 T / 16 R", setting_of(1.5, 1, policy="static", train_cells=16, stream=False), 25.08),
        Row("A1", "Async, 8 T / 24 R", setting_of(1.5, 1, policy="static", train_cells=8, stream=False), 27.01),
        Row("A2", "Async, bursts of 3", setting_of(0.5, 3, policy="static", train_cells=16, stream=False), 32.58),
        Row("A3", "Async, streaming", setting_of(1.5, 1, policy="static", train_cells=16), 22.18),
        Row("C0", "Colocate", setting_of(0, 4, policy="global", stream=False), 23.23),
        Row(
            "C1", "Colocate, 4 stand alone",
            setting_of(0.5, 3, policy="coarse", standalone_cells=4, stream=False), 22.56,
        ),
        Row("E0", "elastic cells", setting_of(0.5, 3), 16.12),
        Row("ours", "elastic cells, close at 6 of 8, gate", setting_of(0.25, 3, 6, gate=2.0)),
    )
}  # fmt: skip
PAPER_ROWS = ("A0", "A1", "A2", "A3", "C0", "C1", "E0")


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the seeds."""

    id: str
    what: str
    phi: float
    mu: int
    close_at: int
    hours: float
    hours_min: float
    hours_max: float
    ratio: float
    """Hours / E0's hours, on the same seeds."""
    published_hours: float | None
    published_ratio: float | None
    staleness_mean: float
    """By execution, of those that were trained."""
    staleness_max: int
    staleness_predicted: float
    """E[d] = phi + (mu - 1) / 2, of a long run; the first bursts of a short one are below it."""
    efficiency: float
    """Floor / hours."""
    switches: float
    suspended_hours: float
    seeds: int


def pooled(outcomes: Iterable[Outcome]) -> Counter[int]:
    total: Counter[int] = Counter()
    for outcome in outcomes:
        total.update(outcome.staleness)
    return total


def result(row: Row, workload: Workload, outcomes: list[Outcome], e0_hours: float) -> RowResult:
    spread = pooled(outcomes)
    dispatch = row.setting.dispatch
    count = len(outcomes)
    hours = sum(outcome.hours for outcome in outcomes) / count
    e0 = ROWS["E0"].published_h
    return RowResult(
        id=row.id,
        what=row.what,
        phi=dispatch.phi,
        mu=dispatch.mu,
        close_at=dispatch.close_at or workload.group_size,
        hours=round(hours, 3),
        hours_min=round(min(outcome.hours for outcome in outcomes), 3),
        hours_max=round(max(outcome.hours for outcome in outcomes), 3),
        ratio=round(hours / e0_hours, 4),
        published_hours=row.published_h,
        published_ratio=round(row.published_h / e0, 3) if row.published_h and e0 else None,
        staleness_mean=round(sum(d * n for d, n in spread.items()) / spread.total(), 4),
        staleness_max=max(spread),
        staleness_predicted=dispatch.phi + (dispatch.mu - 1) / 2,
        efficiency=round(sum(outcome.efficiency for outcome in outcomes) / count, 4),
        switches=round(sum(outcome.switches for outcome in outcomes) / count, 1),
        suspended_hours=round(sum(outcome.suspended_h for outcome in outcomes) / count, 3),
        seeds=count,
    )


def table(
    rows: Iterable[str] = PAPER_ROWS, *, workload: Workload = PAPER, seeds: int = SEEDS,
    progress: Callable[[str], None] = lambda _: None,
) -> list[RowResult]:  # fmt: skip
    """Each row on the same seeds. `ratio` is against E0 on this workload, which is run though it be not asked for."""
    wanted = list(rows)
    outcomes: dict[str, list[Outcome]] = {}
    for name in dict.fromkeys(["E0", *wanted]):
        progress(name)
        outcomes[name] = [simulate(workload, ROWS[name].setting, seed, record=False) for seed in range(seeds)]
    e0 = sum(outcome.hours for outcome in outcomes["E0"]) / seeds
    return [result(ROWS[name], workload, outcomes[name], e0) for name in wanted]
