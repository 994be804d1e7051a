"""The engine's forward pass: a fixed number of rows, each one token of one slot, over a key/value cache.

Invariant: what a row yields depends on its token, its position and its slot's cache only, to the bit, where the
linear algebra library computes the rows of a matrix product of one shape alike (measured for MKL on AVX2: see the
tests). Hence every step has the same number of rows, used or not, and attention runs over blocks of 64 positions in
order: a block that is masked for a row changes nothing of it. Prompts and samples take the same path, so a prompt that
is a former completion fills the cache with the same bits as sampling it did.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the common name

from opengyre.tiny import rope
from opengyre.tiny.config import TinyConfig

BLOCK: Final = 64
"""Positions in a block of the cache."""


class Weights:
    """A model's tensors, fused for inference."""

    def __init__(self, config: TinyConfig, tensors: Mapping[str, Tensor]) -> None:
        def of(layer: int, *names: str) -> Tensor:
            parts = [tensors[f"model.layers.{layer}.{name}.weight"] for name in names]
            return torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()

        layers = range(config.num_hidden_layers)
        self.embedding = tensors["model.embed_tokens.weight"].contiguous()
        self.norm = tensors["model.norm.weight"].contiguous()
        self.attention_norm = [of(n, "input_layernorm") for n in layers]
        self.qkv = [of(n, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") for n in layers]
        self.out = [of(n, "self_attn.o_proj") for n in layers]
        self.mlp_norm = [of(n, "post_attention_layernorm") for n in layers]
        self.gate_up = [of(n, "mlp.gate_proj", "mlp.up_proj") for n in layers]
        self.down = [of(n, "mlp.down_proj") for n in layers]

    @property
    def nbytes(self) -> int:
        groups = (self.attention_norm, self.qkv, self.out, self.mlp_norm, self.gate_up, self.down)
        return self.embedding.nbytes + self.norm.nbytes + sum(tensor.nbytes for group in groups for tensor in group)


class Cache:
    """Keys and values of `slots` slots and one scratch slot (number `slots`) that unused rows write to."""

    def __init__(self, config: TinyConfig, slots: int, context: int) -> None:
        blocks = -(-context // BLOCK)
        shape = (config.num_hidden_layers, blocks, slots + 1, config.num_attention_heads)
        # Keys lie transposed, so that both products of attention read their block in order.
        self.keys = torch.zeros((*shape, config.head_dim, BLOCK))
        self.values = torch.zeros((*shape, BLOCK, config.head_dim))

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Kernel:
    """Rows in, logits out. Not thread-safe; one thread of torch's own keeps the bits stable."""

    def __init__(self, config: TinyConfig, rows: int, context: int) -> None:
        self.config = config
        self.rows = rows
        self._cos, self._sin = rope.tables(config.head_dim, context, config.rope_theta)
        self._offsets = torch.arange(BLOCK)
        self._scale = config.head_dim**-0.5

    def _attend(
        self, q: Tensor, layer: int, cache: Cache, slots: Tensor | None, positions: Tensor, blocks: int
    ) -> Tensor:
        """Attention of `q` (`[rows, heads, dim]`, scaled) over the cache of its slot up to its position."""
        rows, heads, dim = q.shape
        q = q.reshape(rows * heads, 1, dim)
        top = total = out = q  # replaced in the first block
        for block in range(blocks):
            keys, values = cache.keys[layer, block], cache.values[layer, block]
            if slots is None:
                keys, values = keys[:rows], values[:rows]
            else:
                keys, values = keys.index_select(0, slots), values.index_select(0, slots)
            seen = (self._offsets + block * BLOCK <= positions[:, None]).repeat_interleave(heads, 0)[:, None, :]
            scores = torch.bmm(q, keys.view(rows * heads, dim, BLOCK)).masked_fill(~seen, float("-inf"))
            highest = scores.amax(-1, keepdim=True)
            if block:
                highest = torch.maximum(top, highest)
            share = torch.exp(scores - highest)
            weighted = torch.bmm(share, values.view(rows * heads, BLOCK, dim))
            if block:
                keep = torch.exp(top - highest)
                total, out = total * keep + share.sum(-1, keepdim=True), out * keep + weighted
            else:
                total, out = share.sum(-1, keepdim=True), weighted
            top = highest
        return (out / total).view(rows, heads * dim)

    def forward(
        self, weights: Weights, cache: Cache, tokens: list[int], slots: list[int] | None, positions: list[int]
    ) -> Tensor:
        """Write each row's key and value into its slot and return the logits `[rows, vocab]` that follow it.

        The lists have `rows` entries. `slots=None` says that row `i` is slot `i`. Rows of one slot in one call see
        each other up to their own position.
        """
        config, rows, size = self.config, self.rows, self.config.hidden_size
        shape = (rows, config.num_attention_heads, config.head_dim)
        at = torch.tensor(positions)
        where = torch.arange(rows) if slots is None else torch.tensor(slots)
        gather = None if slots is None else where
        block, offset = at // BLOCK, at % BLOCK
        blocks = max(positions) // BLOCK + 1
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        x = weights.embedding[torch.tensor(tokens)]
        for layer in range(config.num_hidden_layers):
            h = F.rms_norm(x, (size,), weights.attention_norm[layer], config.rms_norm_eps)
            q, k, v = (part.view(shape) for part in F.linear(h, weights.qkv[layer]).split(size, dim=-1))
            cache.keys[layer][block, where, :, :, offset] = rope.rotate(k, cos, sin)
            cache.values[layer][block, where, :, offset] = v
            q = rope.rotate(q, cos, sin) * self._scale
            x = x + F.linear(self._attend(q, layer, cache, gather, at, blocks), weights.out[layer])
            h = F.rms_norm(x, (size,), weights.mlp_norm[layer], config.rms_norm_eps)
            gate, up = F.linear(h, weights.gate_up[layer]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights.down[layer])
        x = F.rms_norm(x, (size,), weights.norm, config.rms_norm_eps)
        return F.linear(x, weights.embedding)
