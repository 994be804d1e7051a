"""Gradients are sums: the same in whatever parts and batches; and the guarded step that uses them."""

import random

import msgspec
import pytest
import torch

from opengyre.learn.codec import GradientFormatError, unflatten
from opengyre.learn.gradient import InvalidSequenceError, Item, accumulate, batches, check, zero_gradients
from opengyre.learn.update import NonFiniteGradientError, apply_update
from opengyre.proto.group import RouteRows, Sequence, Span
from opengyre.proto.traj import Media
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from support.gradients import flatten

pytestmark = pytest.mark.torch

VOCAB = 50


def _model() -> TinyModel:
    model = TinyModel(TinyConfig(VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def _item(rng: random.Random, length: int, temperature: float = 1.0) -> Item:
    tokens = tuple(rng.choices(range(VOCAB), k=length))
    cut = sorted(rng.sample(range(1, length), 2))
    spans = tuple(
        Span(
            start=start,
            end=end,
            logprobs=tuple(rng.uniform(-5, -3) for _ in range(start, end)),
            versions=tuple(rng.choice((4, 5)) for _ in range(start, end)),
            temperature=temperature,
        )
        for start, end in ((1, cut[0]), (cut[1], length))
    )
    return Item(Sequence(tokens=tokens, spans=spans), rng.choice([-1.0, 0.5, 2.0]), rng.uniform(0.1, 1))


ITEMS = [_item(random.Random(n), 4 + 5 * n, 1.0 if n % 2 else 0.7) for n in range(9)]


def _naive(model: TinyModel) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss written out token by token, and autograd through all of it."""
    total = torch.zeros(())
    for item in ITEMS:
        for span in item.sequence.spans:
            logits = model(torch.tensor([item.sequence.tokens]))[0] / span.temperature
            for at, behaviour in zip(range(span.start, span.end), span.logprobs, strict=True):
                logp = torch.log_softmax(logits[at - 1], -1)[item.sequence.tokens[at]]
                ratio = torch.exp(logp - behaviour)
                kept = torch.minimum(ratio * item.advantage, ratio.clamp(0.8, 1.28) * item.advantage)
                total = total - item.weight * kept
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()))
    return float(total.detach()), dict(zip(parameters, gradients, strict=True))


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).norm() / (right[name].norm() + 1e-12)) for name in right)


@pytest.mark.parametrize("limit", [1, 60, 4096])
def test_the_gradient_is_that_of_the_loss_written_out(limit: int) -> None:
    model = _model()
    wanted_loss, wanted = _naive(model)
    found = zero_gradients(model)
    stats = accumulate(model, ITEMS, found, batch_tokens=limit, base_version=5)
    assert stats.loss == pytest.approx(wanted_loss, rel=1e-5)
    assert _distance(found, wanted) < 1e-5
    spans = [span for item in ITEMS for span in item.sequence.spans]
    assert stats.tokens == sum(span.end - span.start for span in spans)
    assert stats.logprob_gap_tokens == sum(version == 5 for span in spans for version in span.versions)
    assert stats.clipped_tokens > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_in_any_order_make_the_whole() -> None:
    model = _model()
    whole, parts = zero_gradients(model), zero_gradients(model)
    total = accumulate(model, ITEMS, whole)
    first = accumulate(model, ITEMS[5:], parts)
    first.merge(accumulate(model, ITEMS[:5], parts))
    assert _distance(parts, whole) < 1e-5
    assert first.tokens == total.tokens
    assert first.entropy_sum == pytest.approx(total.entropy_sum)
    assert first.max_ratio == pytest.approx(total.max_ratio)


def test_the_gap_to_the_engine_is_measured_under_the_temperature() -> None:
    model = _model()
    tokens = (3, 7, 9, 11)
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([tokens]))[0] / 0.6, -1)
    behaviour = tuple(float(logp[at - 1, tokens[at]]) for at in (2, 3))
    span = Span(start=2, end=4, logprobs=behaviour, versions=(5, 5), temperature=0.6)
    item = Item(Sequence(tokens=tokens, spans=(span,)), 1.0, 0.5)
    stats = accumulate(model, [item], zero_gradients(model), base_version=5)
    assert stats.logprob_gap_sum < 1e-5
    assert (stats.max_ratio, stats.loss) == pytest.approx((1.0, -1.0), abs=1e-4)
    exact = -(logp[1:3].exp() * logp[1:3]).sum()
    assert stats.entropy_sum == pytest.approx(float(exact), rel=1e-4)


def test_a_span_weighs_its_tokens() -> None:
    model = _model()
    span = Span(start=2, end=4, logprobs=(-1.0, -1.0), versions=(5, 5), temperature=1.0)
    gradients = []
    for weight, of_span in ((1.0, 1.0), (0.5, 2.0), (1.0, 2.0)):
        accumulator = zero_gradients(model)
        item = Item(Sequence(tokens=(3, 7, 9, 11), spans=(msgspec.structs.replace(span, weight=of_span),)), 1.0, weight)
        accumulate(model, [item], accumulator)
        gradients.append(torch.cat([tensor.flatten() for tensor in accumulator.values()]))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.allclose(2 * gradients[0], gradients[2])


def test_batches_hold_like_lengths_within_the_limit() -> None:
    untrained = Item(Sequence(tokens=(1, 2), spans=()), 1.0, 1.0)
    made = batches([*ITEMS, untrained], limit=80)
    assert sorted(id(item) for batch in made for item in batch) == sorted(id(item) for item in ITEMS)
    for batch in made:
        padded = len(batch) * max(len(item.sequence.tokens) for item in batch)
        assert padded <= 80 or len(batch) == 1


@pytest.mark.parametrize(
    ("start", "end", "count", "temperature", "names"),
    [(0, 2, 2, 1.0, "span"), (2, 5, 3, 1.0, "span"), (1, 3, 1, 1.0, "log-probs"), (1, 2, 1, 0.0, "temperature")],
)
def test_spans_that_do_not_fit_are_refused_before_anything_is_added(start, end, count, temperature, names) -> None:
    model = _model()
    span = Span(start=start, end=end, logprobs=(0.0,) * count, versions=(0,) * count, temperature=temperature)
    accumulator = zero_gradients(model)
    with pytest.raises(InvalidSequenceError, match=names):
        accumulate(model, [ITEMS[0], Item(Sequence(tokens=(1, 2, 3, 4), spans=(span,)), 1.0, 1.0)], accumulator)
    assert all(not gradient.any() for gradient in accumulator.values())


@pytest.mark.parametrize(
    "more",
    [
        {"adapter": "lora-1"},
        {"media": (Media(position=1, hash="a"),)},
        {"routes": (RouteRows(blob="sha256:b", start=0, end=4, first=0),)},
    ],
)
def test_what_was_sampled_under_more_than_ids_is_refused(more) -> None:
    span = Span(start=1, end=3, logprobs=(-1.0, -1.0), versions=(0, 0), temperature=1.0)
    with pytest.raises(InvalidSequenceError, match="adapter, media or recorded routes"):
        check(Sequence(tokens=(1, 2, 3, 4), spans=(span,), **more))


def test_gradients_survive_as_bytes() -> None:
    model = _model()
    gradients = zero_gradients(model)
    accumulate(model, ITEMS, gradients)
    data = flatten(gradients)
    back = unflatten(data, gradients)
    assert all(torch.equal(back[name], gradients[name]) for name in gradients)
    with pytest.raises(GradientFormatError, match="not safetensors"):
        unflatten(b"123", gradients)
    with pytest.raises(GradientFormatError, match=r"norm\.weight is missing"):
        unflatten(flatten({n: g for n, g in gradients.items() if n != "model.norm.weight"}), gradients)
    with pytest.raises(GradientFormatError, match="the model needs"):
        unflatten(data, {**gradients, "model.norm.weight": torch.zeros(7)})


def test_a_step_is_clipped_to_the_norm() -> None:
    model = _model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = {name: torch.full_like(parameter, 0.1) for name, parameter in model.named_parameters()}
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    stats = apply_update(model, torch.optim.SGD(model.parameters(), lr=1.0), gradients, clip_norm=0.5)
    moved = sum(float((p.detach() - before[n]).square().sum()) for n, p in model.named_parameters()) ** 0.5
    assert stats.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert moved == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = zero_gradients(model)
    gradients["model.norm.weight"][3] = bad
    with pytest.raises(NonFiniteGradientError, match=r"model\.norm\.weight"):
        apply_update(model, optimizer, gradients, 1.0)
    assert all(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    del gradients["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        apply_update(model, optimizer, gradients, 1.0)


def test_learning_moves_probability_towards_what_scored() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompt, good, bad = (1, 2, 3), 7, 8

    def logp(token: int) -> float:
        with torch.no_grad():
            return float(torch.log_softmax(model(torch.tensor([prompt]))[0, -1], -1)[token])

    before = logp(good), logp(bad)
    for _ in range(5):
        items = []
        for token, advantage in ((good, 1.0), (bad, -1.0)):
            span = Span(start=3, end=4, logprobs=(logp(token),), versions=(0,), temperature=1.0)
            items.append(Item(Sequence(tokens=(*prompt, token), spans=(span,)), advantage, 0.5))
        gradients = zero_gradients(model)
        accumulate(model, items, gradients)
        apply_update(model, optimizer, gradients, 1.0)
    assert logp(good) > before[0]
    assert logp(bad) < before[1]
