"""Causal attention of a chunk over its path, whose keys and values are in a store.

The past is never joined to the chunk's own keys and values: each block of it, and the chunk itself, is attended to
apart and merged by log-sum-exp. The backward pass adds the gradients of the past to the store directly, block by block,
so what lives at once is one block's. With grouped queries, the queries of a group are taken as more queries of one head
where no mask depends on their order; keys and values of the past are not repeated.
"""

from typing import Any

import torch
from torch import Tensor

from opengyre.treegrad import kernels
from opengyre.treegrad.store import KeyValues


def attend(
    q: Tensor, k: Tensor, v: Tensor, past: KeyValues, layer: int, length: int, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attention of `q` (`[1, heads, tokens, head_dim]`) over `length` positions of `past`, and over `k`, `v`
    (`[1, kv_heads, tokens, head_dim]`): causally, or as `mask` says (`[tokens, tokens]`, added to the scores).

    Returns `[1, heads, tokens, head_dim]`; its graph leads to `q`, `k`, `v` and, by addition, to the gradients in
    `past`.
    """
    if torch.is_grad_enabled():
        return _Attention.apply(q, k, v, past, layer, length, scale, mask)
    return _forward(q, k, v, past, layer, length, scale, mask)[0]


def _expand(tensor: Tensor, heads: int) -> Tensor:
    """Each key/value head once for each query head of its group, without a copy where the kernel can do that."""
    batch, kv_heads, tokens, size = tensor.shape
    if heads == kv_heads:
        return tensor
    return (
        tensor[:, :, None].expand(batch, kv_heads, heads // kv_heads, tokens, size).reshape(batch, heads, tokens, size)
    )


def _reduce(tensor: Tensor, kv_heads: int) -> Tensor:
    """Sums over the query heads of each group."""
    batch, heads, tokens, size = tensor.shape
    if heads == kv_heads:
        return tensor
    return tensor.view(batch, kv_heads, heads // kv_heads, tokens, size).sum(2)


def _fold(tensor: Tensor, kv_heads: int) -> Tensor:
    """`[1, heads, tokens, ...]` as `[1, kv_heads, heads / kv_heads * tokens, ...]`."""
    return tensor.reshape(1, kv_heads, -1, *tensor.shape[3:])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, past: KeyValues, layer: int, length: int, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    out, lse = kernels.forward(q, _expand(k, heads), _expand(v, heads), mask is None, scale, mask)
    if not length:
        return out, lse
    folded = _fold(q, kv_heads)
    total, shape = out.to(lse.dtype), out.shape
    for _, _, keys, values in past.blocks(layer, length, q.device):
        part, part_lse = kernels.forward(folded, keys, values, False, scale)
        part, part_lse = part.reshape(shape), part_lse.reshape(lse.shape)
        merged = torch.logaddexp(lse, part_lse)
        total = total * torch.exp(lse - merged)[..., None] + part * torch.exp(part_lse - merged)[..., None]
        lse = merged
    return total.to(q.dtype), lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: KeyValues,
        layer: int,
        length: int,
        scale: float,
        mask: Tensor | None,
    ) -> Tensor:
        out, lse = _forward(q, k, v, past, layer, length, scale, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.past, ctx.layer, ctx.length, ctx.scale = past, layer, length, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        grad, scale = grads[0].to(q.dtype), ctx.scale
        heads, kv_heads = q.shape[1], k.shape[1]
        dq, dk, dv = kernels.backward(
            grad, q, _expand(k, heads), _expand(v, heads), out, lse, mask is None, scale, mask
        )
        if ctx.length:
            total = dq.to(lse.dtype)
            folded = [_fold(tensor, kv_heads) for tensor in (grad, q, out, lse)]
            for low, high, keys, values in ctx.past.blocks(ctx.layer, ctx.length, q.device):
                part, dkeys, dvalues = kernels.backward(
                    folded[0], folded[1], keys, values, folded[2], folded[3], False, scale
                )
                total += part.reshape(total.shape)
                ctx.past.add(ctx.layer, low, high, dkeys, dvalues)
            dq = total.to(q.dtype)
        return dq, _reduce(dk, kv_heads), _reduce(dv, kv_heads), None, None, None, None, None
