"""The gyre on a virtual clock: its laws over random settings, Table 1, and what is computed from it."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.proto.host import HostState, HostStateChanged, HostStatus
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.traj import Ended, EndReason
from opengyre.proto.update import Committed, UpdateStats
from opengyre.sim.frontier import frontier
from opengyre.sim.gyre import Gyre, Setting, StuckError, simulate
from opengyre.sim.recorded import TooLittleRecordedError, recorded
from opengyre.sim.scale import measure
from opengyre.sim.sharing import Sharing
from opengyre.sim.table1 import PAPER_ROWS, ROWS, setting_of, table
from opengyre.sim.tune import Search, tune
from opengyre.sim.workload import PAPER, Workload


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    nodes = draw(st.integers(2, 9))
    batch, size = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 5))
    return Workload(
        nodes=nodes,
        batch_groups=batch,
        group_size=size,
        mean_h=draw(st.floats(0.1, 5)),
        sigma=draw(st.floats(0, 0.6)),
        shared=draw(st.floats(0, 1)),
        rollout_node_h=draw(st.floats(1, 20)),
        train_node_h=draw(st.floats(0.5, 20)),
        switch_h=draw(st.sampled_from([0.0, 0.02, 0.08, 0.3])),
    )


elastics = st.builds(
    Elastic,
    policy=st.sampled_from(["fine", "static", "global", "coarse"]),
    stream=st.booleans(),
    train_cells=st.integers(1, 4),
    standalone_cells=st.integers(1, 3),
    min_rollout_cells=st.integers(0, 3),
    min_train_cells=st.integers(0, 2),
    gate=st.sampled_from([0.0, 2.0, 5.0]),
    grain=st.just(1),
    dwell_s=st.just(0.0),
)


@given(
    workload=workloads(),
    elastic=elastics,
    phi=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    mu=st.sampled_from([1, 2, 3, 4]),
    late=st.integers(0, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_the_laws_hold_at_each_step_and_staleness_is_as_predicted(
    workload: Workload, elastic: Elastic, phi: float, mu: int, late: int, seed: int
) -> None:
    size, batch = workload.group_size, workload.update_executions
    dispatch = Dispatch(phi=phi, mu=mu, close_at=max(1, size - late), min_members=1)
    warm, updates = 4 * mu, 24 * mu
    gyre = Gyre(workload, Setting(dispatch, elastic, updates), seed, record=False)
    gyre._admit()
    while gyre.version < updates:
        gyre.step()  # raises where nothing can happen any more, or where d is negative
        assert gyre.balances()
        assert 0 <= gyre.unconsumed <= (phi + mu) * batch + 1e-6
        gyre._decide()
        coming = any(view.state is HostState.JOINING for view in gyre.views)
        # `global` says beforehand that it suspends; for the others a cell serves, or is on its way to.
        assert gyre.serving or coming or not gyre.live or elastic.policy == "global"
    out = gyre.out
    # A group that is overtaken moves d from one update to a later one: what is left open at both ends is the error.
    open_at_the_ends = 2 * (phi + mu) ** 2 / (updates - warm)
    assert out.steady_staleness(warm, batch) == pytest.approx(phi + (mu - 1) / 2, abs=open_at_the_ends)


@given(
    workload=workloads(), phi=st.sampled_from([0.0, 1.0, 2.0]), mu=st.integers(1, 3), d_max=st.integers(0, 5),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_a_hard_bound_of_staleness_is_never_exceeded(
    workload: Workload, phi: float, mu: int, d_max: int, seed: int
) -> None:
    bound = max(d_max, mu - 1)  # below it a burst could not be admitted whole
    dispatch = Dispatch(phi=phi, mu=mu, d_max=bound, close_at=max(1, workload.group_size - 1), min_members=1)
    out = simulate(workload, Setting(dispatch, setting_of(0, 1).elastic, 6 * mu), seed)
    assert out.staleness_max <= bound


def test_table_1_comes_out_within_8_percent_and_ours_is_ahead_of_e0() -> None:
    rows = {row.id: row for row in table([*PAPER_ROWS, "ours"])}
    for name in PAPER_ROWS:
        published = rows[name].published_ratio
        assert published is not None
        assert rows[name].ratio == pytest.approx(published, rel=0.08), name
    assert rows["A0"].ratio >= 1.55
    assert rows["C0"].ratio >= 1.44
    ours, e0 = rows["ours"], rows["E0"]
    assert ours.hours < e0.hours
    assert ours.staleness_mean <= e0.staleness_mean
    assert ours.efficiency >= 0.93
    free = table(["ours"], workload=replace(PAPER, switch_h=0.0))[0]
    assert free.efficiency >= 0.95


def test_a_seed_gives_the_same_run() -> None:
    first, again = (simulate(PAPER, ROWS["ours"].setting, 3) for _ in range(2))
    assert first == again
    assert simulate(PAPER, ROWS["ours"].setting, 4).hours != first.hours


@given(
    calls=st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 3)), min_size=1, max_size=12),
    capacity=st.floats(0.3, 6),
)  # fmt: skip
def test_calls_share_as_a_step_by_step_account_says(calls: list[tuple[float, float]], capacity: float) -> None:
    """Each call runs at min(1, capacity / calls); compared with an account that visits every call at each event."""
    arrivals = sorted((when, work, tag) for tag, (when, work) in enumerate(calls))
    left: dict[int, float] = {}
    expected: dict[int, float] = {}
    now, queue = 0.0, list(arrivals)
    while queue or left:
        speed = min(1.0, capacity / len(left)) if left else 0.0
        until = min((work / speed for work in left.values()), default=float("inf"))
        if queue and queue[0][0] - now <= until:
            gap = queue[0][0] - now
            left = {tag: work - gap * speed for tag, work in left.items()}
            now, work, tag = queue.pop(0)
            left[tag] = work
        else:
            now += until
            left = {tag: work - until * speed for tag, work in left.items()}
            for tag in [tag for tag, work in left.items() if work <= 1e-9]:
                expected[tag] = now
                del left[tag]
    sharing, found, now = Sharing(), {}, 0.0
    heapq.heapify(arrivals)
    while arrivals or len(sharing):
        gap = arrivals[0][0] - now if arrivals else float("inf")
        step = min(gap, sharing.next_end(capacity))
        now += step
        found |= dict.fromkeys(sharing.advance(step, capacity), now)
        if arrivals and arrivals[0][0] <= now:
            _, work, tag = heapq.heappop(arrivals)
            sharing.add(work, tag)
    assert found == pytest.approx(expected, abs=1e-6)


def test_calls_that_are_taken_out_make_room_at_once() -> None:
    sharing = Sharing()
    for tag, work in ((1, 1.0), (1, 2.0), (2, 3.0)):
        sharing.add(work, tag)
    sharing.take_out(1, 2)
    assert len(sharing) == 1
    assert sharing.next_end(1.0) == 3.0
    assert sharing.advance(3.0, 1.0) == [2]


def test_a_run_that_cannot_go_on_says_what_it_waits_for() -> None:
    setting = Setting(Dispatch(phi=0, mu=1, close_at=1, min_members=1, continuous=1), Elastic(grain=1, dwell_s=0.0))
    lonely = Workload(nodes=2, batch_groups=4, group_size=2)
    gyre = Gyre(lonely, setting, 0)
    gyre._admit()
    gyre.serving = 0  # no cell serves, and none is told to
    gyre.views = [replace_role(view) for view in gyre.views]
    with pytest.raises(StuckError, match="2 live, 0 ready executions, 0 cells serve"):
        gyre.step()


def replace_role(view):
    return type(view)(
        cell=view.cell, hosts=view.hosts, state=HostState.CORDONED, settled=True, since_s=9, capacity=1, running=0,
        role="cordoned", wish="cordoned",
    )  # fmt: skip


def run_of(**fields) -> RunSpec:
    return RunSpec(run="r", model="m", dispatch=Dispatch(batch_groups=2, group_size=2), **fields)


def ended(group: str, member: int, hours: float, reason: EndReason = "done") -> Ended:
    return Ended(
        run="r", group=group, execution=f"{group}-e{member:02d}", index=0, attempt=0, reason=reason, turns=1,
        sampled_tokens=1, duration_s=hours * 3600, members=(),
    )  # fmt: skip


def commit(busy_s: float) -> Committed:
    return Committed(
        run="r", update=1, attempt="a", version=1, published=True, groups=(), executions=(), staleness=(), score=0,
        gradient_norm=0, stats=UpdateStats(executions=4, busy_s=busy_s),
    )  # fmt: skip


def change(before: HostState, after: HostState, seconds: float) -> HostStateChanged:
    return HostStateChanged(
        host="h", cell="h", boot="b", sequence=0, before=before, after=after, epoch=1, version=0, live_calls=0,
        duration_s=seconds,
    )  # fmt: skip


HOSTS = [
    HostStatus(host=name, cell=name, boot="b", state=HostState.ROLLOUT, epoch=0, url="u", engine="tiny", capacity=4)
    for name in ("a", "b", "c")
]


def test_a_recorded_run_is_a_workload() -> None:
    events = [ended(f"r-g{n:06d}", member, 1 + n) for n in range(4) for member in range(2)]
    events += [ended("r-g000009", 0, 9), ended("r-g000009", 1, 9, "infra")]
    switches = [
        change(HostState.DRAINING, HostState.TRAIN, 2),
        change(HostState.LEAVING_TRAIN, HostState.JOINING, 1),
        change(HostState.JOINING, HostState.ROLLOUT, 3),
    ]
    found = recorded(run_of(), events, [commit(7200)], switches, HOSTS)
    workload = found.workload
    assert (found.groups, workload.nodes, workload.capacity) == (4, 3, 4)
    assert workload.mean_h == 2.5
    assert workload.train_node_h == 2.0
    assert workload.switch_h * 3600 == 3
    assert set(next(workload.groups(1))) <= {1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize(
    ("events", "commits", "hosts", "says"),
    [
        ([], [commit(1)], HOSTS, "run r has 0 groups whose members all ended"),
        ([ended(f"r-g{n:06d}", m, 1) for n in range(4) for m in range(2)], [], HOSTS, "no committed update"),
        ([], [], [], "no host is known"),
    ],
)
def test_a_run_with_too_little_recorded_says_what_is_missing(events, commits, hosts, says: str) -> None:
    with pytest.raises(TooLittleRecordedError, match=says):
        recorded(run_of(), events, commits, [], hosts)


SMALL = PAPER.scaled(8)


def test_tune_keeps_the_bound_and_finds_more_than_the_present_setting() -> None:
    present = Setting(Dispatch(phi=1.0, mu=1), setting_of(0, 1, policy="static", train_cells=4).elastic, 6)
    advice = tune(Search(SMALL, 1.0, updates=6, seeds=1), present)
    assert all(candidate.staleness_mean <= 1.0 for candidate in advice.candidates)
    assert advice.best.policy == "fine"
    assert advice.gain is not None
    assert advice.gain > 0.1
    assert advice.elastic_gain is not None
    assert advice.elastic_gain > 0.1


def test_tune_does_not_praise_a_present_setting_that_breaks_the_bound() -> None:
    present = Setting(Dispatch(phi=0.5, mu=2), setting_of(0, 1).elastic, 6)
    advice = tune(Search(SMALL, 0.0, updates=6, seeds=1), present)
    assert advice.gain is not None
    assert advice.gain < 0
    assert any("above the bound of 0" in sentence for sentence in advice.says)
    assert not any("leave it" in sentence for sentence in advice.says)


def test_tune_says_where_elastic_cells_do_not_help() -> None:
    slow = replace(SMALL, switch_h=4.0)
    advice = tune(Search(slow, 1.0, updates=6, seeds=1))
    assert advice.elastic_gain is not None
    assert advice.elastic_gain < 0
    assert any("elasticity does not help" in sentence for sentence in advice.says)


@pytest.mark.parametrize(
    ("field", "value"), [("nodes", 0), ("sigma", -1.0), ("shared", 2.0), ("switch_h", float("nan")), ("cell_nodes", 5)]
)
def test_a_workload_out_of_range_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"workload.{field} is {value}"):
        replace(PAPER, **{field: value})


def test_the_frontier_marks_what_nothing_beats() -> None:
    points = frontier(workload=SMALL, targets=(1.0,), seeds=1)
    near = [point for point in points if point.near == "1"]
    best = [point for point in near if point.best]
    assert 0 < len(best) < len(near)
    fastest = min(near, key=lambda point: (point.hours, point.staleness_mean, point.staleness_max))
    assert fastest.best
    assert {point.near for point in points} > {"gate", "redundant members", "continuous dispatch", "finer cells"}


def test_scale_is_measured() -> None:
    facts = measure(32)
    assert facts.events > facts.decisions > 100
    assert 0 < facts.decision_ms_p50 <= facts.decision_ms_p99 <= facts.decision_ms_max
