"""Cells made of heartbeats and levels: the slowest host counts, a lost one takes its cell away."""

from opengyre.allocator.cells import Clocks, gather
from opengyre.allocator.choose import current
from opengyre.proto.host import DesiredRole, HostState, HostStatus, Sampler
from opengyre.proto.run import RunSpec

S = HostState


def status(host: str, state: HostState = S.ROLLOUT, *, cell: str = "c", epoch: int = 0, **fields) -> HostStatus:
    return HostStatus(host=host, cell=cell, boot="b", state=state, epoch=epoch, url="u", engine="tiny", **fields)


def level(host: str, role, epoch: int = 1, cell: str = "c", wish=None) -> DesiredRole:
    return DesiredRole(host=host, role=role, epoch=epoch, cell=cell, wish=wish)


def one(statuses: list[HostStatus], levels: list[DesiredRole]):
    found = gather({s.host: s for s in statuses}, {d.host: d for d in levels})
    assert list(found) == ["c"]
    return found["c"]


def test_the_state_of_a_cell_is_that_of_its_slowest_host() -> None:
    both = [level("a", "train"), level("b", "train")]
    assert one([status("a", S.TRAIN, epoch=1), status("b", S.DRAINING, epoch=1)], both).state is S.DRAINING
    back = [level("a", "rollout", 2), level("b", "rollout", 2)]
    cell = one([status("a", S.ROLLOUT, epoch=2), status("b", S.LEAVING_TRAIN, epoch=2)], back)
    assert (cell.state, cell.settled) == (S.LEAVING_TRAIN, False)


def test_a_cell_has_settled_when_every_host_has_arrived_by_the_last_command() -> None:
    told = [level("a", "rollout", 3)]
    assert not one([status("a", S.ROLLOUT, epoch=2)], told).settled, "it has not heard of the command yet"
    assert one([status("a", S.ROLLOUT, epoch=3)], told).settled
    assert one([status("a", S.ROLLOUT)], []).settled, "by itself a host goes to rollout"
    assert not one([status("a", S.STARTING)], []).settled


def test_a_cell_with_a_lost_host_is_reported_and_not_counted() -> None:
    cell = one([status("a", S.TRAIN, epoch=1)], [level("a", "train"), level("b", "train", wish="train")])
    assert (cell.report().state, cell.hosts) == ("lost", ("a", "b"))
    assert Clocks().views({"c": cell}, 0.0) == ()
    alone = one([], [level("a", "cordoned", wish="cordoned")])
    assert (alone.report().state, alone.report().wish) == ("lost", "cordoned")


def test_a_cell_that_the_run_refuses_is_reported_with_the_reason_and_not_counted() -> None:
    run = RunSpec(run="r", model="m")
    cold, fine = Sampler(temperature=0.5), Sampler()
    for engines, whole in (((fine, cold), False), ((fine, fine), True)):
        statuses = {name: status(name, sampler=sampler) for name, sampler in zip("ab", engines, strict=True)}
        cell = gather(statuses, {}, spec=run)["c"]
        assert len(Clocks().views({"c": cell}, 0.0)) == whole
        if not whole:
            assert cell.report().state == "refused"
            assert str(cell.report().refused).startswith(
                "b does not serve run r: its engine samples at temperature 0.5, "
            )
    assert gather({"a": status("a", sampler=cold)}, {})["c"].usable, "without a run nothing is refused"
    lost = gather({"a": status("a", sampler=cold)}, {"b": level("b", "train")}, spec=run)["c"].report()
    assert (lost.state, lost.refused) == ("lost", None)


def test_a_host_that_was_told_nothing_is_lost_and_not_forgotten() -> None:
    found = gather({}, {"b": level("b", "train")}, {"a": "c", "b": "elsewhere"})
    assert [(cell.name, cell.hosts, cell.report().state) for cell in found.values()] == [("c", ("a", "b"), "lost")]


def test_a_torn_command_is_seen_and_the_last_one_counts() -> None:
    cell = one([status("a"), status("b")], [level("a", "train", 5), level("b", "rollout", 4)])
    assert (cell.role, cell.torn, cell.settled) == ("train", True, False)
    assert one([status("a"), status("b")], [level("a", "rollout", 5)]).torn, "a host joined that was told nothing"
    assert not one([status("a"), status("b")], []).torn


def test_one_idle_heartbeat_alone_is_no_idleness() -> None:
    clocks = Clocks()
    told = [level("a", "train")]

    def look(now: float, beat: float, group: str | None = None) -> float:
        cell = one([status("a", S.TRAIN, epoch=1, since_s=beat, training_group=group)], told)
        return clocks.views({"c": cell}, now)[0].idle_s

    assert look(0.0, 1.0, "g") == 0.0
    assert look(1.0, 2.0) == 0.0
    assert look(1.9, 2.0) == 0.0, "the same heartbeat, seen again"
    assert look(2.0, 3.0) == 1.0
    assert look(2.5, 3.5, "g") == 0.0


def test_clocks_count_from_the_last_change_or_what_the_host_says() -> None:
    clocks = Clocks()
    views = [
        clocks.views({"c": one([status("a", state, epoch=1, since_s=7.0, capacity=3, running=2)], [])}, now)[0]
        for state, now in ((S.ROLLOUT, 100.0), (S.ROLLOUT, 101.0), (S.DRAINING, 102.0), (S.DRAINING, 102.5))
    ]
    assert [view.since_s for view in views] == [7.0, 8.0, 0.0, 0.5]
    assert (views[0].capacity, views[0].running) == (3, 2)


def test_the_run_that_is_led() -> None:
    def run(name: str, state) -> RunSpec:
        return RunSpec(run=name, model="m", state=state)

    assert current({}, {}) is None
    runs = {"a": run("a", "finished"), "b": run("b", "active"), "c": run("c", "active")}
    found = current(runs, {"a": 9, "b": 5, "c": 4})
    assert found is not None
    assert found.run == "c"
    over = {"a": run("a", "finished"), "b": run("b", "stopped")}
    found = current(over, {"a": 9, "b": 5})
    assert found is not None
    assert found.run == "a"


def test_a_host_without_memory_counts_for_what_it_serves_until_it_had_some_for_long() -> None:
    clocks = Clocks()

    def capacity(now: float, **fields) -> float:
        (view,) = clocks.views({"c": one([status("a", capacity=32, **fields)], [])}, now)
        return view.capacity

    assert capacity(0.0, running=20) == 32
    assert capacity(1.0, running=20, waiting=12, kv_usage=0.97) == 8
    assert capacity(2.0, running=20, waiting=12, kv_usage=0.3) == 8
    assert capacity(10.0, running=20, waiting=8, kv_usage=0.97) == 12
    assert capacity(24.0, running=4) == 12
    assert capacity(26.0, running=4) == 32
    assert capacity(27.0, running=4) == 32
