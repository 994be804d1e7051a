"""Models whose chunks would not be exact are refused by name, and attention by blocks is attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the common name
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel, PreTrainedModel

from opengyre.proto.group import Sequence, Span
from opengyre.treegrad import kernels
from opengyre.treegrad.attention import attend
from opengyre.treegrad.drivers import UndrivableModelError, driver_for
from opengyre.treegrad.forest import Path, build
from opengyre.treegrad.store import KeyValues
from opengyre.treegrad.walk import Walk
from support.treegrad import float64, make

pytestmark = pytest.mark.torch


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (_gpt2, "model_type is 'gpt2'; the tree trainer drives llama, qwen2, qwen3, qwen3_next, qwen3_5_text and"),
        (lambda: nn.Linear(2, 2), "model_type is None"),
        (
            lambda: LlamaModel(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)),
            "the model is a LlamaModel; the tree trainer drives ...ForCausalLM",
        ),
        (
            lambda: make("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0),
            "layer_types of this qwen2 model has 'sliding_attention'",
        ),
        (
            lambda: make("qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
            "num_experts of this qwen3_next model is 4",
        ),
        (
            lambda: make("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type of this llama model is 'dynamic'",
        ),
        (lambda: make("llama", attention_dropout=0.1).train(), "attention_dropout is 0.1 in training mode"),
    ],
)
def test_a_model_that_cannot_be_driven_exactly_is_refused(model, says) -> None:
    with pytest.raises(UndrivableModelError) as raised:
        driver_for(model())
    assert str(raised.value).startswith(says)


def test_dropout_is_allowed_where_it_does_nothing() -> None:
    assert driver_for(make("llama", attention_dropout=0.1).eval()).vocab_size == 13
    assert driver_for(make("llama").train()).vocab_size == 13


def test_gradient_checkpointing_in_training_is_refused() -> None:
    model = make("llama").train()
    assert isinstance(model, PreTrainedModel)
    model.gradient_checkpointing_enable()
    with pytest.raises(UndrivableModelError, match="gradient_checkpointing is on"):
        driver_for(model)


def test_a_path_beyond_the_tiny_models_positions_is_refused() -> None:
    span = Span(start=1, end=600, logprobs=(-1.0,) * 599, versions=(0,) * 599, temperature=1.0)
    forest = build([Path(Sequence(tokens=(1,) * 600, spans=(span,)), 1.0, 1.0)])
    with pytest.raises(UndrivableModelError, match="max_position_embeddings allows 512"):
        Walk(driver_for(make("tiny")), forest).log_probs()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [0, 1, 20])
def test_attention_by_blocks_is_attention(monkeypatch, plain, offload, heads, kv_heads, length) -> None:
    """Output and all gradients beside one softmax over past and chunk, with and without a flash kernel."""
    if plain:
        monkeypatch.setattr(kernels, "_kind", lambda *_: "plain")
    generator = torch.Generator().manual_seed(3)

    def draw(count: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, count, tokens, 8, dtype=torch.float64, generator=generator)

    q, k, v = draw(heads, 5), draw(kv_heads, 5 + length), draw(kv_heads, 5 + length)
    grad = draw(heads, 5)
    one = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [t.repeat_interleave(heads // kv_heads, 1) for t in one[1:]]
    mask = torch.ones(5, 5 + length, dtype=torch.bool).tril(length)
    wanted = F.scaled_dot_product_attention(one[0], *wide, attn_mask=mask, scale=0.3)
    wanted.backward(grad)

    past = KeyValues(32, offload=offload, block=6)
    past.write(0, 0, k[:, :, :length], v[:, :, :length])
    own = [t.clone().requires_grad_() for t in (q, k[:, :, length:], v[:, :, length:])]
    for _ in range(2):  # the past's gradients are sums
        out = attend(own[0], own[1], own[2], past, 0, length, 0.3)
        assert torch.allclose(out, wanted, atol=1e-12)
        out.backward(grad)
    grads = [tensor.grad for tensor in (*own, *one) if tensor.grad is not None]
    assert torch.allclose(grads[0], 2 * grads[3], atol=1e-12)
    found = past.gradients(0, 0, length, q)
    assert (found is None) == (length == 0)
    for index in (1, 2):
        assert torch.allclose(grads[index], 2 * grads[index + 3][:, :, length:], atol=1e-12)
        if found is not None:
            assert torch.allclose(found[index - 1], 2 * grads[index + 3][:, :, :length], atol=1e-12)


def test_cleared_gradients_are_zero_and_bytes_are_counted() -> None:
    past = KeyValues(4, block=2)
    past.write(0, 0, torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    assert past.bytes() == 2 * 2 * 4 * 8 * 4
    past.add(0, 0, 3, torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    past.clear(1, 2)
    found = past.gradients(0, 0, 3, torch.zeros(()))
    assert found is not None
    assert found[0][0, 0, :, 0].tolist() == [1, 0, 1]
    assert past.bytes() == 4 * 2 * 4 * 8 * 4


def test_a_models_own_calls_are_unchanged_by_being_driven() -> None:
    with float64():
        model = make("qwen3")
        tokens = torch.tensor([[1, 2, 3]])
        before = model(tokens).logits
        driver_for(model)
        assert torch.equal(model(tokens).logits, before)
