"""The machine of an update: whatever cells do, each unit is in exactly one contribution when it commits."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opengyre.proto.ids import group_of
from opengyre.proto.update import UpdateStats
from opengyre.trainer.update import (
    TABLE,
    Accept,
    Arrived,
    Cell,
    CellJoined,
    CellLeft,
    Commit,
    Discard,
    Flush,
    Give,
    HandedOver,
    Phase,
    Pulled,
    Refuse,
    Stored,
    Taken,
    Ticked,
    Unusable,
    Update,
    Wait,
    Worked,
    advance,
)

A, B = Cell("a", "1"), Cell("b", "1")
SIZE = 6


def opened(size: int = 2, arrived: int | None = None) -> Update:
    """Units that are messages of their own."""
    update = Update(number=3, attempt="t", size=size, grain=8)
    for number in range(size if arrived is None else arrived):
        update, _ = advance(update, Arrived(f"m{number}", (f"g{number}",)))
    return update


def pulled(cell: Cell = A, *holding: str, now: float = 0.0, **changes) -> Pulled:
    mine = {"update": 3, "attempt": "t"} if holding else {}
    return Pulled(cell, now, **{**mine, "holding": holding, **changes})


def handed(cell: Cell, *groups: str, name: str = "c", **changes) -> HandedOver:
    fields = {"update": 3, "attempt": "t", "gradient": f"sha256:{name}", **changes}
    return HandedOver(cell=cell, now=0.0, contribution=name, units=groups, stats=UpdateStats(), **fields)


def run(update: Update, *events) -> tuple[Update, list]:
    said = []
    for event in events:
        update, effects = advance(update, event)
        said += effects
    return update, said


def test_from_groups_to_the_commit() -> None:
    update, said = run(opened(), pulled(), pulled(A, "g0"), pulled(A, "g0", "g1"), handed(A, "g0", "g1"))
    assert said == [CellJoined(A), Give(("g0",)), Give(("g1",)), Flush(), Taken("c"), Accept(), Commit()]
    assert update.phase is Phase.COMMITTING
    assert run(update, pulled())[1] == [Wait("the commit of update 3")]
    assert advance(update, Stored())[0].phase is Phase.COMMITTED


def test_a_cell_waits_for_groups_and_keeps_what_it_holds() -> None:
    update, said = run(opened(2, 1), pulled(), pulled(A, "g0"))
    assert said[-1] == Wait("executions: 1 of 2 of update 3")
    _, said = run(update, Arrived("m1", ("g1",)), pulled(A, "g0"))
    assert said == [Give(("g1",))]


def test_an_answer_that_was_lost_is_given_again() -> None:
    update, said = run(opened(), pulled(), pulled())
    assert said == [CellJoined(A), Give(("g0",)), Give(("g0",))]
    assert update.waiting == ("g1",)


def test_two_cells_share_and_one_waits_for_the_other() -> None:
    _, said = run(opened(), pulled(A), pulled(B), pulled(A, "g0"), handed(A, "g0"), pulled(A))
    assert said[-4:] == [Flush(), Taken("c"), Accept(), Wait("other cells: 1 of 2 executions are handed over")]


def test_a_contribution_that_is_repeated_is_accepted_once() -> None:
    update, _ = run(opened(), pulled(A), pulled(B))
    update, said = run(update, handed(A, "g0"), handed(A, "g0"))
    assert said == [Taken("c"), Accept(), Accept()]
    assert run(update, handed(B, "g1", name="c"))[1] == [Refuse("contribution c was handed over with other content")]
    update, said = run(update, handed(B, "g1", name="d"), handed(B, "g1", name="d"), handed(A, "g0"))
    assert said == [Taken("d"), Accept(), Commit(), Accept(), Accept()], "also after the last"


def test_a_silent_cell_is_given_up_and_its_late_contribution_refused() -> None:
    update, _ = run(opened(), pulled(A), pulled(A, "g0", now=1), Worked(A, group_of("g0"), 5))
    update, said = run(update, Ticked(14, 10))
    assert said == []
    update, said = run(update, Ticked(16, 10), pulled(B, now=16))
    assert said == [CellLeft(A, "silent for 10 s"), CellJoined(B), Give(("g0",))]
    update, said = run(update, handed(A, "g0", "g1"))
    assert said == [Refuse("g0 is not leased to it once")]
    assert run(update, pulled(A, "g0", "g1", now=17))[1] == [Discard("g0 is not leased to it")]


def test_a_cell_that_was_started_again_lost_what_it_held() -> None:
    update, _ = run(opened(), pulled(A))
    update, said = run(update, pulled(Cell("a", "2")))
    assert said == [CellLeft(A, "its process was started again"), CellJoined(Cell("a", "2")), Give(("g0",))]


def test_what_belongs_to_another_update_or_attempt_is_refused() -> None:
    update, _ = run(opened(), pulled(A))
    others: list[dict[str, Any]] = [{"attempt": "s"}, {"update": 2}]
    for other in others:
        assert isinstance(run(update, pulled(A, "g0", **other))[1][-1], Discard)
        assert isinstance(run(update, handed(A, "g0", **other))[1][-1], Refuse)


def test_a_contribution_is_refused_whole() -> None:
    update, _ = run(opened(3), pulled(A), pulled(B))
    update, said = run(update, handed(A, "g0", "g1"))
    assert isinstance(said[-1], Refuse)
    assert update.contributions == {}
    assert update.waiting == ("g0", "g2"), "its groups are to be computed again; the other's are not"
    update, _ = run(update, pulled(A))
    assert isinstance(run(update, handed(A, "g0", "g0"))[1][-1], Refuse)


def test_a_cell_that_leaves_with_or_without_a_gradient() -> None:
    update, _ = run(opened(), pulled(A), pulled(A, "g0"))
    with_one, said = run(update, handed(A, "g0", leaving=True))
    assert said == [Taken("c"), CellLeft(A, "another role"), Accept()]
    assert with_one.waiting == ("g1",)
    without, said = run(update, handed(A, leaving=True))
    assert said == [CellLeft(A, "another role"), Accept()]
    assert without.waiting == ("g0", "g1")


def test_a_gradient_that_cannot_be_read_is_computed_again() -> None:
    update, said = run(opened(), pulled(A), Unusable(A, "it is no gradient"))
    assert said[-1] == CellLeft(A, "it is no gradient")
    assert update.waiting == ("g0", "g1")


def test_a_group_that_comes_twice_is_one_and_one_too_many_is_an_error() -> None:
    update = opened()
    assert advance(update, Arrived("m0", ("g0",)))[0] == update
    with pytest.raises(ValueError, match="g9 belongs to a later one"):
        advance(update, Arrived("m9", ("g9",)))


def test_a_cell_is_given_some_of_one_message_at_a_time() -> None:
    update = Update(number=3, attempt="t", size=6, grain=2)
    for source, units in (("m0", ("a0", "a1", "a2")), ("m1", ("b0", "b1", "b2"))):
        update, _ = advance(update, Arrived(source, units))
    update, said = run(update, pulled(), pulled(), pulled(A, "a0", "a1"), pulled(B))
    gives = [effect for effect in said if isinstance(effect, Give)]
    assert gives == [Give(("a0", "a1")), Give(("a0", "a1")), Give(("a2",)), Give(("b0", "b1"))]


def test_executions_without_a_score_take_their_places_and_are_given_to_nobody() -> None:
    update = Update(number=3, attempt="t", size=3, grain=8)
    update, said = run(update, Arrived("m", ("a0", "a1"), frozenset({"a1"})), pulled(), handed(A, "a0"))
    assert said == [CellJoined(A), Give(("a0",)), Taken("c"), Accept()]
    update, said = run(update, Arrived("n", ("b0",), frozenset({"b0"})))
    assert said == [Commit()], "the last place is taken by one without a score"
    assert update.phase is Phase.COMMITTING


def test_a_heartbeat_that_names_a_group_keeps_the_leases_of_its_executions() -> None:
    update = Update(number=3, attempt="t", size=1, grain=8)
    update, _ = run(update, Arrived("m", ("r-g0-e01",)), pulled(), Worked(A, "r-g0", 9), Worked(B, "r-g0", 99))
    assert run(update, Ticked(15, 10))[1] == []
    assert run(update, Ticked(20, 10))[1] == [CellLeft(A, "silent for 10 s")]


def test_the_table_is_whole() -> None:
    events = {Arrived, Pulled, HandedOver, Unusable, Worked, Ticked, Stored}
    assert set(TABLE) == set(Phase)
    assert events - set(TABLE[Phase.COLLECTING]) == {Stored}
    assert events - set(TABLE[Phase.COMMITTING]) == {Arrived}
    assert events - set(TABLE[Phase.COMMITTED]) == {Arrived, Stored}
    with pytest.raises(ValueError, match="Stored cannot happen"):
        advance(opened(), Stored())


class Cells(RuleBasedStateMachine):
    """Cells that forget, repeat, come late and die, against what they really hold."""

    hosts = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.update = Update(number=3, attempt="t", size=SIZE, grain=2)
        self.now = 0.0
        self.held: dict[str, list[str]] = {}
        self.boots: dict[str, int] = {}
        self.names = itertools.count()
        self.sent: list[HandedOver] = []
        self.accepted: dict[str, tuple[str, ...]] = {}
        self.commits = 0

    def cell(self, host: str) -> Cell:
        return Cell(host, str(self.boots.setdefault(host, 0)))

    def go(self, event) -> tuple:
        self.update, effects = advance(self.update, event)
        self.commits += effects.count(Commit())
        return effects

    @precondition(lambda self: self.update.phase is Phase.COLLECTING and len(self.update.units) < SIZE)
    @rule(many=st.integers(1, 3), idle=st.integers(0, 3), cost=st.floats(0, 900), shared=st.sampled_from([0, 0.9]))
    def arrive(self, many: int, idle: int, cost: float, shared: float) -> None:
        at = len(self.update.units)
        units = tuple(f"g{number}" for number in range(at, min(SIZE, at + many)))
        self.go(Arrived(f"m{at}", units, frozenset(units[:idle]), dict.fromkeys(units, cost), shared * cost))

    @rule(host=hosts, lost=st.booleans())
    def pull(self, host: str, lost: bool) -> None:
        holding = self.held.setdefault(host, [])
        effects = self.go(pulled(self.cell(host), *holding, now=self.now))
        answers = [e for e in effects if isinstance(e, Give | Flush | Discard | Wait)]
        assert len(answers) == 1
        if lost:
            return
        if isinstance(answers[0], Give):
            given = answers[0].units
            assert not set(given) & set(holding)
            assert len({self.update.source[unit] for unit in given}) == 1
            assert 1 <= len(given) <= 2
            holding.extend(given)
        elif isinstance(answers[0], Discard):
            holding.clear()
        elif isinstance(answers[0], Flush):
            assert holding

    @rule(host=hosts, leaving=st.booleans(), lost=st.booleans())
    def hand_over(self, host: str, leaving: bool, lost: bool) -> None:
        holding = tuple(self.held.setdefault(host, []))
        event = handed(self.cell(host), *holding, name=f"c{next(self.names)}", leaving=leaving)
        self.sent.append(event)
        self.answer(event)
        if not lost:
            self.held[host] = []

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.answer(data.draw(st.sampled_from(self.sent)))

    def answer(self, event: HandedOver) -> None:
        effects = self.go(event)
        answers = [e for e in effects if isinstance(e, Accept | Refuse)]
        assert len(answers) == 1
        if isinstance(answers[0], Accept):
            self.accepted.setdefault(event.contribution, event.units)
        else:
            assert event.contribution not in self.accepted

    @rule(host=hosts)
    def crash(self, host: str) -> None:
        self.boots[host] = self.boots.get(host, 0) + 1
        self.held[host] = []

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.go(Ticked(self.now, 10.0))

    @precondition(lambda self: self.update.phase is Phase.COMMITTING)
    @rule()
    def store(self) -> None:
        self.go(Stored())

    @invariant()
    def each_unit_is_in_one_place(self) -> None:
        update = self.update
        assert not set(update.leased) & set(update.contributed)
        assert not update.idle & (set(update.leased) | set(update.contributed))
        inside = [unit for taken in update.contributions.values() for unit in taken.units]
        assert sorted(inside) == sorted(update.contributed)
        assert len(inside) == len(set(inside)), "no unit is in two contributions"
        told = {name: groups for name, groups in self.accepted.items() if groups}
        assert {name: taken.units for name, taken in update.contributions.items()} == told

    @invariant()
    def it_commits_once_and_when_whole(self) -> None:
        whole = len(self.update.contributed) + len(self.update.idle) == SIZE
        assert self.commits == whole == (self.update.phase is not Phase.COLLECTING)

    def teardown(self) -> None:
        """Whatever happened, one diligent cell ends the update."""
        if self.update.phase is not Phase.COLLECTING:
            return
        while len(self.update.units) < SIZE:
            self.arrive(2, 0, 1.0, 0.0)
        self.tick(11.0)
        self.crash("a")
        for _ in range(2 * SIZE):
            self.pull("a", lost=False)
        if self.update.phase is Phase.COLLECTING:
            self.hand_over("a", leaving=False, lost=False)
        assert self.update.phase is Phase.COMMITTING


TestCells = Cells.TestCase
TestCells.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.sampled_from(["g0", "g1", "g2", "x"]), max_size=4), st.sampled_from([A, B]))
def test_a_hand_over_of_any_groups_never_breaks_a_lease_of_another(groups: list[str], cell: Cell) -> None:
    update, _ = run(opened(3), pulled(A), pulled(B))
    others = {g: c for g, c in update.leased.items() if c != cell}
    after, effects = advance(update, handed(cell, *groups))
    assert others.items() <= after.leased.items()
    assert (Accept() in effects) == (set(groups) <= set(update.leases_of(cell)) and len(set(groups)) == len(groups))
    assert dataclasses.replace(update) == update, "the former state is untouched"
