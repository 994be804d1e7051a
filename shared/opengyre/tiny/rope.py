"""Rotary position embedding in the half-split layout of Hugging Face's Llama."""

import torch
from torch import Tensor


def tables(head_dim: int, positions: int, theta: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[positions, head_dim]`, computed in float64."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` (`[..., head_dim]`) turned by its position's angles (`cos`, `sin` broadcast against it)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
