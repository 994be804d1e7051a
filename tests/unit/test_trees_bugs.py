"""What others got wrong with trees of calls, a test for each; named after where it was reported.

Rows about a trainer's mask or gradient are tested on what trains here: spans, weights, and the gradient of sequences.
"""

import itertools

import msgspec
import pytest
import torch

from opengyre.learn.advantage import advantages
from opengyre.learn.gradient import Item, accumulate, zero_gradients
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import Sequence, Span
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Routes, Started, TrajEvent, Verified, VersionSpan
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.trajectory.replay import replay_groups
from opengyre.trajectory.tree import fault_of, paths
from opengyre.trees import Builder, Given, Texts, Tree, build, choose, structural
from opengyre.trees.weights import Rollout, weights


def whole(*calls: tuple[list[int], list[int]], texts: Texts | None = None) -> Tree:
    """Calls with their full prompts and nothing declared, named a, b, c ..."""
    return build((Given(chr(97 + n), p, s, order=n) for n, (p, s) in enumerate(calls)), texts)


def kinds(tree: Tree) -> list[str]:
    return [node.kind for node in tree.nodes]


def parents(tree: Tree) -> list[str | None]:
    return [node.parent and node.parent.call for node in tree.nodes]


def trained(tree: Tree) -> dict[str, int]:
    """Call -> how often its tokens are trained."""
    chosen = choose(tree.nodes, structural(tree.nodes))
    counts = {node.call: 0 for node in tree.nodes}
    for path in chosen.paths:
        for node in path.calls:
            counts[node.call] += 1
    return counts


def call(name: str, parent: str | None, prefix: int, prompt: tuple[int, ...], sampled: tuple[int, ...], **more) -> Call:
    fields = {
        "logprobs": (-0.5,) * len(sampled),
        "versions": (VersionSpan(version=3, start=0, end=len(sampled)),),
        "temperature": 1.0,
        **more,
    }
    return Call(
        run="r", group="g", execution="e", index=0, attempt=0, call=name, turn=0, request_digest="d", parent=parent,
        prefix_tokens=prefix, prompt_ids=prompt, sampled_ids=sampled, finish_reason="stop", text="", hosts=(), **fields,
    )  # fmt: skip


def group_of(*members: tuple[float, list[Call]], group: str = "r-g000001") -> list[TrajEvent]:
    """The events of a group whose members have these scores and calls."""
    names = tuple(f"{group}-e{number:02d}" for number in range(len(members)))
    task = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1),))
    events: list[TrajEvent] = []
    for name, (score, calls) in zip(names, members, strict=True):
        at = {"run": "r", "group": group, "execution": name, "attempt": 0}
        dispatch = EpisodeDispatch(
            run="r", group=group, execution=name, members=names, version=1, seed=1, task=task, harness=Harness(),
            min_members=1,
        )  # fmt: skip
        events.append(Started(**at, index=0, dispatch=dispatch, replica="x"))
        events += [msgspec.structs.replace(one, **at, index=number) for number, one in enumerate(calls, 1)]
        last = len(calls) + 1
        events.append(Verified(**at, index=last, parts=(Part(name="a", weight=1, value=score),)))
        events.append(
            Ended(**at, index=last + 1, reason="done", turns=1, sampled_tokens=1, duration_s=1, members=names)
        )
    return events


def one_call(name: str = "a") -> list[Call]:
    return [call(name, None, 0, (1, 2), (3,))]


def model() -> TinyModel:
    config = TinyConfig(
        32, 16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return TinyModel(config, 0).double()


def gradient(policy: TinyModel, *items: Item, **more) -> torch.Tensor:
    """Of all parameters, of these items summed, each accumulated on its own."""
    accumulator = {name: tensor.double() for name, tensor in zero_gradients(policy).items()}
    for item in items:
        accumulate(policy, [item], accumulator, **more)
    return torch.cat([tensor.flatten() for tensor in accumulator.values()])


def row(tokens: tuple[int, ...], *spans: tuple[int, int], weight: float = 1.0, advantage: float = 1.0) -> Item:
    made = tuple(
        Span(start=a, end=b, logprobs=(-3.0,) * (b - a), versions=(0,) * (b - a), temperature=1.0) for a, b in spans
    )
    return Item(Sequence(tokens=tokens, spans=made), advantage, weight)


def test_01_prime_rl_2634_the_longest_match_is_taken_not_the_first() -> None:
    tree = whole(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2], [3, 4, 5, 6, 7]), ([1, 2, 3, 4, 5, 6, 7, 8], [9]))
    assert parents(tree)[3] == "c"


def test_02_prime_rl_1383_a_path_keeps_all_of_its_turns() -> None:
    found = paths([call("a", None, 0, (1,), (2,)), call("b", "a", 2, (3,), (4,)), call("c", "b", 4, (5,), (6,))])
    assert [len(sequence.spans) for sequence in found.sequences] == [3]


def test_03_verifiers_2477_concurrent_calls_of_one_prompt_have_one_root() -> None:
    tree = whole(([1, 2], [3]), ([1, 2], [4]))
    assert tree.figures.leaves == 2
    assert [segment.start for segment in tree.trie.segments()].count(0) == 1
    assert tree.figures.unique_nodes == 4


def test_04_verifiers_955_other_tools_are_other_tokens() -> None:
    """Tools are rendered before the messages: the same messages after them share nothing."""
    tree = whole(([1, 70, 71, 5, 6], [7]), ([1, 80, 81, 5, 6], [7]))
    assert tree.nodes[1].offset == 1
    assert tree.nodes[1].parent is None
    assert tree.figures.unique_nodes == 6 + 5
    assert trained(tree) == {"a": 1, "b": 1}


def test_05_verifiers_1291_a_compaction_is_one_boundary() -> None:
    summary = [40, 41, 42, 43, 44, 45]
    calls = [([1, 2, *range(10, 30)], [3, 4, 5, 6, 7]), ([1, 2, *range(10, 30), 3, 4, 5, 6, 7, 8], summary)]
    history = [1, 2, 9, *summary]
    for turn in range(3):
        calls.append((list(history), [60 + turn] * 5))
        history += [60 + turn] * 5 + [70 + turn]
    assert kinds(whole(*calls)) == ["root", "extend", "compaction", "extend", "extend"]


def test_06_verifiers_2616_the_routes_of_a_boundary_come_from_the_next_prefill() -> None:
    """Two turns; the row of the first one's last token is the second one's. Each token but the last has a row."""

    def rows(blob: str, start: int, count: int) -> Routes:
        return Routes(blob=blob, start=start, rows=count, versions=(VersionSpan(version=3, start=0, end=2),))

    calls = [
        call("a", None, 0, (1, 2), (3, 4), routes=rows("A", 0, 3)),
        call("b", "a", 4, (5,), (6, 7), routes=rows("B", 3, 3)),
    ]
    (sequence,) = paths(calls).sequences
    whose = [one.blob for one in sequence.routes for _ in range(one.start, one.end)]
    assert [one.start for one in sequence.routes] == [0, 3]
    assert whose == ["A", "A", "A", "B", "B", "B"]
    assert len(whose) == len(sequence.tokens) - 1
    lacking = [calls[0], call("b", "a", 4, (5,), (6, 7), routes=rows("B", 4, 2))]
    assert paths(lacking).refused == {"routes_gap": 1}, "nobody has the row of the boundary"
    events = [place for span in sequence.spans for place in range(span.start, span.end)]
    assert events == [2, 3, 5, 6]
    assert [len(s.versions) == len(s.logprobs) == s.end - s.start for s in sequence.spans] == [True, True]


def test_07_slime_2338_a_drift_of_one_token_loses_nothing() -> None:
    long = list(range(100, 400))
    drifted = [*long[:150], 99, *long[151:]]
    tree = whole(([1, 2], long), ([1, 2, *drifted, 3], [4, 5]))
    assert kinds(tree) == ["root", "realign"]
    assert tree.nodes[1].offset == 152
    assert trained(tree) == {"a": 1, "b": 1}


def test_08_slime_2288_a_template_that_strips_thinking_forks_and_shares_what_is_shared() -> None:
    """A fork one token into the completion; beside it `test_formats_data` has the real log."""
    think, answer = [9, *range(500, 600)], list(range(700, 720))
    tree = whole(([1, *range(10, 60)], [*think, *answer]), ([1, *range(10, 60), 9, *answer, 2], [3]))
    assert (kinds(tree), tree.nodes[1].offset, tree.nodes[1].diagnosis) == (["root", "realign"], 52, "template")
    assert tree.figures.unique_nodes == 51 + 121 + 20 + 1 + 1
    assert trained(tree) == {"a": 1, "b": 1}


def test_09_slime_an_abandoned_retry_is_not_trained() -> None:
    tree = whole(([1], [2, 2]), ([1], [3, 3]), ([1, 3, 3, 4], [5]))
    assert kinds(tree) == ["root", "retry", "extend"]
    assert trained(tree) == {"a": 0, "b": 1, "c": 1}
    assert tree.figures.refused == {"superseded": 1}


def test_10_slime_a_turn_that_is_clean_on_one_branch_is_trained_once() -> None:
    """One child drifted inside the completion, the other extends it."""
    tree = whole(([1], [2, 3, 4, 5, 6]), ([1, 2, 3, 9, 5, 6, 7], [8]), ([1, 2, 3, 4, 5, 6, 7], [8]))
    assert trained(tree) == {"a": 1, "b": 1, "c": 1}


def test_11_slime_1414_groups_of_uneven_size_have_baselines_of_their_own() -> None:
    """By group, whatever the order in which events of several groups come; a group of one teaches nothing."""
    scores = {
        "r-g000001": [1.0, 0, 0, 1],
        "r-g000002": [1.0, 0.25, 0.25],
        "r-g000003": [1.0, 1, 0, 0],
        "r-g000004": [0.7],
    }
    logs = [group_of(*((score, one_call()) for score in of_group), group=name) for name, of_group in scores.items()]
    mixed = [event for turn in itertools.zip_longest(*logs) for event in turn if event is not None]
    found = {ready.group: [member.advantage for member in ready.members] for ready in replay_groups(mixed)}
    assert found == {name: advantages(of_group) for name, of_group in scores.items()}
    assert all(sum(of_group) == pytest.approx(0) for of_group in found.values())
    assert found["r-g000004"] == [0.0]


def test_12_miles_2378_an_execution_with_more_rows_has_one_reward() -> None:
    """Five rows and one: the baseline is the mean of two scores, and the scale theirs."""
    many = [call(f"c{n}", None, 0, (n + 1,), (9,)) for n in range(5)]
    (ready,) = replay_groups(group_of((1.0, many), (0.0, one_call())))
    assert [len(member.sequences) for member in ready.members] == [5, 1]
    assert [member.advantage for member in ready.members] == [1.0, -1.0]
    assert (ready.baseline, ready.scale) == (0.5, 2.0)


def test_13_miles_1930_rows_and_packs_do_not_change_the_gradient() -> None:
    """An execution in two rows and two packs, or in one: weights are per token, fixed before."""
    policy = model()
    tokens = (2, 3, 4, 5, 6, 7)
    one = gradient(policy, row(tokens, (2, 4), (5, 6), weight=0.25))
    two = gradient(policy, row(tokens[:4], (2, 4), weight=0.25), row(tokens, (5, 6), weight=0.25))
    assert torch.allclose(one, two, rtol=1e-5, atol=1e-9)


def test_14_skyrl_1492_each_step_has_the_advantage_under_its_own_mask() -> None:
    """Steps of 2 and 50 tokens: all of both have a gradient."""
    policy = model()
    tokens = tuple(n % 30 for n in range(60))
    both = gradient(policy, row(tokens, (1, 3), (5, 55)))
    parts = gradient(policy, row(tokens, (1, 3))) + gradient(policy, row(tokens, (5, 55)))
    assert torch.allclose(both, parts, rtol=1e-5, atol=1e-8)
    assert all(float(gradient(policy, row(tokens, span)).abs().sum()) > 0 for span in ((1, 3), (5, 55)))


@pytest.mark.parametrize("average", ["execution", "prompt"])
def test_15_rllm_512_steps_do_not_multiply_an_executions_weight(average) -> None:
    """An execution of 1 step and one of 10 weigh the same in all."""
    short, long = Rollout("p", 10), Rollout("q", 100)
    found = weights([short, long], average)
    assert found[0] * short.tokens == pytest.approx(found[1] * long.tokens) == pytest.approx(0.5)


def test_16_rllm_773_interleaved_agents_are_two_paths() -> None:
    tree = whole(([1], [2]), ([5], [6]), ([1, 2, 3], [4]), ([5, 6, 7], [8]))
    assert parents(tree) == [None, None, "a", "b"]
    assert len(choose(tree.nodes, structural(tree.nodes)).paths) == 2


def test_17_rllm_352_a_step_that_does_not_accumulate_is_trained_and_reported() -> None:
    tree = whole(([1, 2, 3], [4, 5, 6, 7, 8]), ([1, 9, 3, 4, 5, 6, 7, 8, 2], [7]))
    assert (kinds(tree), tree.nodes[1].diagnosis, tree.nodes[1].offset) == (["root", "fork"], "edit", 1)
    assert trained(tree) == {"a": 1, "b": 1}
    assert tree.figures.transitions == {"fork": 1}


def test_18_agent_lightning_444_turns_do_not_count_in_a_baseline() -> None:
    """Executions of 1 and 3 turns with scores 1 and 0: the mean is of two, not of four."""
    turns = [call("a", None, 0, (1,), (2,)), call("b", "a", 2, (3,), (4,)), call("c", "b", 4, (5,), (6,))]
    (ready,) = replay_groups(group_of((1.0, one_call()), (0.0, turns)))
    assert [member.trained_tokens for member in ready.members] == [1, 3]
    assert (ready.baseline, [member.advantage for member in ready.members]) == (0.5, [1.0, -1.0])
    by_turn = advantages([1.0, 0.0, 0.0, 0.0])
    assert by_turn[0] != pytest.approx(1.0), "what it would be"


def test_19_areal_1309_a_path_that_ends_predicts_nothing_of_the_next() -> None:
    """The gradient of two rows in one batch is that of each alone: nothing runs over the end of a row."""
    policy = model()
    rows = [row((2, 3, 4), (2, 3)), row((9, 8, 7, 6, 5), (1, 5))]
    accumulator = {name: tensor.double() for name, tensor in zero_gradients(policy).items()}
    stats = accumulate(policy, rows, accumulator)
    together = torch.cat([tensor.flatten() for tensor in accumulator.values()])
    assert torch.allclose(together, gradient(policy, *rows), rtol=1e-5, atol=1e-8)
    assert stats.tokens == 5


def test_20_areal_889_the_gradient_is_that_of_a_batch_of_another_size() -> None:
    policy = model()
    rows = [row((2, 3, 4, 5), (1, 4)), row((2, 3, 9, 9, 1), (2, 5)), row((7, 7), (1, 2))]
    found = []
    for size in (2, 8, 4096):
        accumulator = {name: tensor.double() for name, tensor in zero_gradients(policy).items()}
        accumulate(policy, rows, accumulator, batch_tokens=size)
        found.append(torch.cat([tensor.flatten() for tensor in accumulator.values()]))
    assert all(torch.allclose(found[0], other, rtol=1e-5, atol=1e-8) for other in found[1:])


def test_21_verl_6689_a_branch_does_not_see_its_siblings() -> None:
    """P-A-(R0, R1), P-B-(R2, R3): what B is changes nothing for R0; the token at a fork has a label for each child."""

    def tree(b: int) -> list[Sequence]:
        calls = [
            call("a", None, 0, (1, 2), (3,)), call("b", None, 0, (1, 2), (b,)),
            call("r0", "a", 3, (5,), (6,)), call("r1", "a", 3, (5, 5), (7,)),
            call("r2", "b", 3, (5,), (8,)), call("r3", "b", 3, (5, 5), (9,)),
        ]  # fmt: skip
        return list(paths(calls).sequences)

    for one, other in zip(tree(20)[:2], tree(21)[:2], strict=True):
        assert one == other
    assert sorted(s.tokens[2] for s in tree(20)) == [3, 3, 20, 20]
    assert sum(span.end - span.start for s in tree(20) for span in s.spans) == 6, "both labels at the fork, each once"


def test_22_verl_6401_gradients_are_compared_not_losses() -> None:
    """Trained by trees or call by call, the parameters' gradients are the same, each of them."""
    policy = model()
    calls = [
        call("a", None, 0, (1, 2), (3, 4)), call("b", "a", 4, (5,), (6, 7)), call("c", "a", 3, (8,), (9,)),
    ]  # fmt: skip
    tree, alone = paths(calls), [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 8, 9)]
    by_tree = gradient(policy, *(Item(sequence, 0.7, 0.5) for sequence in tree.sequences))
    rows = [
        Item(Sequence(tokens=tokens, spans=(span,)), 0.7, 0.5)
        for tokens, span in zip(
            alone, [next(s for q in tree.sequences for s in q.spans if s.end == len(t) and q.tokens[: s.end] == t)
                    for t in alone], strict=True,
        )
    ]  # fmt: skip
    assert torch.allclose(by_tree, gradient(policy, *rows), rtol=1e-5, atol=1e-8)


def test_23_verl_prefix_grouper_what_is_not_trained_is_context_all_the_same() -> None:
    """Mask 1, 1, 0, 0, 1: all five tokens stay."""
    (sequence,) = paths([call("a", None, 0, (1,), (2, 3)), call("b", "a", 3, (4, 5), (6,))]).sequences
    assert sequence.tokens == (1, 2, 3, 4, 5, 6)
    mask = [int(any(s.start <= place < s.end for s in sequence.spans)) for place in range(1, 6)]
    assert mask == [1, 1, 0, 0, 1]


def test_24_verl_3960_ids_are_what_counts_not_messages() -> None:
    """Tool calls that were cleared from the messages change the tokens: that is seen as a rewritten history."""
    tree = whole(([1, 2], [30, 31, 32, 33, 34, 35]), ([1, 2, 34, 35, 5, 5], [6]))
    assert tree.nodes[1].parent is None
    assert tree.nodes[1].offset == 2


def test_25_verl_7207_a_call_that_was_continued_has_one_span_for_each_version() -> None:
    """Stopped after 5 of 10 tokens: 10 events, 2 versions, and none of them counts as prompt."""
    spans = (VersionSpan(version=3, start=0, end=5), VersionSpan(version=4, start=5, end=10))
    found = paths([call("a", None, 0, (1, 2), tuple(range(10, 20)), versions=spans)])
    assert found.trained_tokens == 10
    assert found.sequences[0].spans[0].versions == (3,) * 5 + (4,) * 5


def test_26_labs_molt_124_each_token_has_its_version() -> None:
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    short = call("a", None, 0, (1,), (2, 3, 4, 5), versions=spans)
    assert fault_of(short) == "version_spans"
    (sequence,) = paths([call("a", None, 0, (1,), (2, 3, 4), versions=spans)]).sequences
    assert [len(span.versions) for span in sequence.spans] == [3]


def test_27_miles_3277_what_is_of_mixed_provenance_is_refused() -> None:
    """Log-probs of one version with routes that were recorded again under the next; and versions that overlap, which
    tell of a token that two weights made. What follows it trains, with the rows that it was sampled under."""
    old, mixed = (VersionSpan(version=3, start=0, end=2),), (VersionSpan(version=4, start=0, end=2),)
    calls = [
        call("a", None, 0, (1,), (2, 3), versions=old, routes=Routes(blob="A", start=0, rows=2, versions=mixed)),
        call("b", "a", 3, (4,), (5, 6), versions=old, routes=Routes(blob="B", start=2, rows=3, versions=old)),
    ]
    found = paths(calls)
    assert found.refused == {"routes_version": 1}
    assert found.trained_tokens == 2
    clean = [msgspec.structs.replace(calls[0], routes=Routes(blob="A", start=0, rows=2, versions=old)), calls[1]]
    assert paths(clean).refused == {}
    spans = (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=1, end=3))
    assert paths([call("a", None, 0, (1,), (2, 3, 4), versions=spans)]).refused == {"version_spans": 1}


def test_28_trl_5224_a_history_of_the_same_length_is_no_prefix() -> None:
    """A special token dropped in the middle, another put in: lengths agree, tokens do not."""
    tree = whole(([1, 2], [90, 3, 4, 5]), ([1, 2, 3, 91, 4, 5, 6], [7]), texts=Texts(special=frozenset({90, 91})))
    assert tree.nodes[1].parent is None
    assert tree.nodes[1].offset == 2
    found = paths([call("a", None, 0, (1, 2), (3, 4)), call("b", "a", 4, (6,), (7,))])
    assert found.sequences[0].tokens == (1, 2, 3, 4, 6, 7), "new tokens follow the verified prefix"


@pytest.mark.parametrize(("prompt", "sampled"), [((), ()), ((1,), ()), ((), (1,))])
def test_29_nemo_gym_2254_empty_ids_are_refused(prompt, sampled) -> None:
    """`[]` begins anything; beside this `test_formats_data` has the real log of 147 such calls."""
    found = paths([call("a", None, 0, prompt, sampled)])
    assert (sum(found.refused.values()), found.sequences) == (1, ())


def test_30_nemo_rl_3063_a_missing_call_blocks_nothing() -> None:
    """The group closes, and what does not need the missing call trains."""
    calls = [call("a", None, 0, (1,), (2,)), call("c", "b", 4, (5,), (6,)), call("d", None, 0, (7,), (8,))]
    (ready,) = replay_groups(group_of((1.0, calls), (0.0, one_call())))
    assert ready.refused == {"parent_missing": 1}
    assert [member.trained_tokens for member in ready.members] == [2, 1]
    waiting = Builder()
    assert waiting.add(Given("c", [5], [6], "b", 4)) == "waiting"
    assert waiting.tree().lost == {"c": "parent_missing"}, "the tree may be asked for all the same"


def test_31_openenv_1036_a_turn_without_prompt_ids_is_refused() -> None:
    found = paths([call("a", None, 0, (1,), (2,)), call("b", None, 0, (), (3,))])
    assert found.refused == {"empty_prompt": 1}


def test_32_art_885_a_token_is_trained_only_after_the_prefix_it_was_sampled_under() -> None:
    """9 was sampled after [1, 2, 101]; after [1] it is context."""
    tree = whole(([1, 2, 101], [9]), ([1, 9, 5], [6]))
    chosen = choose(tree.nodes, structural(tree.nodes))
    for path in chosen.paths:
        for node in path.calls:
            assert tree.tokens(path.leaf)[: node.length].tolist() == tree.tokens(node).tolist()
    assert [[node.call for node in path.calls] for path in chosen.paths] == [["a"], ["b"]]


def test_33_oh_my_pi_11179_results_in_another_order_fork_at_the_first() -> None:
    base, one, two = ([1], [2, 3]), [40, 41], [50, 51]
    tree = whole(base, ([1, 2, 3, *one, *two], [6]), ([1, 2, 3, *two, *one], [6]))
    assert parents(tree) == [None, "a", "a"]
    assert tree.nodes[2].offset == 3
    assert tree.figures.unique_nodes == 3 + 5 + 5


def test_34_cohub_175_a_history_that_is_doubled_is_flagged() -> None:
    system, history = [1, 2, 3], list(range(20, 60))
    tree = whole(([*system, *history], [7, 8, 9, 10]), ([*system, *history, *history], [7, 8, 9, 11]))
    assert [node.doubled for node in tree.nodes] == [0, len(history)]
    assert tree.figures.doubled == 1


def test_35_sglang_26555_ids_that_were_encoded_anew_are_seen() -> None:
    """The same text in other ids: what the server says it was asked is not what was asked."""
    texts = {1: "a", 2: "b", 3: "ab", 4: "c", 5: "d"}
    decode = Texts(decode=lambda ids: "".join(texts[int(token)] for token in ids))
    tree = whole(([4], [1, 2, 5]), ([4, 3, 5, 4], [5]), texts=decode)
    assert (tree.nodes[1].kind, tree.nodes[1].diagnosis, tree.nodes[1].offset) == ("realign", "retokenisation", 1)
    other = whole(([4], [1, 2, 5]), ([4, 1, 5, 5, 4], [5]), texts=decode)
    assert (other.nodes[1].kind, other.nodes[1].diagnosis) == ("fork", "edit")


def test_every_row_has_a_test() -> None:
    rows = [name.split("_")[1] for name in globals() if name.startswith("test_") and name[5:7].isdigit()]
    assert rows == [f"{number:02d}" for number in range(1, 36)]
    assert len(set(itertools.chain(rows))) == 35


def test_a_call_in_the_wrong_place_of_the_log_is_the_same_tree() -> None:
    builder = Builder()
    for given in (Given("b", [1, 2, 3], [4], order=1), Given("a", [1], [2], order=0)):
        builder.add(given)
    assert parents(builder.tree()) == [None, "a"]
