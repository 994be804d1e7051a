"""What the walk needs of a model: one chunk's forward pass, with all state from before the chunk handed in."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from opengyre.treegrad.attention import attend
from opengyre.treegrad.store import KeyValues, Recurrent


class UndrivableModelError(ValueError):
    """A model whose chunks cannot be computed exactly; the message names the field and what is allowed."""


class Pass:
    """One chunk's way through the layers.

    A layer with attention calls `attend`; a layer with a recurrent state takes `before.get(layer)` and leaves its own
    in `after`. `position`: tokens before the chunk; `positions`: of its tokens, `[tokens]`; `mask`: of a pack, what its
    tokens see of each other. With `graph`, keys, values and states keep their graph for the roots of the backward pass;
    `keep` writes keys and values to the store.
    """

    def __init__(
        self,
        past: KeyValues,
        position: int,
        positions: Tensor,
        before: dict[int, Recurrent],
        *,
        mask: Tensor | None = None,
        keep: bool,
        graph: bool,
    ) -> None:
        self.past, self.position, self.before = past, position, before
        self.positions, self.mask = positions, mask
        self.after: dict[int, Recurrent] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer -> keys and values of the chunk, with their graph; empty without `graph`."""
        self._keep, self._graph = keep, graph

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
        """Attention over the path before the chunk and over the chunk, `[1, heads, tokens, head_dim]`; `k` is what
        later tokens see (after any rotation)."""
        if self._graph:
            self.own[layer] = (k, v)
        if self._keep:
            self.past.write(layer, self.position, k.detach(), v.detach())
        return attend(q, k, v, self.past, layer, self.position, scale, self.mask)


class Driver(Protocol):
    """A model of one family."""

    @property
    def model(self) -> nn.Module: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, a shared one once."""
        ...

    def hidden(self, tokens: Tensor, run: Pass) -> Tensor:
        """Hidden states `[tokens, hidden]` before the output embedding, of `tokens` (`[tokens]`, int64) at
        `run.positions`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab]` of `hidden` (`[rows, hidden]`)."""
        ...

    @property
    def packs(self) -> bool:
        """Whether a chunk may be a pack: only attention joins tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model's first parameter is, and its type."""
    parameter = next(model.parameters())
    return parameter.device, parameter.dtype
