"""Attention of one block of keys, with its log-sum-exp, forward and backward.

Blocks of keys merge exactly by their log-sum-exp, and the backward pass of a block needs the merged output and
log-sum-exp only (FlashAttention, Dao et al. 2022). All tensors are `[1, heads, tokens, head_dim]`, the log-sum-exp
`[1, heads, queries]` in float32 or, for float64, float64; queries, keys and values have equally many heads.

`mask` (`[queries, keys]` of the queries' type, 0 or minus infinity, with a 0 in each row) is added to the scores.

Kernels: PyTorch's flash attention for CPUs (any floating type), for CUDA (16-bit types, head sizes that are multiples
of 8), and else plain matrix products, one block of `queries x keys` scores at a time.
"""

import math

import torch
from torch import Tensor

_flash_cpu, _flash_cpu_backward, _flash_cuda, _flash_cuda_backward = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{name}")
    for name in ("_for_cpu", "_for_cpu_backward", "", "_backward")
)
"""What `scaled_dot_product_attention` itself calls; it does not return the log-sum-exp."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block. `causal`: key `i` is seen by query `i` and those after it."""
    kind = _kind(q, v, mask)
    if kind == "cpu":
        return _flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if kind == "cuda":
        found = _flash_cuda(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]
    scores = _scores(q, k, causal, scale, mask)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]).to(v.dtype) @ v), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through one block, from the merged `out` and `lse`."""
    kind = _kind(q, v, mask)
    if kind == "cpu":
        return _flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    if kind == "cuda":
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # a random state for dropout, which there is none of
        return _flash_cuda_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none[0], scale=scale
        )
    weights = torch.exp(_scores(q, k, causal, scale, mask) - lse[..., None])
    wide = grad.to(weights.dtype)
    inner = wide @ v.to(weights.dtype).transpose(-1, -2) - (wide * out).sum(-1, keepdim=True)
    scores = weights * inner * scale
    dv = weights.transpose(-1, -2) @ wide
    return (
        (scores @ k.to(scores.dtype)).to(q.dtype),
        (scores.transpose(-1, -2) @ q.to(scores.dtype)).to(k.dtype),
        dv.to(v.dtype),
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are held in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _kind(q: Tensor, v: Tensor, mask: Tensor | None) -> str:
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (
        "cuda"
        if q.device.type == "cuda" and half and mask is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
        else "plain"
    )


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(wide(q.dtype)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores
