"""The shape of a causal model, from its `config.json`: how many parameters, keys and values, operations. Pure.

Counted are dense decoders of the families `llama`, `qwen2` and `qwen3` (and the tiny decoder, which is a `llama`): a
gated MLP, grouped queries, RMS norms. Numbers are those of the tensors that `transformers` makes
(`tests/unit/test_sizing.py` compares).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opengyre.tiny.config import ModelDirectoryError

FAMILIES: Final = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Shape:
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Positions that the model has."""
    tied: bool
    """Whether the output head is the embedding."""
    attention_bias: tuple[bool, bool]
    """Of queries, keys and values; of the output."""
    mlp_bias: bool = False
    dtype: str = "float32"
    """Of the files, as the config names it."""

    @property
    def matrices(self) -> int:
        """Parameters of the layers' matrices: what a token is multiplied by, without the embedding and the head."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All of them, a tied head once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = self.attention_bias[0] * (queries + 2 * keys) + self.attention_bias[1] * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.matrices + self.layers * (biases + norms) + self.hidden + embeddings

    @property
    def kv_values(self) -> int:
        """Numbers that one token's keys and values are, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, before: float = 0.0) -> float:
        """Operations of one token's forward pass with `before` tokens before it: two for each parameter of a matrix
        and of the head, and four for each head's dimension and earlier token (scores, and sums of values)."""
        head = self.vocabulary * self.hidden
        return 2.0 * (self.matrices + head) + 4.0 * self.layers * self.heads * self.head_dim * before


def shape_of(fields: Mapping[str, Any], source: str) -> Shape:
    """From a `config.json`'s fields; raises `ModelDirectoryError` naming `source` and the field."""
    family = fields.get("model_type")
    if family not in FAMILIES or fields.get("num_experts"):
        raise ModelDirectoryError(
            f"{source}: model_type is {family!r}; memory and time are worked out for {', '.join(FAMILIES)}"
        )

    def number(name: str, default: int | None = None) -> int:
        value = fields.get(name, default)
        if type(value) is not int or value < 1:
            raise ModelDirectoryError(f"{source}: {name} is {value!r}; allowed are whole numbers from 1")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    bias = bool(fields.get("attention_bias", False))
    return Shape(
        family=family,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=fields.get("head_dim") or hidden // heads,
        intermediate=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        context=number("max_position_embeddings"),
        tied=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=(True, False) if family == "qwen2" else (bias, bias),
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
    )
