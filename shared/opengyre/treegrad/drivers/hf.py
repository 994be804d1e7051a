"""Stock causal models of `transformers`, driven through its own extension points; nothing is patched.

Attention is a function registered under a name of ours (`AttentionInterface`), which a model uses while a chunk of it
runs and not otherwise; a name without a mask function makes the model build no mask. The cache that the layers are
given joins nothing: it hands the past to that function, and recurrent layers their state as it was before the chunk.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from opengyre.treegrad.drivers.base import Pass
from opengyre.treegrad.store import Recurrent

ATTENTION = "opengyre_tree"


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """As `transformers` calls an attention function: `[1, heads, tokens, head_dim]` in, tokens before heads out."""
    del attention_mask  # none was built: see the module
    out = settings["tree_pass"].attend(query, key, value, module.layer_idx, settings["scaling"])
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class ChunkCache:
    """The part of `transformers.Cache` that the driven layers use, over one pass."""

    def __init__(self, run: Pass) -> None:
        self._run = run
        self._tails: dict[int, Tensor] = {}
        self.layers = _Layers(run)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the chunk."""
        del layer_idx
        return self._run.position

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The chunk's own, unchanged: the attention function joins them to the past."""
        del layer_idx
        return keys, values

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        del state_idx
        return layer_idx in self._run.before

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> Tensor:
        """The inputs of the convolution (`[1, channels, tokens]`) with those before them; keeps the last ones."""
        assert conv_kernel_size is not None
        before, reach = self._run.before.get(layer_idx), conv_kernel_size - 1
        tail = conv_states.new_zeros(*conv_states.shape[:2], reach) if before is None else before.tail
        joined = torch.cat((tail, conv_states), dim=-1)
        self._tails[layer_idx] = joined[..., joined.shape[-1] - reach :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        self._run.after[layer_idx] = Recurrent(recurrent_states, self._tails[layer_idx])
        return recurrent_states


class _Layers:
    """`cache.layers[i]`: `record_past` keeps a single token off the path that writes to the state in place."""

    def __init__(self, run: Pass) -> None:
        self._run = run

    def __getitem__(self, layer: int) -> SimpleNamespace:
        before = self._run.before.get(layer)
        states = {} if before is None else {0: before.state}
        return SimpleNamespace(record_past=True, recurrent_states=states)


class HfDriver:
    """Drives a `...ForCausalLM` whose decoder is `.model` and whose output embedding is `.lm_head`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.packs = "linear_attention" not in (getattr(model.config, "layer_types", None) or ())

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def hidden(self, tokens: Tensor, run: Pass) -> Tensor:
        config = self.model.config
        before = config._attn_implementation  # noqa: SLF001 - the field that transformers reads at each call
        try:
            config._attn_implementation = ATTENTION  # noqa: SLF001 - as above
            found = self.model.model(
                input_ids=tokens[None],
                position_ids=run.positions[None],
                past_key_values=ChunkCache(run),
                use_cache=True,
                tree_pass=run,
            )
        finally:
            config._attn_implementation = before  # noqa: SLF001 - as above
        return found.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)
