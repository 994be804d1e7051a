"""Keys, values and their gradients along the current path, and what else a layer hands to the next token.

One buffer a layer holds the path by position; entering a segment overwrites what an earlier one left there. Gradients
are sums in float32 (float64 for a float64 model). With `offload` all of it lies in host memory (pinned where there is a
GPU), and a layer's blocks are on the device while that layer computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opengyre.treegrad.kernels import wide


@dataclass(slots=True)
class _Layer:
    """`[kv_heads, capacity, head_dim]` each."""

    keys: Tensor
    values: Tensor
    key_grads: Tensor | None = None
    value_grads: Tensor | None = None


class KeyValues:
    """The path's keys and values. `capacity`: positions; `block`: positions that attention takes at once."""

    def __init__(self, capacity: int, *, offload: bool = False, block: int = 8192) -> None:
        self._capacity, self._offload, self._block = capacity, offload, block
        self._layers: dict[int, _Layer] = {}

    def bytes(self) -> int:
        """Held at present."""
        tensors = [t for s in self._layers.values() for t in (s.keys, s.values, s.key_grads, s.value_grads)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def write(self, layer: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (`[1, kv_heads, tokens, head_dim]`) of the tokens from `position`."""
        store = self._layers.get(layer)
        if store is None:
            store = self._layers[layer] = _Layer(self._empty(keys), self._empty(values))
        end = position + keys.shape[2]
        store.keys[:, position:end].copy_(keys[0])
        store.values[:, position:end].copy_(values[0])

    def blocks(self, layer: int, length: int, device: torch.device) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """`(low, high, keys, values)` of the positions below `length`, on `device`."""
        if not length:
            return
        store = self._layers[layer]
        for low in range(0, length, self._block):
            high = min(length, low + self._block)
            yield (
                low,
                high,
                self._bring(store.keys[None, :, low:high], device),
                self._bring(store.values[None, :, low:high], device),
            )

    def add(self, layer: int, low: int, high: int, keys: Tensor, values: Tensor) -> None:
        """Add gradients (`[1, kv_heads, high - low, head_dim]`) of the positions from `low`."""
        store = self._layers[layer]
        if store.key_grads is None or store.value_grads is None:
            store.key_grads = self._zeros(store.keys)
            store.value_grads = self._zeros(store.values)
        store.key_grads[:, low:high] += keys[0].to(store.key_grads)
        store.value_grads[:, low:high] += values[0].to(store.value_grads)

    def gradients(self, layer: int, low: int, high: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """What has been added to these positions, of the type and on the device of `like`; None: nothing yet."""
        store = self._layers.get(layer)
        if store is None or store.key_grads is None or store.value_grads is None:
            return None
        return store.key_grads[None, :, low:high].to(like), store.value_grads[None, :, low:high].to(like)

    def clear(self, low: int, high: int) -> None:
        """Set the gradients of these positions to zero."""
        for store in self._layers.values():
            if store.key_grads is not None and store.value_grads is not None:
                store.key_grads[:, low:high].zero_()
                store.value_grads[:, low:high].zero_()

    def _empty(self, like: Tensor) -> Tensor:
        heads, size = like.shape[1], like.shape[3]
        device = torch.device("cpu") if self._offload else like.device
        pinned = self._offload and like.device.type == "cuda"
        return torch.empty(heads, self._capacity, size, dtype=like.dtype, device=device, pin_memory=pinned)

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=wide(like.dtype))

    def _bring(self, tensor: Tensor, device: torch.device) -> Tensor:
        # A copy also where host and device are one: then what is tested there is what runs on a GPU.
        return tensor.to(device, non_blocking=True, copy=True) if self._offload else tensor


@dataclass(slots=True)
class Recurrent:
    """What a linear-attention layer hands on: its state, and the last inputs of its convolution."""

    state: Tensor
    tail: Tensor


@dataclass(slots=True)
class Boundary:
    """All that a chunk needs of the tokens before it, beside keys and values."""

    hidden: Tensor | None = None
    """Last hidden state `[hidden]` of the predecessor; None at a root."""
    recurrent: dict[int, Recurrent] = field(default_factory=dict)
    """By layer; empty at a root."""
