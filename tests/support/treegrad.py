"""Tiny random models of each driven family, in float64, and the gradient of paths trained one by one.

`transformers` computes norms, rotations and gated delta rules in float32 whatever a model's type is. `float64` replaces
the module-level name `torch` of the modelling files by one whose float32 is float64, and `Tensor.float`, so that both
sides of a comparison are float64 throughout.
"""

import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from opengyre.learn.events import Events
from opengyre.proto import group
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.forest import Path, build
from opengyre.treegrad.table import event_tensors

VOCAB = 13
FAMILIES = ("tiny", "llama", "qwen2", "qwen3", "qwen3_next", "qwen3_5_text")
_MODULES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_next": "qwen3_next", "qwen3_5_text": "qwen3_5"}
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


class _Double:
    """`torch`, in which float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def float64() -> Iterator[None]:
    """Within, the models compute in float64 throughout."""
    with mock.patch.object(Tensor, "float", Tensor.double):
        patches = [
            mock.patch.object(
                importlib.import_module(f"transformers.models.{name}.modeling_{name}"), "torch", _Double()
            )
            for name in _MODULES.values()
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def make(family: str, seed: int = 1, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A random model whose predictions depend on all of the prefix."""
    torch.manual_seed(seed)
    if family == "tiny":
        model: nn.Module = TinyModel(TinyConfig(VOCAB, hidden_size=16, intermediate_size=24, num_attention_heads=2))
    else:
        config, kind, extra = {
            "llama": (LlamaConfig, LlamaForCausalLM, {}),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
            "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**_LINEAR, "num_experts": 0}),
            "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _LINEAR),
        }[family]
        model = kind(config(**{**_SHAPE, **extra, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.1))
    return model.to(dtype).eval()


def path_log_probs(model: nn.Module, sequence: group.Sequence) -> Tensor:
    """Log-prob of each trained token, computed as ever: the whole path at once, with a graph."""
    tokens = torch.tensor([sequence.tokens])
    logits = model(tokens) if isinstance(model, TinyModel) else model(tokens, use_cache=False).logits
    parts = [logits.new_zeros(0)]
    for span in sequence.spans:
        scores = torch.log_softmax(logits[0, span.start - 1 : span.end - 1] / span.temperature, -1)
        parts.append(scores.gather(-1, tokens[0, span.start : span.end, None]).squeeze(-1))
    return torch.cat(parts)


def flat_gradient(
    model: nn.Module, paths: Sequence[Path], objective: Any, **columns: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, log-probs and gradient of training each path in full."""
    forest = build(paths)
    logp = torch.cat([path_log_probs(model, path.sequence) for path in paths])
    loss, _ = objective(logp, event_tensors(forest, logp.device, logp.dtype, **columns))
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return (
        loss.detach(),
        logp.detach(),
        {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)},
    )


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference by the norm of what is wanted, over all parameters."""
    apart = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted) ** 0.5
    return apart / (sum(float(wanted[name].double().square().sum()) for name in wanted) ** 0.5 + 1e-300)


def clipped_with_kl(logp: Tensor, events: Events) -> tuple[Tensor, None]:
    """A clipped token loss, a KL term (k3) to a reference, and a clipped ratio of whole sequences."""
    assert events.sequence is not None
    ratio = torch.exp(logp - events.behaviour)
    free = torch.minimum(ratio * events.advantage, ratio.clamp(0.8, 1.28) * events.advantage)
    reference = events.behaviour.flip(0) if events.reference is None else events.reference
    kl = torch.exp(reference - logp) - 1 - (reference - logp)
    size = int(events.sequence.max()) + 1 if events.sequence.numel() else 0
    total = logp.new_zeros(size).index_add(0, events.sequence, logp - events.behaviour)
    counts = logp.new_zeros(size).index_add(0, events.sequence, torch.ones_like(logp)).clamp(min=1)
    whole = torch.exp(total / counts)[events.sequence]
    sequence = torch.minimum(whole * events.advantage, whole.clamp(0.9, 1.1) * events.advantage)
    return (events.weight * (-free + 0.1 * kl - 0.5 * sequence)).sum(), None


def random_paths(rng: random.Random, leaves: int, depth: int, longest: int = 9) -> list[Path]:
    """Paths of a random tree, some of them equal or prefixes of others, with spans of several advantages, temperatures
    and behaviour log-probs on shared tokens."""
    stems: list[tuple[int, ...]] = [(rng.randrange(VOCAB),)]
    levels = [0]
    for _ in range(leaves):
        at = rng.choice([i for i, level in enumerate(levels) if level < depth])
        stem = stems[at][: rng.randint(1, len(stems[at]))] if rng.random() < 0.5 else stems[at]
        stems.append((*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, longest)))))
        levels.append(levels[at] + 1)
    return [path_of(rng, tokens, index // 2) for index, tokens in enumerate(stems[1:])]


def path_of(rng: random.Random, tokens: tuple[int, ...], execution: int) -> Path:
    cuts = sorted(rng.randint(1, len(tokens)) for _ in range(rng.choice((2, 4))))
    spans = tuple(
        group.Span(
            start=start, end=end, logprobs=tuple(rng.uniform(-4, -1.5) for _ in range(start, end)),
            versions=tuple(rng.choice((4, 5)) for _ in range(start, end)), temperature=rng.choice((1.0, 1.0, 0.7)),
            advantage=rng.choice((None, -0.5)), weight=rng.uniform(0.5, 1.5),
        )
        for start, end in zip(cuts[::2], cuts[1::2], strict=True)
    )  # fmt: skip
    return Path(
        group.Sequence(tokens=tokens, spans=spans), rng.choice((-1.0, 0.5, 2.0)), rng.uniform(0.1, 1), execution
    )
