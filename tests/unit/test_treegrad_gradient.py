"""The gradient of a forest is that of training each path in full: float64, every family, whatever the chunks."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opengyre.learn.gradient import Item
from opengyre.learn.gradient import accumulate as accumulate_flat
from opengyre.learn.objective import objective
from opengyre.proto.group import Sequence, Span
from opengyre.proto.run import Optimization
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.collect import empty_accumulator
from opengyre.treegrad.drivers import driver_for
from opengyre.treegrad.forest import Path, build
from opengyre.treegrad.split import split
from opengyre.treegrad.table import event_tensors
from opengyre.treegrad.walk import Walk, accumulate, evaluate
from support.treegrad import (
    FAMILIES,
    clipped_with_kl,
    error,
    flat_gradient,
    float64,
    make,
    path_of,
    random_paths,
)

pytestmark = pytest.mark.torch

EXACT = 1e-9


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with float64():
        yield


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    leaves=st.integers(1, 40),
    depth=st.integers(1, 6),
    chunk=st.integers(1, 64),
    pack=st.integers(0, 64),
    offload=st.booleans(),
)
def test_the_gradient_is_that_of_each_path_in_full(family, seed, leaves, depth, chunk, pack, offload) -> None:
    paths = random_paths(random.Random(seed), leaves, depth)
    forest = build(paths)
    model = make(family, seed % 7)
    reference = torch.randn(len(forest.events), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 3
    loss, logp, wanted = flat_gradient(model, paths, clipped_with_kl, reference=reference)
    driver = driver_for(model)
    found = empty_accumulator(driver)
    result = accumulate(
        driver, forest, clipped_with_kl, found, chunk=chunk, pack=pack, offload=offload, block=7, reference=reference
    )
    assert result.loss == pytest.approx(float(loss), rel=EXACT, abs=1e-12)
    assert torch.allclose(result.logp, logp, rtol=EXACT, atol=EXACT)
    assert error(found, wanted) < EXACT
    assert result.stats.unique_tokens == forest.nodes


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_next"])
def test_a_chunk_boundary_may_be_anywhere(family) -> None:
    rng = random.Random(5)
    trunk = (1, 2, 3, 4, 5)
    paths = [path_of(rng, (*trunk, *more), 0) for more in ((6,), (7, 8, 9), (7, 8, 1, 2), (6, 6, 6))]
    forest = build(paths)
    model = make(family)
    _, _, wanted = flat_gradient(model, paths, clipped_with_kl)
    driver = driver_for(model)
    for cut in range(forest.nodes):
        found = empty_accumulator(driver)
        accumulate(driver, forest, clipped_with_kl, found, cuts=[cut])
        assert error(found, wanted) < EXACT, cut


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_parts_of_a_forest_add_up(family) -> None:
    paths = random_paths(random.Random(8), 16, 4)
    forest = build(paths)
    model = make(family)
    _, _, wanted = flat_gradient(model, paths, clipped_with_kl, reference=torch.full((len(forest.events),), -2.0))
    driver = driver_for(model)
    found = empty_accumulator(driver)
    parts = split(forest, forest.longest() + 8)
    assert len(parts) > 2
    for part in parts:
        chosen = forest.select(part)
        accumulate(driver, chosen, clipped_with_kl, found, reference=torch.full((len(chosen.events),), -2.0))
    assert error(found, wanted) < EXACT


def test_a_loss_that_couples_all_sequences_is_exact_over_parts_from_the_g_of_the_whole() -> None:
    """Log-probs of all parts first, the loss once, then each part with its rows of g."""
    paths = random_paths(random.Random(3), 9, 3)
    forest = build(paths)
    model = make("qwen3")

    def coupled(logp, events):
        return (events.weight * logp).sum() * logp.exp().mean(), None

    _, _, wanted = flat_gradient(model, paths, coupled)
    driver = driver_for(model)
    found = empty_accumulator(driver)
    logp = torch.zeros(len(forest.events), dtype=torch.float64)
    parts = [forest.select(part) for part in split(forest, forest.longest() + 4)]
    rows = [torch.isin(torch.as_tensor(forest.events.sequence), torch.as_tensor(p.events.sequence)) for p in parts]
    for part, mine in zip(parts, rows, strict=True):
        logp[mine] = Walk(driver, part).log_probs()[0]
    _, _, g = evaluate(coupled, logp, event_tensors(forest, logp.device, logp.dtype))
    for part, mine in zip(parts, rows, strict=True):
        Walk(driver, part).backward(g[mine], found)
    assert len(parts) > 1
    assert error(found, wanted) < EXACT


def test_what_has_no_gradient_is_not_computed_again() -> None:
    rng = random.Random(4)
    trunk = tuple(rng.randrange(13) for _ in range(12))
    paths = [path_of(rng, (*trunk, *(rng.randrange(13) for _ in range(20))), 0) for _ in range(3)]
    silent = [Path(p.sequence, 0.0, 0.0 if i else p.weight) for i, p in enumerate(paths)]
    model = make("qwen3_next")
    _, _, wanted = flat_gradient(model, silent, clipped_with_kl)
    driver = driver_for(model)
    found = empty_accumulator(driver)
    result = accumulate(driver, build(silent), clipped_with_kl, found, chunk=5)
    assert error(found, wanted) < EXACT
    assert 0 < result.stats.backward_tokens < build(silent[:1]).nodes + 5 < build(silent).nodes


def test_a_token_goes_forward_twice_and_back_once_whatever_the_branches() -> None:
    """For its log-prob, and with a graph; the state of the one trunk is still there for the second."""
    rng = random.Random(4)
    trunk = tuple(rng.randrange(13) for _ in range(40))
    paths = [path_of(rng, (*trunk, branch, *trunk[:8]), 0) for branch in range(4)]
    paths = [Path(Sequence(tokens=p.sequence.tokens, spans=(_span(41, 49),)), 1.0, 1.0) for p in paths]
    forest = build(paths)
    driver = driver_for(make("llama"))
    result = accumulate(driver, forest, clipped_with_kl, empty_accumulator(driver), chunk=16)
    assert (result.stats.forward_tokens, result.stats.backward_tokens) == (2 * forest.nodes, forest.nodes)


def _span(start: int, end: int) -> Span:
    return Span(start=start, end=end, logprobs=(-2.0,) * (end - start), versions=(0,) * (end - start), temperature=1.0)


def test_other_gradients_stay_and_frozen_parameters_get_none() -> None:
    paths = random_paths(random.Random(1), 5, 3)
    model = make("qwen2")
    _, _, wanted = flat_gradient(model, paths, clipped_with_kl)
    frozen = {name for name, _ in model.named_parameters() if "layers.0" in name or "embed" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    head = dict(model.named_parameters())["lm_head.weight"]
    before = head.grad = torch.ones_like(head)
    driver = driver_for(model)
    found = empty_accumulator(driver)
    accumulate(driver, build(paths), clipped_with_kl, found, chunk=3)
    assert found.keys() == wanted.keys() - frozen
    assert error(found, {name: wanted[name] for name in found}) < EXACT
    assert head.grad is before
    assert bool((before == 1).all())
    assert all(p.grad is None for name, p in model.named_parameters() if name != "lm_head.weight")
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert driver.model.config._attn_implementation != "opengyre_tree"  # pyright: ignore[reportAttributeAccessIssue] - a model of transformers


@pytest.mark.parametrize("loss", ["clip", "sequence"])
def test_the_runs_losses_make_what_the_flat_trainer_makes_of_the_tiny_model(loss) -> None:
    paths = random_paths(random.Random(9), 6, 3)
    model = make("tiny", dtype=torch.float32)
    assert isinstance(model, TinyModel)
    chosen = objective(Optimization(loss=loss, max_age=1))
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    items = [Item(p.sequence, p.advantage, p.weight) for p in paths]
    flat = accumulate_flat(model, items, wanted, loss=chosen, base_version=6)
    driver = driver_for(model)
    found = empty_accumulator(driver)
    result = accumulate(driver, build(paths), chosen, found, entropy=True, base_version=6)
    assert error(found, wanted) < 1e-5
    assert result.entropy is not None
    assert float(result.entropy.sum()) == pytest.approx(flat.entropy_sum, rel=1e-4)


def test_sums_of_a_16_bit_model_are_float32() -> None:
    paths = random_paths(random.Random(2), 12, 3)
    model = make("qwen3")
    _, _, wanted = flat_gradient(model, paths, clipped_with_kl)
    driver = driver_for(model.to(torch.bfloat16))
    found = empty_accumulator(driver)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    accumulate(driver, build(paths), clipped_with_kl, found, chunk=4)
    assert 1e-4 < error(found, wanted) < 0.2


def test_an_empty_forest_has_no_gradient() -> None:
    driver = driver_for(make("llama"))
    found = empty_accumulator(driver)
    untrained = Path(Sequence(tokens=(1, 2), spans=()), 1.0, 1.0)
    result = accumulate(driver, build([untrained]), lambda logp, e: ((e.weight * logp).sum(), None), found)
    assert result.loss == 0
    assert not any(bool(tensor.any()) for tensor in found.values())


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    driver = driver_for(make("llama"))
    path = Path(Sequence(tokens=(1, 13), spans=(_span(1, 2),)), 1.0, 1.0)
    with pytest.raises(ValueError, match="tokens are 1 to 13; the model's vocabulary allows 0 to 12"):
        accumulate(driver, build([path]), clipped_with_kl, empty_accumulator(driver))


def test_an_accumulator_without_a_place_for_a_parameter_is_refused() -> None:
    driver = driver_for(make("llama"))
    path = Path(Sequence(tokens=(1, 12), spans=(_span(1, 2),)), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"no model\.embed_tokens\.weight"):
        accumulate(driver, build([path]), clipped_with_kl, {})
