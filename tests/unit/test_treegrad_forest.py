"""The forest holds each trained prefix once and each event as it came; parts of it are forests of their paths."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.group import Sequence, Span
from opengyre.treegrad.forest import ROOT, Forest, ForestError, Path, build
from opengyre.treegrad.plan import plan
from opengyre.treegrad.split import CostModel, cost, split


def _path(rng: random.Random, tokens: tuple[int, ...], execution: int) -> Path:
    cuts = sorted(rng.randint(1, len(tokens)) for _ in range(rng.choice((2, 4))))
    spans = tuple(
        Span(
            start=a,
            end=b,
            logprobs=tuple(-rng.random() for _ in range(a, b)),
            versions=tuple(rng.randint(0, 3) for _ in range(a, b)),
            temperature=rng.choice((1.0, 0.5)),
            advantage=rng.choice((None, 3.0)),
            weight=rng.choice((1.0, 2.0)),
        )
        for a, b in zip(cuts[::2], cuts[1::2], strict=True)
    )
    return Path(Sequence(tokens=tokens, spans=spans), rng.random(), rng.random(), execution)


@st.composite
def _paths(draw: st.DrawFn) -> list[Path]:
    """Few token values, so that much is shared; equal paths, prefixes and several roots among them."""
    tokens = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=0, max_size=10))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return [_path(rng, tuple(t), i // 2) for i, t in enumerate(tokens)]


def _prefix(forest: Forest, node: int) -> tuple[int, ...]:
    segment = int(forest.segment_of(np.asarray([node]))[0])
    above = forest.lineage(segment)[:-1]
    tokens = [t for s in above for t in forest.tokens[forest.first[s] : forest.first[s + 1]]]
    assert len(tokens) == forest.depth[segment]
    return (*tokens, *forest.tokens[forest.first[segment] : node + 1])


def _trained(path: Path) -> int:
    return max((s.end for s in path.sequence.spans if s.end > s.start), default=0)


@given(_paths())
def test_each_trained_prefix_is_one_node_and_each_event_a_row(paths) -> None:
    forest = build(paths)
    wanted = {path.sequence.tokens[:n] for path in paths for n in range(1, _trained(path) + 1)}
    assert {_prefix(forest, node) for node in range(forest.nodes)} == wanted
    assert forest.nodes == len(wanted)
    rows = [
        (path.sequence.tokens[: at + 1], logp, path.advantage if span.advantage is None else span.advantage,
         path.weight * span.weight, span.temperature, version, index, path.execution)
        for index, path in enumerate(paths)
        for span in path.sequence.spans
        for at, logp, version in zip(range(span.start, span.end), span.logprobs, span.versions, strict=True)
    ]  # fmt: skip
    t = forest.events
    columns = (t.behaviour, t.advantage, t.weight, t.temperature, t.version, t.sequence, t.execution)
    found = [(_prefix(forest, int(t.node[row])), *(column[row] for column in columns)) for row in range(len(t))]
    assert found == rows
    assert forest.path_lengths().tolist() == [_trained(path) for path in paths]


@given(_paths())
def test_segments_are_in_preorder_with_something_trained_below_and_none_is_an_only_child(paths) -> None:
    forest = build(paths)
    assert all(forest.parent[s] < s for s in range(forest.segments))
    live = {int(s) for node in forest.events.node for s in forest.lineage(int(forest.segment_of(node)))}
    assert live == set(range(forest.segments))
    children = np.bincount(forest.parent[forest.parent != ROOT], minlength=forest.segments)
    assert not (children == 1).any()
    for segment in range(forest.segments):
        below = [s for s in range(forest.segments) if segment in forest.lineage(s)]
        assert below == list(range(segment, segment + len(below)))


@given(_paths(), st.data())
def test_a_selection_is_the_forest_of_its_paths(paths, data) -> None:
    forest = build(paths)
    chosen = data.draw(st.sets(st.sampled_from(range(len(paths))))) if paths else set()
    part = forest.select(chosen)
    alone = build([path for index, path in enumerate(paths) if index in chosen])
    assert {_prefix(part, n) for n in range(part.nodes)} == {_prefix(alone, n) for n in range(alone.nodes)}
    assert part.events.behaviour.tolist() == alone.events.behaviour.tolist()
    assert [_prefix(part, int(n)) for n in part.events.node] == [_prefix(alone, int(n)) for n in alone.events.node]
    assert set(part.events.sequence) <= chosen
    assert [n for i, n in enumerate(part.path_lengths()) if i in chosen] == alone.path_lengths().tolist()


@given(_paths(), st.integers(1, 40), st.sampled_from((CostModel(), CostModel(1.0, 0.3))))
def test_parts_hold_each_sequence_once_and_keep_the_budget(paths, budget, model) -> None:
    forest = build(paths)
    parts = split(forest, budget, model)
    assert sorted(s for part in parts for s in part) == [i for i, path in enumerate(paths) if _trained(path)]
    costs = [cost(forest.select(part), model).work for part in parts]
    assert all(c <= budget + 1e-9 or len(part) == 1 for c, part in zip(costs, parts, strict=True))
    whole = cost(forest, model)
    assert sum(costs) >= whole.work - 1e-9
    if whole.work <= budget and paths:
        assert len(parts) <= 1
    assert whole.flat_work == pytest.approx(sum(model.upto(_trained(path)) for path in paths))


def _plain(tokens: tuple[int, ...]) -> Path:
    span = Span(start=1, end=len(tokens), logprobs=(-1.0,) * (len(tokens) - 1), versions=(0,) * (len(tokens) - 1),
                temperature=1.0)  # fmt: skip
    return Path(Sequence(tokens=tokens, spans=(span,)), 1.0, 1.0)


def test_a_forest_is_cut_where_least_is_computed_twice() -> None:
    """Two trunks of 10 tokens with two leaves each: the cut is between the trunks, although three leaves would fit."""
    trunks = [(0, *([trunk] * 9)) for trunk in (1, 2)]
    forest = build([_plain((*trunk, leaf, 5)) for trunk in trunks for leaf in (3, 4)])
    assert sorted(map(sorted, split(forest, 26))) == [[0, 1], [2, 3]]
    assert forest.nodes == 1 + 2 * (9 + 2 * 2)


def test_the_path_with_most_below_comes_last() -> None:
    forest = build([_plain((0, 1, 1, 1, 1, 1)), _plain((0, 2, 2)), _plain((0, 1, 1, 3))])
    assert forest.tokens.tolist() == [0, 2, 2, 1, 1, 3, 1, 1, 1]


def test_a_very_deep_forest_is_no_deep_recursion() -> None:
    tokens = tuple(range(1500))
    forest = build([_plain((*tokens[: n + 2], 7)) for n in range(10, 1110)])
    assert (forest.segments, forest.longest()) == (2 * 1100 - 1, 1112)
    assert len(forest.lineage(forest.segments - 1)) == 1100
    assert [len(part) for part in split(forest, 10_000)] == [1100]


@given(_paths(), st.integers(1, 7), st.sets(st.integers(0, 40)))
def test_chunks_cover_segments_in_order(paths, size, cuts) -> None:
    forest = build(paths)
    units = plan(forest, size, cuts=cuts)
    assert [unit.parent for unit in units] == forest.parent.tolist()
    for segment, unit in enumerate(units):
        covered = [node for chunk in unit.chunks for node in range(chunk.low, chunk.high)]
        assert covered == list(range(forest.first[segment], forest.first[segment + 1]))
        assert all(chunk.tokens <= size for chunk in unit.chunks)
        before = unit.chunks[0].low
        assert [c.position for c in unit.chunks] == [forest.depth[segment] + c.low - before for c in unit.chunks]
    starts = {chunk.low for unit in units for chunk in unit.chunks}
    assert {cut for cut in cuts if cut < forest.nodes} <= starts


@given(_paths(), st.integers(2, 60))
def test_a_pack_holds_whole_subtrees_in_which_a_node_sees_its_ancestors(paths, limit) -> None:
    forest = build(paths)
    units = plan(forest, 64, limit)
    chunks = [chunk for unit in units for chunk in unit.chunks]
    assert [node for c in chunks for node in range(c.low, c.high)] == list(range(forest.nodes))
    for number, unit in enumerate(units):
        if not unit.packed:
            continue
        assert number not in {other.parent for other in units}
        (chunk,) = unit.chunks
        assert chunk.tokens <= limit
        assert chunk.pack is not None
        trunk = () if unit.parent == ROOT else _prefix(forest, units[unit.parent].chunks[-1].high - 1)
        assert len(trunk) == chunk.position
        sees = chunk.pack.sees()
        for place in range(chunk.tokens):
            prefix = _prefix(forest, chunk.low + place)
            visible = [*trunk, *(int(forest.tokens[chunk.low + other]) for other in np.flatnonzero(sees[place]))]
            assert tuple(visible) == prefix
            assert chunk.pack.positions[place] == len(prefix) - 1
            before = int(chunk.pack.previous[place])
            assert (trunk if not before else _prefix(forest, chunk.low + before - 1)) == prefix[:-1]


def test_small_branches_are_packed_and_the_long_one_is_not() -> None:
    trunk = (0,) * 20
    forest = build([_plain((*trunk, leaf, *([5] * (30 if leaf == 3 else 2)))) for leaf in range(1, 5)])
    units = plan(forest, 64, 16)
    assert [(unit.packed, unit.chunks[0].tokens) for unit in units] == [(False, 20), (True, 9), (False, 31)]
    assert not any(unit.packed for unit in plan(forest, 64, 16, cuts=[3]))


@pytest.mark.parametrize(
    ("spans", "names"),
    [
        ([(0, 2, 2, 1.0)], r"\[1, 4\)"),
        ([(2, 5, 3, 1.0)], r"\[1, 4\)"),
        ([(1, 3, 1, 1.0)], "log-probs"),
        ([(1, 2, 1, 0.0)], "temperature"),
        ([(1, 3, 2, 1.0), (2, 4, 2, 1.0)], "token 2"),
    ],
)
def test_what_does_not_fit_is_refused(spans, names) -> None:
    made = tuple(Span(start=a, end=b, logprobs=(0.0,) * n, versions=(0,) * n, temperature=t) for a, b, n, t in spans)
    with pytest.raises(ForestError, match=names):
        build([Path(Sequence(tokens=(1, 2, 3, 4), spans=made), 1.0, 1.0)])


def test_settings_that_make_no_sense_are_refused() -> None:
    forest = build([_plain((0, 1))])
    with pytest.raises(ValueError, match="budget is 0"):
        split(forest, 0)
    with pytest.raises(ValueError, match="chunk is 0"):
        plan(forest, 0)
    with pytest.raises(ValueError, match="token > 0"):
        CostModel(0.0)
