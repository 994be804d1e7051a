"""The tree of calls: the same for any order, exact for each call."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trees import BadTokensError, Builder, Given, Texts, Tree, build
from opengyre.trees.blocks import BLOCK, advance, key
from opengyre.trees.calls import ids
from opengyre.trees.trie import HOPS, NOTHING, ROOT, Trie


def shape(tree: Tree) -> list[object]:
    """All that a tree says, without how it is laid out in memory."""
    nodes = [
        (
            n.call, tuple(tree.tokens(n).tolist()), n.start.depth, n.parent and n.parent.call,
            n.related and n.related.call, n.kind, n.offset, n.diagnosis, n.refused, n.parent_missing,
        )
        for n in tree.nodes
    ]  # fmt: skip
    return [*nodes, tree.figures, tree.lost]


def kinds(tree: Tree) -> list[str]:
    return [node.kind for node in tree.nodes]


def whole(*calls: tuple[list[int], list[int]], texts: Texts | None = None) -> Tree:
    """Calls with their full prompts, named a, b, c ..."""
    return build((Given(chr(97 + n), p, s, order=n) for n, (p, s) in enumerate(calls)), texts)


def test_a_call_with_its_new_tokens_or_its_whole_prompt_makes_one_tree() -> None:
    full = whole(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 9], [8]))
    short = build(
        [
            Given("a", [1, 2], [3, 4], order=0),
            Given("b", [5], [6], "a", 4, order=1),
            Given("c", [9], [8], "a", 3, order=2),
        ]
    )
    assert shape(short) == shape(full)
    assert kinds(full) == ["root", "extend", "branch"]
    assert (full.figures.path_tokens, full.figures.unique_nodes, full.figures.leaves) == (4 + 6 + 5, 8, 2)
    assert full.figures.dedup_ratio == 15 / 8


def test_a_declared_parent_is_verified_by_tokens() -> None:
    tree = build([Given("a", [1, 2], [3, 4], order=0), Given("b", [1, 2, 3, 7], [6], "a", order=1)])
    node = tree.nodes[1]
    assert (node.parent, node.kind, node.offset) == (None, "fork", 3)


def test_a_history_that_is_taken_back_to_the_end_of_a_call_is_a_fork() -> None:
    """As one that is taken back to any other place; what another agent goes on from is not taken back."""
    calls = [
        Given("a", [1, 2], [3, 4], order=0),
        Given("b", [5], [6], "a", 4, order=1),
        Given("c", [7], [8], "a", 4, order=2),
        Given("d", [9], [8], "a", 4, order=3, agent="other"),
        Given("e", [10], [8], "a", 4, order=4, role="sub-agent"),
        Given("f", [11], [8], "a", 4, order=5, role="main-summary"),
        Given("g", [11], [9], "a", 4, order=6),
    ]
    tree = build(calls)
    assert kinds(tree) == ["root", "extend", "fork", "extend", "extend", "fork", "retry"]
    assert [node.parent and node.parent.call for node in tree.nodes] == [None, *"aaaaaa"]
    assert [node.diagnosis for node in tree.nodes] == [None, None, "edit", None, None, "edit", None]
    assert (tree.nodes[2].related, tree.nodes[2].offset) == (tree.nodes[0], 4)


def test_a_declared_parent_is_taken_before_a_longer_match() -> None:
    """Two agents said the same; the second goes on from what it declares."""
    calls = [
        Given("a", [1], [2], order=0),
        Given("b", [1, 2], [3], order=1),
        Given("c", [1, 2, 3, 4], [5], "a", order=2),
    ]
    parent = build(calls).nodes[2].parent
    assert parent is not None
    assert parent.call == "a"


def test_a_call_waits_for_its_parent_and_is_refused_if_it_never_comes() -> None:
    builder = Builder()
    assert builder.add(Given("c", [7], [8], "b", 6, order=2)) == "waiting"
    assert builder.add(Given("b", [5], [6], "a", 4, order=1)) == "waiting"
    assert builder.tree().lost == {"b": "parent_missing", "c": "parent_missing"}
    assert builder.add(Given("a", [1, 2], [3, 4], order=0)) == "placed"
    tree = builder.tree()
    assert kinds(tree) == ["root", "extend", "extend"]
    assert tree.tokens(tree.nodes[2]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_whole_prompt_whose_parent_never_came_is_a_root_and_says_so() -> None:
    (node,) = build([Given("b", [1, 2], [3], "a")]).nodes
    assert (node.kind, node.parent_missing, node.refused) == ("root", True, None)


def test_the_same_call_again_is_dropped_and_another_of_its_name_refuses_both() -> None:
    builder = Builder()
    for expected in ("placed", "duplicate"):
        assert builder.add(Given("a", [1, 2], [3, 4], payload=(0.1,))) == expected
    assert builder.add(Given("b", [5], [6], "a", 4, order=1)) == "placed"
    assert builder.add(Given("a", [1, 2], [3, 4], payload=(0.2,))) == "conflict"
    assert builder.add(Given("a", [1, 2], [3, 4], payload=(0.1,))) == "conflict"
    assert builder.add(Given("r", [8], [9], order=2)) == "placed"
    tree = builder.tree()
    assert tree.figures.refused == {"conflicting_call": 1, "parent_missing": 1}
    assert [node.call for node in tree.nodes] == ["r"]
    assert tree.figures.unique_nodes == 2, "nothing is left of the refused calls' tokens"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Given("x", [-1], [2]), "token_id"),
        (Given("x", [1], [2**31]), "token_id"),
        (Given("x", [1.5], [2]), "token_id"),  # type: ignore[list-item]  # the wrong type is what is tested
        (Given("x", [[1], [2, 3]], [2]), "token_id"),  # type: ignore[list-item]  # the wrong type is what is tested
        (Given("x", [2**80], [2]), "token_id"),
        (Given("x", [1], [2], None, 3), "prefix_length"),
        (Given("x", [1], [2], "a", 5), "prefix_length"),
        (Given("x", [1], [2], "a", -1), "prefix_length"),
    ],
)
def test_what_has_no_place_is_refused_with_a_reason(call: Given, reason: str) -> None:
    builder = Builder()
    builder.add(Given("a", [1, 2], [3, 4]))
    assert builder.add(call) == "refused"
    assert builder.add(call) == "duplicate"
    assert builder.tree().lost == {"x": reason}


def test_ids_are_checked() -> None:
    assert ids(range(3)).tolist() == [0, 1, 2]
    assert ids(()).dtype == np.int32
    with pytest.raises(BadTokensError, match="whole numbers from 0"):
        ids(np.array([-1], np.int32))


def test_executions_share_nodes_and_no_lineage() -> None:
    one, two = Given("a", [1, 2], [3, 4], execution="e1"), Given("b", [1, 2], [3, 5], execution="e2")
    tree = build([one, two])
    assert kinds(tree) == ["root", "root"]
    assert tree.figures.refused == {}
    assert tree.figures.unique_nodes == 5


def test_ten_thousand_calls_that_fork_need_no_recursion() -> None:
    """Each leaves the one before inside its completion: the path to the last leads through ten thousand runs."""
    builder = Builder()
    length = 2
    builder.add(Given("c0", [1], [2], order=0))
    for turn in range(1, 10_000):
        builder.add(Given(f"c{turn}", [turn % 7], [8, 9], f"c{turn - 1}", length - (turn > 1), order=turn))
        length += 2 if turn > 1 else 3
    tree = builder.tree()
    last = max(tree.nodes, key=lambda node: node.length)
    assert last.length == length
    assert tree.figures.transitions == {"extend": 1, "fork": 9_998}


def test_block_hashes_find_the_place_behind_many_forks() -> None:
    """A whole prompt that leads through more runs than are followed one by one."""
    rng = np.random.default_rng(1)
    trie, path, end = Trie(), np.empty(0, np.int32), ROOT
    for _ in range(3 * HOPS):
        piece = rng.integers(10, 99, size=BLOCK // 2 + 7, dtype=np.int32)
        trie.insert(ROOT, np.concatenate([path, piece, [1]]).astype(np.int32))
        path = np.concatenate([path, piece, [2]]).astype(np.int32)
        end = trie.insert(ROOT, path)
        assert trie.seek(path) == end
        assert trie.tokens(end).tolist() == path.tolist()
    for depth in (1, BLOCK - 1, BLOCK, BLOCK + 1, len(path) // 2, len(path) - 1):
        changed = path.copy()
        changed[depth] = 3
        assert trie.seek(changed) == trie.prefix(end, depth)
    assert trie.size == len(path) + 3 * HOPS, "each shared token once"
    segments = trie.segments()
    assert sum(segment.end - segment.start for segment in segments) == trie.size
    assert trie.leaves == 3 * HOPS + 1


def test_the_hash_of_any_place_is_that_of_its_prefix() -> None:
    rng = np.random.default_rng(2)
    trie, path = Trie(), rng.integers(10, 99, size=5 * BLOCK, dtype=np.int32)
    trie.insert(ROOT, path[: 3 * BLOCK + 5])
    end = trie.insert(ROOT, path)
    fork = trie.insert(ROOT, np.concatenate([path[: 2 * BLOCK + 9], path[:300]]))
    for last in (end, fork):
        for depth in (1, BLOCK, BLOCK + 1, 2 * BLOCK + 9, 2 * BLOCK + 10, last.depth - 1, last.depth):
            at = trie.prefix(last, depth)
            assert key(trie._hash(at)) == key(advance(NOTHING, trie.tokens(at), 0)[1]), depth


def test_a_call_that_ends_inside_a_known_path_is_found_from_below() -> None:
    """It comes after calls that looked past its end in vain."""
    tree = whole(
        ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 20, 21], [22]), ([1, 2], [3, 4]), ([1, 2, 3, 4, 5, 20, 30], [31])
    )
    assert [node.parent and node.parent.call for node in tree.nodes] == [None, None, None, "c"]


@st.composite
def logs(draw: st.DrawFn) -> list[Given]:
    """Any log: each call goes on from an earlier one at any place in it, as a whole prompt or as what is new."""
    calls: list[Given] = []
    full: dict[str, list[int]] = {}
    for number in range(draw(st.integers(1, 10))):
        parent = draw(st.none() | st.sampled_from(sorted(full))) if full else None
        text = full[parent] if parent is not None else []
        cut = draw(st.sampled_from([len(text), draw(st.integers(0, len(text)))]))
        new = draw(st.lists(st.integers(0, 2), min_size=0 if cut else 1, max_size=3))
        sampled = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        form = draw(st.sampled_from(["new", "whole", "undeclared"]))
        name = f"c{number}"
        if form == "new" and parent is not None and cut:
            calls.append(Given(name, new, sampled, parent, cut, order=number))
        else:
            calls.append(Given(name, text[:cut] + new, sampled, parent if form == "whole" else None, order=number))
        full[name] = text[:cut] + new + sampled
    return calls


@given(logs(), st.randoms(use_true_random=False), st.booleans())
def test_a_shuffled_and_repeated_log_makes_the_same_tree(calls: list[Given], rng: random.Random, clash: bool) -> None:
    if clash:
        first = calls[rng.randrange(len(calls))]
        calls = [*calls, Given(first.call, [0, 1], [2], order=first.order, payload="another")]
    expected = shape(build(calls))
    mixed = calls + rng.choices(calls, k=len(calls))
    rng.shuffle(mixed)
    assert shape(build(mixed)) == expected


@given(logs())
def test_the_path_of_each_call_is_its_prompt_and_completion(calls: list[Given]) -> None:
    tree = build(calls)
    assert not tree.lost
    by_name = {node.call: node for node in tree.nodes}
    full: dict[str, list[int]] = {}
    for call in calls:
        before = full[call.parent or ""][: call.prefix] if call.prefix else []
        full[call.call] = [*before, *call.prompt, *call.sampled]
        node = by_name[call.call]
        assert tree.tokens(node).tolist() == full[call.call]
        assert node.events == len(call.sampled)
        if node.parent is not None:
            assert full[call.call][: node.start.depth][: node.parent.length] == full[node.parent.call]
        for other in tree.nodes[: call.order]:
            # No other call before it begins its prompt and is longer, unless a shorter one was declared.
            whole_of = full[other.call]
            if full[call.call][: node.start.depth][: len(whole_of)] == whole_of:
                assert node.parent is not None
                assert len(whole_of) <= node.parent.length or node.parent.call == call.parent
    prefixes = {tuple(text[:n]) for text in full.values() for n in range(1, len(text) + 1)}
    assert tree.figures.unique_nodes == len(prefixes)
    assert tree.figures.leaves == sum(not any((*p, t) in prefixes for t in range(3)) for p in prefixes)
    assert tree.figures.events == sum(len(call.sampled) for call in calls)
    segments = tree.trie.segments()
    assert sum(s.end - s.start for s in segments) == len(prefixes)
