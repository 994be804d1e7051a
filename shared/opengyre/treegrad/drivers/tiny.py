"""The tiny model: its own modules, with attention over the store."""

from collections.abc import Iterator

from torch import Tensor, nn

from opengyre.tiny import rope
from opengyre.tiny.model import Layer, TinyModel
from opengyre.treegrad.drivers.base import Pass, UndrivableModelError


class TinyDriver:
    """Drives `opengyre.tiny.model.TinyModel`."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model

    @property
    def packs(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def hidden(self, tokens: Tensor, run: Pass) -> Tensor:
        decoder = self.model.model
        end = int(run.positions.max()) + 1
        if end > len(decoder.cos):
            raise UndrivableModelError(
                f"a path has {end} tokens or more; max_position_embeddings allows {len(decoder.cos)}"
            )
        cos, sin = decoder.cos[run.positions], decoder.sin[run.positions]
        x = decoder.embed_tokens(tokens[None])
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, Layer)
            x = _layer(layer, x, cos, sin, run, index)
        return decoder.norm(x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def _layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, run: Pass, index: int) -> Tensor:
    attention, inner = layer.self_attn, layer.input_layernorm(x)
    batch, length, size = x.shape
    shape = (batch, length, attention.heads, attention.head_dim)
    q = rope.rotate(attention.q_proj(inner).view(shape).transpose(1, 2), cos, sin)
    k = rope.rotate(attention.k_proj(inner).view(shape).transpose(1, 2), cos, sin)
    v = attention.v_proj(inner).view(shape).transpose(1, 2)
    out = run.attend(q, k, v, index, attention.head_dim**-0.5)
    x = x + attention.o_proj(out.transpose(1, 2).reshape(batch, length, size))
    return x + layer.mlp(layer.post_attention_layernorm(x))
