"""The benchmark of the trainer, small: its shapes are what they say, its ways agree, its figures follow."""

import math

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from opengyre.cli import bench_trainer, bench_trainer_facts
from opengyre.cli.bench_trainer import AGENT, EXACT, PREFIX, SMALL, Setting, measure
from opengyre.cli.bench_trainer_job import Measured, Model
from opengyre.cli.bench_trainer_shapes import NEAR, Shape, pairs, paths
from opengyre.cli.bench_trainer_view import show
from opengyre.cli.main import app
from opengyre.treegrad.forest import build
from opengyre.treegrad.table import event_tensors

pytestmark = pytest.mark.torch
LITTLE = Model(hidden=16, layers=2, heads=2, head_dim=8, mlp=24)


def test_a_prefix_has_its_branches_and_only_they_are_trained() -> None:
    forest = build(paths(PREFIX.times(0.1)))
    assert (forest.nodes, forest.path_tokens()) == (819 + 8 * 51, 8 * (819 + 51))
    assert forest.segments == 9
    assert len(forest.events) == 8 * 51
    assert forest.events.weight.sum() == pytest.approx(1.0)


def test_an_agents_tree_has_the_turns_leaves_and_tokens_that_were_asked_for() -> None:
    shape = AGENT.times(0.1)
    found = paths(shape)
    forest = build(found)
    # Siblings that begin with one token share it.
    assert forest.nodes == pytest.approx(6000, abs=12)
    assert forest.path_tokens() == pytest.approx(40_000, rel=NEAR + 0.01)
    assert len(found) == 12
    spans = [span for path in found for span in path.sequence.spans]
    assert len(spans) == 200
    assert len(forest.events) == len(np.unique(forest.events.node)) == pytest.approx(0.3 * 6000, rel=0.05)
    assert paths(shape) == found


def test_a_tree_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no tree of 20 turns with 2 leaves and 100 tokens"):
        paths(Shape("agent", leaves=2, unique=100, path=900, nodes=20))


def test_pairs_are_those_of_causal_attention() -> None:
    assert pairs(np.asarray([0, 3]), np.asarray([3, 2])) == 1 + 2 + 3 + 4 + 5


@pytest.mark.parametrize("shape", [PREFIX.times(0.01), AGENT.times(0.01), Shape("chain", unique=90)])
def test_the_tree_has_the_gradient_of_the_paths_in_full(shape: Shape) -> None:
    from opengyre.cli.bench_trainer_ways import WAYS

    found = {way: _gradient(WAYS[way], shape) for way in ("tree", "flat")}
    assert found["tree"][0] == pytest.approx(found["flat"][0], rel=1e-4)
    apart = bench_trainer_facts.apart(found["tree"][1], found["flat"][1])
    assert apart.relative < 1e-4
    assert apart.cosine == pytest.approx(1.0, abs=1e-7)


def test_a_detached_prompt_has_the_loss_but_another_gradient() -> None:
    from opengyre.cli.bench_trainer_ways import WAYS

    shape = PREFIX.times(0.01)
    (loss, exact), (same, other) = (_gradient(WAYS[way], shape) for way in ("tree", "detached"))
    assert same == pytest.approx(loss, rel=1e-4)
    assert bench_trainer_facts.apart(other, exact).relative > 0.05


def test_a_detached_prompts_gradient_is_that_of_stock_keys_and_values_without_a_graph() -> None:
    """The reference is a cache of `transformers`, filled without a graph."""
    from transformers import DynamicCache

    from opengyre.cli.bench_trainer_ways import LOSS, WAYS, model

    shape = PREFIX.times(0.01)
    net, given = model(LITTLE, 2048, "cpu", torch.float32), paths(shape)
    parts = []
    for path in given:
        tokens = torch.tensor([path.sequence.tokens])
        cache = DynamicCache(config=net.config)
        with torch.no_grad():
            last = net.model(tokens[:, : shape.prefix], past_key_values=cache).last_hidden_state[:, -1:]
        hidden = net.model(tokens[:, shape.prefix :], past_key_values=cache).last_hidden_state
        scores = net.lm_head(torch.cat((last, hidden[:, :-1]), 1)).log_softmax(-1)[0]
        parts.append(scores.gather(-1, tokens[0, shape.prefix :, None])[:, 0])
    loss, _ = LOSS(torch.cat(parts), event_tensors(build(given), torch.device("cpu"), torch.float32))
    named = dict(net.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    apart = bench_trainer_facts.apart(
        _gradient(WAYS["detached"], shape)[1], {k: g.numpy() for k, g in zip(named, found, strict=True)}
    )
    assert apart.relative < 1e-4


def test_a_detached_prompt_leaves_the_output_embeddings_gradient_exact() -> None:
    """It needs nothing of the prompt's graph."""
    from opengyre.cli.bench_trainer_ways import WAYS

    shape = PREFIX.times(0.01)
    exact, other = (_gradient(WAYS[way], shape)[1] for way in ("tree", "detached"))
    only = {"lm_head.weight"}
    apart = bench_trainer_facts.apart({k: other[k] for k in only}, {k: exact[k] for k in only})
    assert apart.relative < 1e-4


def test_a_detached_prompt_is_refused_where_it_is_trained() -> None:
    from opengyre.cli.bench_trainer_ways import WAYS

    with pytest.raises(ValueError, match="part once"):
        _gradient(WAYS["detached"], Shape("chain", unique=40))


def _gradient(way, shape: Shape) -> tuple[float, dict[str, np.ndarray]]:
    from opengyre.cli.bench_trainer_ways import model

    net = model(LITTLE, 2048, "cpu", torch.float32)
    into = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    loss, forward = way(net, paths(shape), into, 16, lambda _text: None)
    assert forward > 0
    return loss, {name: tensor.numpy() for name, tensor in into.items()}


def _measured(way: str = "tree", **changes: float) -> Measured:
    given = {"unique_tokens": 100, "path_tokens": 400, "unique_pairs": 30, "path_pairs": 100, "longest": 50,
             "events": 9, "seconds": 2.0, "cpu_s": 3.0, "peak_bytes": 5_000_000, "loss": 0.5, "forward_tokens": 200,
             "parameters": 10}  # fmt: skip
    return msgspec.convert({"way": way, "device": "cpu", **given, **changes}, Measured)


def test_ratios_are_of_flat_and_of_the_ideal() -> None:
    same = bench_trainer_facts.Apart(relative=0.0, cosine=1.0)
    found = bench_trainer_facts.against("x", "m", _measured(), _measured("flat", seconds=8.0), same)
    assert (found.of_flat, found.of_ideal, found.cpu_of_ideal, found.pairs_of_ideal) == (0.25, 1.0, 4.0, 1.2)
    assert (found.tree.path_tokens_per_s, found.tree.unique_tokens_per_s) == (200.0, 50.0)


def test_what_a_token_takes_is_the_slope_of_the_peaks() -> None:
    rows = [_measured(unique_tokens=n, peak_bytes=700_000 + 2300 * n) for n in (1000, 2000, 4000)]
    found = bench_trainer_facts.chain("m", rows, 2048, None)
    assert found.growth_bytes == pytest.approx(2300)
    assert found.beyond_bytes == pytest.approx(252)


def test_gradients_are_compared_over_all_parameters() -> None:
    wanted = {"a": np.asarray([3.0]), "b": np.asarray([4.0])}
    apart = bench_trainer_facts.apart({"a": np.asarray([3.0]), "b": np.asarray([-4.0])}, wanted)
    assert apart.relative == pytest.approx(8 / 5)
    assert apart.cosine == pytest.approx(-7 / 25)
    with pytest.raises(ValueError, match=r"has b$"):
        bench_trainer_facts.apart({"a": np.zeros(1)}, wanted)


def test_a_models_state_is_its_keys_and_values_and_their_gradients() -> None:
    assert SMALL.state_bytes(4) == 2 * 2 * 2 * 32 * 8
    assert SMALL.state_bytes(2) == 2 * 2 * 2 * 32 * 6


def test_all_parts_are_measured_and_shown(capsys) -> None:
    asked = []

    def run(part, way, shape, model, dtype, chunk, *, lean=False):
        asked.append((part, way, shape.leaves, dtype))
        tokens = shape.unique or shape.prefix + shape.leaves * shape.branch
        return _measured(way, unique_tokens=tokens), {"w": np.ones(2) + (way == "detached")}

    setting = Setting(1.0, 2048, "cpu", "float32", 2, 4096)
    found = measure(list(bench_trainer.PARTS), setting, run)
    assert asked[:2] == [("a", "tree", 8, "float32"), ("a", "flat", 8, "float32")]
    assert [leaves for part, way, leaves, _ in asked if (part, way) == ("d", "detached")] == [2, 4, 8]
    assert [dtype for part, way, _, dtype in asked if (part, way) == ("e", "tree")] == ["float32", "bfloat16"]
    assert len({row.model for row in found.prefix}) == 2
    assert found.group is not None
    assert found.group.rows[0].gradient.relative == pytest.approx(1.0)
    assert found.chain is not None
    assert [row.tokens for row in found.chain.rows] == [1024, 2048, 4096]
    show(found)
    assert "a further member takes" in " ".join(capsys.readouterr().out.split())
    assert math.isfinite(found.seconds)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "a,x"], "--only names 'x'; allowed: a, b, c, d, e"),
        (["--only", ","], "--only is empty; allowed: a, b, c, d, e"),
        (["--chain", "3"], "--chain is 3; allowed are 0 and numbers from 64"),
        (["--device", "tpu"], "--device is 'tpu'; allowed: cpu, cuda"),
        (["--dtype", "int8"], "--dtype is 'int8'; allowed: float32, bfloat16"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments, sentence) -> None:
    result = CliRunner().invoke(app, ["bench", "trainer", *arguments])
    assert str(result.exception) == sentence


def test_the_exact_part_is_a_tree_of_several_chunks() -> None:
    assert build(paths(EXACT)).nodes == 1024 + 4 * 128
