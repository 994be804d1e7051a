"""Nodes that are told apart by more than their tokens: adapter, media, recorded routes of experts."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.group import RouteRows
from opengyre.proto.traj import Call, Media, Routes, VersionSpan
from opengyre.trajectory.tree import fault_of, paths
from opengyre.trees import Builder, Given, Tree, build
from opengyre.trees.keys import Dress, Keys, Rows, covers, cut

LORA = "adapter-1"


def whole(*calls: tuple[list[int], list[int], dict[str, Any]]) -> Tree:
    return build(
        Given(chr(97 + n), prompt, sampled, order=n, **more) for n, (prompt, sampled, more) in enumerate(calls)
    )


def kinds(tree: Tree) -> list[str]:
    return [node.kind for node in tree.nodes]


def call(name: str, parent: str | None, prefix: int, prompt: tuple[int, ...], sampled: tuple[int, ...], **more) -> Call:
    fields = {"versions": (VersionSpan(version=3, start=0, end=len(sampled)),), **more}
    return Call(
        run="r", group="g", execution="e", index=0, attempt=0, call=name, turn=0, request_digest="d", parent=parent,
        prefix_tokens=prefix, prompt_ids=prompt, sampled_ids=sampled, finish_reason="stop", text="", hosts=(),
        logprobs=(-0.5,) * len(sampled), temperature=1.0, **fields,
    )  # fmt: skip


def test_calls_of_another_adapter_share_no_node_and_no_lineage() -> None:
    tree = whole(
        ([1, 2], [3], {}), ([1, 2, 3, 4], [5], {"adapter": LORA}), ([1, 2, 3, 4, 5, 6], [7], {"adapter": LORA})
    )
    assert kinds(tree) == ["root", "branch", "extend"]
    assert tree.figures.unique_nodes == 3 + 7
    assert [tree.tokens(node).tolist() for node in tree.nodes] == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]
    assert kinds(whole(([1], [2], {}), ([1], [3], {"adapter": LORA}))) == ["root", "branch"], "no retry of it"
    assert kinds(whole(([1], [2], {"adapter": LORA}), ([1], [3], {"adapter": LORA}))) == ["root", "retry"]


def test_a_call_under_another_adapter_has_its_parents_tokens_at_nodes_of_its_own() -> None:
    """As our endpoint writes it: new tokens after a prefix of a call under another policy."""
    found = paths([call("a", None, 0, (1, 2), (3,)), call("b", "a", 3, (4,), (5,), adapter=LORA)])
    assert [(s.tokens, s.adapter, [(p.start, p.end) for p in s.spans]) for s in found.sequences] == [
        ((1, 2, 3), None, [(2, 3)]), ((1, 2, 3, 4, 5), LORA, [(4, 5)]),
    ]  # fmt: skip
    assert (found.unique_tokens, found.transitions) == (8, {"branch": 1})


def test_other_images_in_the_same_placeholder_are_other_nodes() -> None:
    image, other = Media(position=1, hash="one"), Media(position=1, hash="two")
    calls = [
        call("a", None, 0, (1, 90, 90, 2), (3,), media=(image,)),
        call("b", "a", 5, (4,), (5,)),
        call("c", None, 0, (1, 90, 90, 2), (3,), media=(other,)),
        call("d", None, 0, (1, 90, 90, 2), (6,), media=(image,)),
    ]
    found = paths(calls)
    assert found.unique_tokens == 7 + 4 + 1
    assert found.refused == {"superseded": 1}, "d asks what a asked, and a was used; c asks something else"
    assert [(s.tokens, s.media) for s in found.sequences] == [
        ((1, 90, 90, 2, 3, 4, 5), (image,)), ((1, 90, 90, 2, 3), (other,)),
    ]  # fmt: skip
    assert fault_of(call("a", "p", 3, (1,), (2,), media=(image,))) == "media_position"


def routes(blob: str, start: int, rows: int, sampled: int, version: int = 3) -> Routes:
    return Routes(
        blob=blob, start=start, rows=rows, versions=(VersionSpan(version=version, start=0, end=sampled),)
    )  # fmt: skip


def test_routes_go_along_a_path_each_token_with_its_row() -> None:
    """The last token of `a` has no row when `a` ends; the prefill of `b` has it, and so has that of `c`, in its own."""
    calls = [
        call("a", None, 0, (1, 2), (3, 4), routes=routes("A", 0, 3, 2)),
        call("b", "a", 4, (5,), (6,), routes=routes("B", 3, 2, 1)),
        call("c", "a", 3, (7,), (8,), routes=routes("C", 3, 1, 1)),
    ]
    found = paths(calls)
    assert found.refused == {}
    assert [s.routes for s in found.sequences] == [
        (RouteRows(start=0, end=3, blob="A", first=0), RouteRows(start=3, end=5, blob="B", first=0)),
        (RouteRows(start=0, end=3, blob="A", first=0), RouteRows(start=3, end=4, blob="C", first=0)),
    ]
    assert found.unique_tokens == 4 + 2 + 2
    plain = paths([msgspec.structs.replace(one, routes=None) for one in calls])
    assert [s.routes for s in plain.sequences] == [(), ()]


def test_a_prefill_with_rows_of_its_own_for_the_history_shares_no_node_with_it() -> None:
    """Its log-probs were taken under these rows. What `a` sampled is trained under those of `a`."""
    calls = [
        call("a", None, 0, (1, 2), (3, 4), routes=routes("A", 0, 3, 2)),
        call("b", "a", 4, (5,), (6,), routes=routes("B", 0, 5, 1)),
    ]
    found = paths(calls)
    assert [(s.tokens, len(s.spans), s.routes[0].blob) for s in found.sequences] == [
        ((1, 2, 3, 4), 1, "A"), ((1, 2, 3, 4, 5, 6), 1, "B"),
    ]  # fmt: skip
    assert found.unique_tokens == 4 + 6 - 1, "the first token has nothing before it"


def test_a_hole_in_the_rows_of_a_path_is_refused_with_a_reason() -> None:
    calls = [
        call("a", None, 0, (1, 2), (3, 4), routes=routes("A", 0, 3, 2)),
        call("b", "a", 4, (5,), (6,), routes=routes("B", 4, 1, 1)),
        call("c", "b", 6, (7,), (8,), routes=routes("C", 5, 2, 1)),
        call("d", None, 0, (1, 1), (8,), routes=routes("D", 0, 1, 1)),
    ]
    found = paths(calls)
    assert found.refused == {"routes_gap": 3}
    assert found.trained_tokens == 2


def test_the_same_prompt_again_is_a_retry_also_with_rows_of_its_own() -> None:
    calls = [
        call("a", None, 0, (1, 2), (3,), routes=routes("A", 0, 2, 1)),
        call("b", None, 0, (1, 2), (4,), routes=routes("B", 0, 2, 1)),
        call("c", "b", 3, (5,), (6,), routes=routes("C", 2, 2, 1)),
    ]
    found = paths(calls)
    assert (found.refused, found.transitions) == ({"superseded": 1}, {"extend": 1, "retry": 1})
    assert [s.tokens for s in found.sequences] == [(1, 2, 4, 5, 6)]


def test_rows_are_cut_and_looked_through() -> None:
    rows = (Rows("A", 0, 4, 2), Rows("B", 4, 9))
    assert cut(rows, 3, 6) == (Rows("A", 3, 4, 5), Rows("B", 4, 6))
    assert covers(rows, 9)
    assert not covers(rows, 10)
    assert not covers((Rows("A", 1, 4),), 3)
    assert not covers((Rows("A", 0, 2), Rows("B", 3, 4)), 4)


def test_what_is_not_dressed_is_its_token() -> None:
    keys = Keys()
    assert keys.number(Dress(7)) == 7
    assert not keys
    one, two = keys.number(Dress(7, LORA)), keys.number(Dress(7, media="x"))
    assert one != two
    assert max(one, two) < 0
    assert keys.number(Dress(7, LORA)) == one
    assert [keys.dress(number).token for number in (7, one, two)] == [7, 7, 7]


Model = dict[str, tuple[list[int], str | None, dict[int, str], dict[int, tuple[str, int]]]]
"""Call -> its whole tokens, adapter, media by place, rows by place."""


@st.composite
def dressed(draw: st.DrawFn) -> tuple[list[Given], Model]:
    """Any log in which some calls have an adapter, media in their new tokens, rows from any place in what is known."""
    calls: list[Given] = []
    model: Model = {}
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.sampled_from(sorted(model))) if model else None
        text, was, media, rows = model[parent] if parent is not None else ([], None, {}, {})
        prefix = draw(st.integers(0, len(text)))
        new = draw(st.lists(st.integers(0, 1), min_size=0 if prefix else 1, max_size=3))
        sampled = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
        adapter = draw(st.sampled_from([None, None, "x", "y", was]))
        placed = draw(st.dictionaries(st.integers(prefix, prefix + len(new) - 1), st.sampled_from("pq"))) if new else {}
        end = prefix + len(new) + len(sampled)
        own: Rows | None = None
        if draw(st.booleans()):
            own = Rows(draw(st.sampled_from("AB")), draw(st.integers(0, prefix)), end - draw(st.integers(0, 1)))
        known = {place: row for place, row in rows.items() if place < prefix and adapter == was}
        if own is not None:
            known = {place: row for place, row in known.items() if place < own.start}
            known |= {place: (own.blob, place - own.start) for place in range(own.start, own.end)}
        name = f"c{number}"
        before = {place: one for place, one in media.items() if place < prefix}
        model[name] = ([*text[:prefix], *new, *sampled], adapter, before | placed, known)
        calls.append(
            Given(
                name, new, sampled, parent if prefix else None, prefix or None, number, adapter=adapter,
                media=tuple(sorted(placed.items())), rows=own,
            )
        )  # fmt: skip
    return calls, model


@given(dressed(), st.randoms(use_true_random=False))
def test_nodes_are_shared_just_where_all_that_a_token_stands_in_is_the_same(found, rng: random.Random) -> None:
    calls, model = found
    tree = build(calls)
    assert not tree.lost
    prefixes: set[tuple[object, ...]] = set()
    for node in tree.nodes:
        text, adapter, media, rows = model[node.call]
        assert tree.tokens(node).tolist() == text
        assert tree.media(node) == tuple(sorted(media.items()))
        assert {p: (r.blob, r.first + p - r.start) for r in node.rows for p in range(r.start, r.end)} == rows
        path = [(token, media.get(n), rows.get(n - 1)) for n, token in enumerate(text)]
        prefixes |= {(adapter, *path[:length]) for length in range(1, len(path) + 1)}
        gap = node.given.rows is not None and any(place not in rows for place in range(len(text) - 1))
        assert (node.refused == "routes_gap") == gap
        if node.parent is not None:
            assert model[node.parent.call][1] == adapter
    assert tree.figures.unique_nodes == len(prefixes)
    mixed = calls + rng.choices(calls, k=len(calls))
    rng.shuffle(mixed)
    builder = Builder()
    for one in mixed:
        builder.add(one)
    again = builder.tree()
    assert again.figures == tree.figures
    assert [(n.call, n.kind, n.parent and n.parent.call, n.refused) for n in again.nodes] == [
        (n.call, n.kind, n.parent and n.parent.call, n.refused) for n in tree.nodes
    ]


@pytest.mark.parametrize("field", ["adapter", "media", "rows"])
def test_the_same_id_with_another_of_these_is_a_conflict(field: str) -> None:
    builder = Builder()
    builder.add(Given("a", [1, 2], [3]))
    other: dict[str, Any] = {"adapter": LORA, "media": ((0, "x"),), "rows": Rows("A", 0, 2)}
    assert builder.add(Given("a", [1, 2], [3], **{field: other[field]})) == "conflict"
