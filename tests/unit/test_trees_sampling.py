"""Roles, bounded sampling, weights and credit."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trees import ROLES, Given, Role, build, choose, shares, structural
from opengyre.trees.credit import advantages, values
from opengyre.trees.harness import PROFILES, ProfileError, Request, detect, load, parse
from opengyre.trees.weights import Rollout, normalised, weights

MAIN = [1, 2, 3, 4, 5, 6, 7, 8]


def an_execution() -> list[Given]:
    """A main agent of three calls and a summary of them, what goes on from the summary, and a sub-agent."""
    return [
        Given("m1", MAIN, [10, 11, 12, 13, 14], order=0),
        Given("s1", [50, 51, 52], [60, 61, 62, 63, 64, 65], order=1),
        Given("m2", [20], [21, 22, 23, 24], "m1", 13, order=2),
        Given("m3", [25], [26, 27, 28, 29], "m2", 18, order=3),
        Given("sum", [30, 31], [32, 33, 34, 35, 36, 37], "m3", 23, order=4),
        Given("c1", [1, 2, 40, 32, 33, 34, 35, 36, 37, 41], [42, 43], order=5),
        Given("c2", [44], [45, 46, 47], "c1", 12, order=6),
    ]


def test_roles_are_told_from_the_shape_of_the_tree() -> None:
    tree = build(an_execution())
    assert {node.call: node.kind for node in tree.nodes} == {
        "m1": "root", "s1": "branch", "m2": "extend", "m3": "extend", "sum": "extend", "c1": "compaction",
        "c2": "extend",
    }  # fmt: skip
    assert structural(tree.nodes) == {
        "m1": "main", "s1": "sub-agent", "m2": "main", "m3": "main", "sum": "main-summary", "c1": "main", "c2": "main",
    }  # fmt: skip


def test_a_given_role_is_kept_and_passed_on() -> None:
    calls = [Given("a", [1], [2], role="sub-agent"), Given("b", [1, 2, 3], [4], order=1)]
    assert structural(build(calls).nodes) == {"a": "sub-agent", "b": "sub-agent"}


def test_the_highest_role_with_tokens_left_is_drawn_first() -> None:
    tree = build(an_execution())
    roles = structural(tree.nodes)
    chosen = choose(tree.nodes, roles, j_max=3, seed=1)
    assert [(path.leaf.call, path.role) for path in chosen.paths] == [
        ("c2", "main"), ("sum", "main-summary"), ("s1", "sub-agent"),
    ]  # fmt: skip
    assert chosen.left_out == {}
    one = choose(tree.nodes, roles, j_max=1, seed=1)
    assert [path.leaf.call for path in one.paths] == ["c2"]
    assert one.left_out == {"main": 13, "main-summary": 6, "sub-agent": 6}


def test_a_leaf_is_drawn_in_proportion_to_its_tokens() -> None:
    calls = [Given("a", [1], [2] * 3, order=0), Given("b", [9], [8] * 9, order=1, role="main")]
    tree = build([*calls, Given("c", [7], [6] * 6, order=2, role="main")])
    roles: dict[str, Role] = dict.fromkeys("abc", "main")
    drawn = Counter(choose(tree.nodes, roles, j_max=1, seed=seed).paths[0].leaf.call for seed in range(3000))
    assert drawn["b"] / 3000 == pytest.approx(0.5, abs=0.03)
    assert drawn["a"] / 3000 == pytest.approx(1 / 6, abs=0.03)


def test_a_draw_is_the_same_again() -> None:
    tree = build(Given(f"c{n}", [n + 1], [50, 51], order=n) for n in range(20))
    roles: dict[str, Role] = {node.call: "main" for node in tree.nodes}
    draws = [[path.leaf.call for path in choose(tree.nodes, roles, j_max=4, seed="e1").paths] for _ in range(2)]
    assert draws[0] == draws[1] == ["c1", "c8", "c15", "c6"], "of any release of Python"
    with pytest.raises(ValueError, match="j_max is 0"):
        choose(tree.nodes, roles, j_max=0)


@st.composite
def trees(draw: st.DrawFn) -> list[Given]:
    """Any tree, with roles, refused calls and repeated prompts."""
    calls: list[Given] = []
    lengths: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1))
        prefix = 0 if parent < 0 else draw(st.sampled_from([lengths[parent], draw(st.integers(0, lengths[parent]))]))
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        sampled = draw(st.lists(st.integers(0, 3), min_size=0, max_size=4))
        fault = draw(st.sampled_from([None, None, None, "logprobs_length"]))
        role: Role | None = draw(st.sampled_from([None, *ROLES]))
        above = f"c{parent}" if prefix else None
        calls.append(Given(f"c{number}", prompt, sampled, above, prefix or None, number, fault, role))
        lengths.append(prefix + len(prompt) + len(sampled))
    return calls


@given(trees(), st.none() | st.integers(1, 4), st.integers(0, 9))
def test_no_token_twice_and_no_more_than_the_bound(calls: list[Given], j_max: int | None, seed: int) -> None:
    tree = build(calls)
    roles = structural(tree.nodes)
    chosen = choose(tree.nodes, roles, j_max=j_max, seed=seed)
    assert j_max is None or len(chosen.paths) <= j_max
    trained = [node.call for path in chosen.paths for node in path.calls]
    assert len(trained) == len(set(trained))
    live = {node.call: node.events for node in tree.nodes if node.refused is None and node.events}
    assert set(trained) <= set(live)
    assert sum(live.values()) == sum(path.events for path in chosen.paths) + sum(chosen.left_out.values())
    if j_max is None:
        assert set(trained) == set(live), "every live call once"
    for path in chosen.paths:
        whole = tree.tokens(path.leaf).tolist()
        for node in path.calls:
            assert whole[: node.length] == tree.tokens(node).tolist(), "in the context that it was sampled in"
    below = [role for role in ROLES if chosen.left_out.get(role)]
    if j_max is not None and len(chosen.paths) < j_max:
        assert not below, "nothing is left unless the bound was reached"


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(0, 50)), min_size=1, max_size=9), st.integers(1, 90))
def test_the_weights_of_a_step_sum_to_what_the_mode_says(found: list[tuple[str, int]], constant: int) -> None:
    rollouts = [Rollout(prompt, tokens) for prompt, tokens in found]

    def total(*mode) -> float:
        return sum(w * r.tokens for w, r in zip(weights(rollouts, *mode), rollouts, strict=True))

    tokens = sum(r.tokens for r in rollouts)
    prompts = {r.prompt for r in rollouts}
    assert total("token") == pytest.approx(1 if tokens else 0)
    assert total() == pytest.approx(sum(r.tokens > 0 for r in rollouts) / len(rollouts))
    assert total("prompt") == pytest.approx(len({r.prompt for r in rollouts if r.tokens}) / len(prompts))
    assert total("constant", constant) == pytest.approx(tokens / (len(rollouts) * constant))
    with pytest.raises(ValueError, match="constant is 0"):
        weights(rollouts, "constant")


def test_alternatives_share_their_weight_by_leaves() -> None:
    """A trunk, then two answers to one prompt that were both gone on from, the second in two ways."""
    calls = [
        Given("t", [1], [2], order=0),
        Given("a", [3], [4], "t", 2, order=1),
        Given("b", [3], [5], "t", 2, order=2),
        Given("a1", [6], [7], "a", 4, order=3),
        Given("b1", [6], [7], "b", 4, order=4),
        Given("b2", [8], [7], "b", 4, order=5),
    ]
    nodes = build(calls).nodes
    assert shares(nodes) == pytest.approx({"t": 1, "a": 1 / 3, "b": 2 / 3, "a1": 1 / 3, "b1": 2 / 3, "b2": 2 / 3})
    assert set(shares(build(calls[:2]).nodes).values()) == {1.0}
    relative = [shares(nodes)[node.call] for node in nodes]
    tokens = [node.events for node in nodes]
    scaled = normalised(relative, tokens)
    assert sum(w * n for w, n in zip(scaled, tokens, strict=True)) == pytest.approx(sum(tokens))


def test_alternatives_that_said_the_same_do_not_share_their_weight_again() -> None:
    """What goes on from them has the same prompt too, and is no alternative of it."""
    calls = [Given("a", [1], [2], order=0, wanted=True), Given("b", [1], [2], order=1, wanted=True)]
    calls += [Given(f"{name}1", [3], [4], name, 2, order=place, wanted=True) for place, name in enumerate("ab", 2)]
    assert shares(build(calls).nodes) == {"a": 0.5, "b": 0.5, "a1": 0.5, "b1": 0.5}


def test_a_tree_baseline_is_leave_one_out_at_the_root() -> None:
    flat = {"a": None, "b": None, "c": None}
    assert advantages(flat, {"a": 1, "b": 0, "c": 0}) == {"a": 1, "b": -0.5, "c": -0.5}
    deep = {"r": None, "x": "r", "y": "r", "x1": "x", "x2": "x"}
    scores = {"x1": 1.0, "x2": 0.0, "y": 0.0}
    assert values(deep, scores) == {"r": 1 / 3, "x": 0.5, "y": 0, "x1": 1, "x2": 0}
    assert advantages(deep, scores) == {"r": 0, "x": 0.5, "y": -0.5, "x1": 1, "x2": -1}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_that_comes_along_is_well_formed(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    assert profile.rules
    for rule in profile.rules:
        request = Request(headers={rule.header: "x"})
        if rule.where != "header":
            request = dataclasses.replace(Request(), **{rule.where: f"<{rule.contains[0]}>"})
        first = next(other for other in profile.rules if other.holds(request))
        assert profile.role(request) == first.role


def test_the_harness_is_told_by_its_client_or_its_prompt() -> None:
    claude = Request(system="You are Claude Code, Anthropic's official CLI for Claude.")
    assert detect(claude).name == "claude-code"
    assert detect(claude).role(claude) == "main"
    summary = Request(headers={"user-agent": "claude-cli/2.0"}, last_user="Your task is to create a detailed summary of the conversation so far, ...")  # noqa: E501  # fmt: skip
    assert detect(summary).role(summary) == "main-summary"
    assert detect(Request(system="hello")).name == "generic"
    assert detect(Request(system="hello")).role(Request(system="hello")) is None
    linear = load("mini-swe-agent")
    assert linear.role(Request(system="anything")) == "main"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ("x = 1", "name is missing"),
        ('name = "n"\nx = 1', "unknown field x"),
        ('name = "n"\n[[rule]]\nrole = "boss"', "role is 'boss'"),
        ('name = "n"\n[[rule]]\nrole = "main"\nwhere = "body"', "where is 'body'"),
        ('name = "n"\n[[rule]]\nrole = "main"\nwhere = "system"\ncontains = []', "contains is"),
        ('name = "n"\n[[rule]]\nrole = "main"\nwhere = "header"\ncontains = ["x"]', "header is None"),
    ],
)
def test_a_wrong_profile_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse(text)
    with pytest.raises(ProfileError, match="harness is 'x'"):
        load("x")
