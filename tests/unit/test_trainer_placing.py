"""Which executions go to which cell: cells end together, prompts are computed once, and nothing is left waiting."""

import heapq
from collections.abc import Sequence as Many

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opengyre.proto.group import Member, Sequence, Span
from opengyre.trainer.placing import OVERHEAD, Load, cost_of, load_of, makespan, pieces, plan, shared_by
from opengyre.trainer.update import Arrived, Cell, Give, Pulled, Update, advance

COSTS = st.lists(st.integers(0, 4000).map(float), min_size=1, max_size=5)


@st.composite
def loads(draw: st.DrawFn, most: int = 3) -> list[Load]:
    found = []
    for number, costs in enumerate(draw(st.lists(COSTS, min_size=1, max_size=most))):
        least = min([cost for cost in costs if cost > 0], default=0.0)
        units = tuple(f"g{number}-e{member}" for member in range(len(costs)))
        found.append(Load(units, tuple(costs), draw(st.sampled_from([0.0, 0.5, 1.0])) * least))
    return found


def best(costs: Many[float], cells: int) -> float:
    """The least makespan of these jobs, by trying all."""
    found = sum(costs)
    stack: list[tuple[int, tuple[float, ...]]] = [(0, (0.0,) * cells)]
    while stack:
        at, ends = stack.pop()
        if max(ends) >= found:
            continue
        if at == len(costs):
            found = max(ends)
            continue
        stack += [
            (at + 1, (*ends[:cell], ends[cell] + costs[at], *ends[cell + 1 :]))
            for cell in range(cells)
            if ends[cell] not in ends[:cell]
        ]
    return found


def opened(groups: Many[Load], cells: int, grain: int = 8) -> Update:
    update = Update(number=1, attempt="t", size=sum(len(load.units) for load in groups), grain=grain, cells=cells)
    for number, load in enumerate(groups):
        costs = dict(zip(load.units, load.costs, strict=True))
        update, _ = advance(update, Arrived(f"m{number}", load.units, frozenset(), costs, load.shared))
    return update


def simulate(groups: Many[Load], cells: int, *, late: float = 0.0, expected: int | None = None) -> tuple[float, list]:
    """Identical cells work off an update; the last of them comes at `late`. When the last ends, and what was given."""
    update = opened(groups, expected or cells)
    of = {unit: (load, at) for load in groups for at, unit in enumerate(load.units)}
    holding: dict[str, tuple[str, ...]] = {}
    free = [(late if number == cells - 1 else 0.0, f"c{number}") for number in range(cells)]
    given: list[tuple[str, ...]] = []
    ends = 0.0
    while free:
        now, name = heapq.heappop(free)
        held = holding.get(name, ())
        about = {"update": 1, "attempt": "t"} if held else {}
        update, effects = advance(update, Pulled(Cell(name, "1"), now, holding=held, **about))
        for effect in effects:
            if isinstance(effect, Give):
                load, _ = of[effect.units[0]]
                now += load.cost([of[unit][1] for unit in effect.units])
                holding[name] = (*held, *effect.units)
                given.append(effect.units)
                ends = max(ends, now)
                heapq.heappush(free, (now, name))
    return ends, given


@given(loads(), st.integers(1, 4))
@example([Load((f"g{n}",), (cost,)) for n, cost in enumerate((9e5, 9e5, 9e5, 9e5, 9e5, 9e5, 54e5))], 2)
@example([Load(("a", "b", "c", "d", "e"), (3e5, 3e5, 2e5, 2e5, 2e5))], 2)
def test_cells_end_within_a_third_of_the_best_schedule(groups: list[Load], cells: int) -> None:
    ends, given = simulate(groups, cells)
    assert sorted(unit for part in given for unit in part) == sorted(unit for load in groups for unit in load.units)
    bound = 4 / 3 - 1 / (3 * cells)
    alone = [load.cost([at]) for load in groups for at in range(len(load.units)) if load.costs[at] > 0]
    whole = [load.cost(range(len(load.units))) for load in groups]
    assert ends <= bound * best(whole, cells) + 1e-6
    if len(alone) <= 9:
        assert ends <= bound * best(alone, cells) + 1e-6


@given(loads(most=6), st.integers(1, 6), st.integers(1, 4))
def test_a_plan_has_every_unit_once_costliest_parts_first(groups: list[Load], cells: int, grain: int) -> None:
    parts = plan(groups, cells, grain)
    assert sorted(unit for part in parts for unit in part) == sorted(unit for load in groups for unit in load.units)
    of = {unit: (load, at) for load in groups for at, unit in enumerate(load.units)}
    costs = []
    for part in parts:
        assert len({id(of[unit][0]) for unit in part}) == 1, "of one message"
        assert len(part) <= grain
        costs.append(of[part[0]][0].cost([of[unit][1] for unit in part]))
    assert costs == sorted(costs, reverse=True)
    assert plan(groups, cells, grain) == parts


@given(loads(most=4), st.integers(2, 4), st.data())
def test_whatever_happens_to_cells_a_diligent_one_is_given_all(groups, cells, data) -> None:
    update = opened(groups, cells)
    for _ in range(data.draw(st.integers(0, 6))):
        name = data.draw(st.sampled_from("abc"))
        boot = data.draw(st.sampled_from("12"))
        update, _ = advance(update, Pulled(Cell(name, boot), 0.0))
    taken: tuple[str, ...] = ()
    for name in "abc":  # They are started again, and what they lost waits.
        update, _ = advance(update, Pulled(Cell(name, "3"), 0.0))
        update, _ = advance(update, Pulled(Cell(name, "4"), 0.0))
    waiting = len(update.waiting) + len(update.leases_of(Cell("c", "4")))
    cell = Cell("c", "4")
    for _ in range(waiting + 1):
        about = {"update": 1, "attempt": "t"} if taken else {}
        update, effects = advance(update, Pulled(cell, 0.0, holding=taken, **about))
        taken += next((effect.units for effect in effects if isinstance(effect, Give)), ())
    assert len(taken) == len(set(taken)) == waiting


def test_the_longest_is_given_first_whenever_it_came() -> None:
    groups = [Load((f"g{n}",), (float(cost),)) for n, cost in enumerate((100, 300, 900, 200))]
    assert simulate(groups, 2)[1] == [("g2",), ("g1",), ("g3",), ("g0",)]


def test_a_group_whose_prompt_costs_most_stays_together_and_one_without_is_shared_out() -> None:
    units = tuple(f"e{member}" for member in range(8))
    dear = Load(units, (8512.0,) * 8, 8192.0)
    assert plan([dear, Load(("x", "y"), (11_000.0, 800.0))], 2, 8) == (("x",), units, ("y",))
    cheap = Load(units, (1000.0,) * 8, 10.0)
    assert [len(part) for part in plan([cheap], 4, 8)] == [2, 2, 2, 2]
    assert [len(part) for part in plan([cheap], 1, 8)] == [8], "one cell gains nothing by cutting"
    assert [len(part) for part in plan([cheap], 1, 3)] == [3, 3, 2]


def test_a_cell_that_joins_half_way_gets_half_of_what_is_left() -> None:
    groups = [Load(tuple(f"g{n}-e{m}" for m in range(4)), (1000.0,) * 4) for n in range(4)]
    alone, _ = simulate(groups, 1)
    ends, given = simulate(groups, 2, late=alone / 2, expected=1)
    assert [len(part) for part in given[:2]] == [4, 4], "as long as it was alone"
    assert ends < 0.80 * alone, "0.75 were ideal"


def test_bounds_on_the_makespan_hold_for_equal_parts() -> None:
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert best([3, 3, 2, 2, 2], 2) == 6
    assert makespan([], 3) == 0


@given(COSTS, st.floats(0, 5000), st.integers(1, 4))
@example([1.0, 0.0], 5e-324, 2)
def test_pieces_are_a_partition_under_the_grain(costs: list[float], room: float, grain: int) -> None:
    load = Load(tuple(map(str, range(len(costs)))), tuple(costs))
    found = pieces(load, room, grain)
    assert sorted(at for part in found for at in part) == list(range(len(costs)))
    assert max(map(len, found)) <= grain
    if room >= sum(costs) and grain >= len(costs):
        assert len(found) == 1


def member(name: str, prompt: int, sampled: int, *, advantage: float = 1.0, first: int = 0, **changes) -> Member:
    tokens = (first, *range(1, prompt + sampled))
    span = Span(start=prompt, end=prompt + sampled, logprobs=(0.0,) * sampled, versions=(0,) * sampled, temperature=1.0)
    fields = {"trained_tokens": sampled, "path_tokens": prompt + sampled, "score": 0.0, **changes}
    return Member(execution=name, advantage=advantage, sequences=(Sequence(tokens=tokens, spans=(span,)),), **fields)


def test_what_an_execution_costs() -> None:
    assert cost_of(member("a", 60, 40)) == pytest.approx(100, rel=0.01)
    assert cost_of(member("a", 60, 40, advantage=0.0)) == 0
    assert cost_of(member("a", 60, 40, advantage=0.0), every=True) == cost_of(member("a", 60, 40))
    short, long = cost_of(member("a", 100, 900)), cost_of(member("a", 100, 63_900))
    assert long > 2 * 64 * short, "attention counts with depth"
    both = member("a", 60, 40)
    branched = Member(
        execution="a", score=0, advantage=1, sequences=both.sequences * 2, trained_tokens=80, path_tokens=400,
        unique_tokens=140,
    )  # fmt: skip
    assert 140 <= cost_of(branched) < 142, "what paths share counts once"


def test_what_members_share_is_their_common_prompt() -> None:
    same = [member("a", 60, 40), member("b", 60, 10)]
    assert shared_by(same) == pytest.approx(60, rel=0.01)
    assert shared_by(same[:1]) == 0
    assert shared_by([*same, member("c", 60, 10, first=7)]) == 0
    load = load_of(("a", "b", "idle"), [*same, member("other", 60, 10)])
    assert load.units == ("a", "b", "idle")
    assert load.costs[2] == 0
    assert load.cost([0, 1]) == pytest.approx(60 + 40 + 10 + OVERHEAD, rel=0.01)
    assert load.cost([2]) == 0
