"""The tree of an execution: each sampled token is trained once, whatever the shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.formats import Forest, Source, read_tree
from opengyre.learn import gradient
from opengyre.proto import codec
from opengyre.proto.run import Sampling
from opengyre.proto.traj import Call, VersionSpan
from opengyre.trajectory.tree import paths


def call(name: str, parent: str | None, prefix: int, prompt: tuple[int, ...], sampled: tuple[int, ...], **more) -> Call:
    fields = {
        "logprobs": tuple(-token / 1000 for token in sampled),
        "versions": (VersionSpan(version=3, start=0, end=len(sampled)),),
        "temperature": 1.0,
        **more,
    }
    return Call(
        run="r", group="g", execution="e", index=0, attempt=0, call=name, turn=0, request_digest="d", parent=parent,
        prefix_tokens=prefix, prompt_ids=prompt, sampled_ids=sampled, finish_reason="stop", text="", hosts=(), **fields,
    )  # fmt: skip


def shape(calls: list[Call]) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    return [(s.tokens, [(span.start, span.end) for span in s.spans]) for s in paths(calls).sequences]


A = call("a", None, 0, (1, 2), (3, 4))


def test_calls_that_extend_make_one_sequence() -> None:
    b = call("b", "a", 4, (5,), (6,))
    c = call("c", "b", 6, (), (7, 8))
    assert shape([A, b, c]) == [((1, 2, 3, 4, 5, 6, 7, 8), [(2, 4), (5, 6), (6, 8)])]


def test_a_shared_token_is_trained_in_the_first_leaf_only() -> None:
    b = call("b", "a", 4, (5,), (6,))
    c = call("c", "a", 4, (7,), (8,))
    assert shape([A, b, c]) == [((1, 2, 3, 4, 5, 6), [(2, 4), (5, 6)]), ((1, 2, 3, 4, 7, 8), [(4 + 1, 6)])]


def test_a_fork_inside_a_completion_keeps_both_calls() -> None:
    b = call("b", "a", 3, (9,), (6,))
    assert shape([A, b]) == [((1, 2, 3, 4), [(2, 4)]), ((1, 2, 3, 9, 6), [(4, 5)])]


def test_a_fork_inside_the_history_goes_back_to_the_grandparent() -> None:
    b = call("b", "a", 4, (5, 6), (7,))
    c = call("c", "b", 5, (8,), (9,))
    assert shape([A, b, c]) == [((1, 2, 3, 4, 5, 6, 7), [(2, 4), (6, 7)]), ((1, 2, 3, 4, 5, 8, 9), [(6, 7)])]


def test_a_retry_that_was_not_used_is_not_trained() -> None:
    first = call("b", "a", 4, (5,), (6,))
    second = call("c", "a", 4, (5,), (7,))
    after = call("d", "c", 6, (8,), (9,))
    found = paths([A, first, second, after])
    assert found.refused == {"superseded": 1}
    assert [s.tokens for s in found.sequences] == [(1, 2, 3, 4, 5, 7, 8, 9)]
    last = paths([A, first, second])
    assert [s.tokens for s in last.sequences] == [(1, 2, 3, 4, 5, 7)], "none was used: the last is live"


def test_choices_that_were_all_asked_for_are_all_trained() -> None:
    calls = [call(n, None, 0, (1,), (t,), choices=2) for n, t in (("a", 2), ("b", 3))]
    assert (paths(calls).refused, paths(calls).trained_tokens) == ({}, 2)


def test_both_of_two_retries_that_were_used_are_trained() -> None:
    calls = [call(n, None, 0, (1,), (t,)) for n, t in (("a", 2), ("b", 3))]
    calls += [call("c", "a", 2, (4,), (5,)), call("d", "b", 2, (4,), (5,))]
    assert paths(calls).refused == {}
    assert paths(calls).trained_tokens == 4


def test_what_cannot_be_trained_is_refused_by_reason_and_still_is_context() -> None:
    bad = call("a", None, 0, (1, 2), (3, 4), logprobs=(-0.1,))
    good = call("b", "a", 4, (5,), (6,))
    found = paths([bad, good])
    assert found.refused == {"logprobs_length": 1}
    assert shape([bad, good]) == [((1, 2, 3, 4, 5, 6), [(5, 6)])]


def test_each_reason() -> None:
    span = VersionSpan(version=1, start=0, end=1)
    wrong = {
        "empty_completion": call("a", None, 0, (1,), ()),
        "empty_prompt": call("a", None, 0, (), (1,)),
        "logprobs_value": call("a", None, 0, (1,), (2,), logprobs=(float("nan"),)),
        "token_id": call("a", None, 0, (-1,), (2,)),
        "temperature": call("a", None, 0, (1,), (2,), temperature=0.0),
        "version_spans": call("a", None, 0, (1,), (2, 3), versions=(span,)),
        "parent_missing": call("a", "nobody", 1, (1,), (2,)),
        "prefix_length": call("a", None, 5, (1,), (2,)),
    }
    for reason, one in wrong.items():
        found = paths([one])
        assert (found.refused, found.sequences) == ({reason: 1}, ()), reason
    assert paths([A, call("a", None, 0, (1,), (9,))]).refused == {"conflicting_call": 1}
    assert paths([A, A]).refused == {}


def test_a_whole_prompt_needs_no_parent() -> None:
    found = paths([call("a", "nobody", 0, (1,), (2,))])
    assert (found.refused, found.trained_tokens) == ({}, 1)


def test_a_bound_leaves_out_and_says_what() -> None:
    calls = [A, call("b", None, 0, (7, 7, 7, 7), (8, 8, 8)), call("c", "a", 4, (9,), (9,))]
    assert paths(calls).left_out == {}
    found = paths(calls, Sampling(j_max=1), seed=3)
    assert [(s.role, s.tokens) for s in found.sequences] == [("main", (1, 2, 3, 4, 9, 9))]
    assert found.left_out == {"sub-agent": 3}
    assert (found.path_tokens, found.unique_tokens, found.transitions) == (17, 13, {"branch": 1, "extend": 1})
    assert paths(calls, Sampling(j_max=2), seed=3).left_out == {}


def test_alternatives_that_share_a_prompt_share_their_weight_if_so_wished() -> None:
    calls = [call(n, None, 0, (1,), (t,)) for n, t in (("a", 2), ("b", 3))]
    calls += [call("c", "a", 2, (4,), (5,)), call("d", "b", 2, (4,), (5,)), call("e", "b", 2, (6,), (7,))]
    for sampling, expected in ((Sampling(), {1.0}), (Sampling(alternatives="leaves"), {5 / 8, 10 / 8})):
        spans = [span for s in paths(calls, sampling).sequences for span in s.spans]
        assert {round(span.weight, 9) for span in spans} == {round(weight, 9) for weight in expected}
        assert sum(span.weight * (span.end - span.start) for span in spans) == pytest.approx(5)


def test_an_id_outside_the_vocabulary_is_refused_with_what_goes_on_from_it() -> None:
    """It has no place in any sequence: the policy has no embedding of it."""
    calls = [A, call("b", "a", 4, (5,), (9,)), call("c", "b", 6, (6,), (7,))]
    found = paths(calls, vocabulary=9)
    assert (found.refused, found.trained_tokens) == ({"parent_missing": 1, "token_id": 1}, 2)
    assert paths(calls, vocabulary=10).refused == {}


def test_a_call_moved_between_hosts_has_a_version_for_each_token() -> None:
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    found = paths([call("a", None, 0, (1,), (2, 3, 4), versions=spans)])
    assert found.sequences[0].spans[0].versions == (3, 4, 4)


def test_ten_thousand_turns_need_no_recursion() -> None:
    calls = [A]
    for turn in range(10_000):
        calls.append(call(f"t{turn}", calls[-1].call, 4 + 2 * turn, (5,), (6,)))
    found = paths(calls)
    assert len(found.sequences) == 1
    assert found.trained_tokens == 10_002


@st.composite
def logs(draw: st.DrawFn) -> list[Call]:
    """Any tree: each call goes on from any earlier one, at any place in it; some are repeated prompts or broken."""
    calls: list[Call] = []
    ends: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1))
        prefix = 0 if parent < 0 else draw(st.sampled_from([ends[parent], draw(st.integers(0, ends[parent]))]))
        prompt = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        sampled = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        more = draw(st.sampled_from([{}, {}, {}, {"temperature": 0.0}]))
        calls.append(call(f"c{number}", f"c{parent}" if parent >= 0 else None, prefix, prompt, sampled, **more))
        ends.append(prefix + len(prompt) + len(sampled))
    return calls


def full(calls: list[Call]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for one in calls:
        before = found[one.parent][: one.prefix_tokens] if one.parent else ()
        found[one.call] = (*before, *one.prompt_ids, *one.sampled_ids)
    return found


@given(logs())
def test_every_live_call_is_trained_exactly_once_in_its_own_context(calls: list[Call]) -> None:
    found = paths(calls)
    spans = [(s.tokens[: span.end], span) for s in found.sequences for span in s.spans]
    refused = sum(found.refused.values())
    assert len(spans) + refused == len(calls)
    texts = full(calls)
    remaining = [(texts[c.call], len(texts[c.call]) - len(c.sampled_ids), c.logprobs) for c in calls]
    for tokens, span in spans:
        remaining.remove((tokens, span.start, span.logprobs))  # raises unless some call sampled just this
    for sequence in found.sequences:
        gradient.check(sequence)
        assert sequence.tokens[sequence.spans[-1].end :] == ()
        assert all(a.end <= b.start for a, b in zip(sequence.spans, sequence.spans[1:], strict=False))
    assert found.trained_tokens == sum(span.end - span.start for _, span in spans)


@given(logs())
def test_the_file_command_and_the_service_tell_the_same_of_a_log(calls: list[Call]) -> None:
    """Classes of transition and figures have one meaning."""
    lines = b"\n".join(codec.encode(one) for one in calls)
    report = read_tree(Source("log.jsonl", lines), Forest(), "gyre")
    found = paths(calls)
    assert report.transitions == found.transitions
    assert (report.path_tokens, report.unique_nodes) == (found.path_tokens, found.unique_tokens)
