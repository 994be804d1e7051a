"""What the fields of a `config.json` may be for a policy that is trained, by themselves and beside the weights. Pure.

A field that is missing has its family's default, which `transformers` knows; what is there is checked.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from opengyre.tiny.config import ModelDirectoryError

TRAINED: Final = ("llama", "qwen2", "qwen3", "qwen3_next", "qwen3_5_text")
"""Families that the exact gradient drives: those of `opengyre.treegrad.drivers`, said without torch."""
LAYER_TYPES: Final = ("full_attention", "linear_attention")
"""Of these families, those that it drives."""
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
"""Of these families, those that it drives."""
PLAIN: Final = ("llama", "qwen2", "qwen3")
"""Whose attention has as many rows as heads and their dimension say."""
DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
COUNTS: Final = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
MAY_BE_NULL: Final = ("num_key_value_heads", "head_dim")
WHOLE: Final = "allowed are whole numbers from 1"

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> number format and shape, as `directory.header` reads them."""


def check_fields(fields: Mapping[str, Any], source: str) -> None:
    """Raise `ModelDirectoryError` naming the first field that is senseless, and what is allowed."""
    for name in COUNTS:
        value = fields.get(name)
        if name not in fields or (value is None and name in MAY_BE_NULL):
            continue
        if type(value) is not int or value < 1:
            raise ModelDirectoryError(f"{source}: {name} is {value!r}; {WHOLE}")
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is not None and value not in DTYPES:
            raise ModelDirectoryError(f"{source}: {name} is {value!r}; allowed are {', '.join(DTYPES)}")
    hidden, heads, kv = (fields.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads is None:
        return
    if hidden is not None and hidden % heads and _splits(fields):
        raise ModelDirectoryError(
            f"{source}: num_attention_heads is {heads}; hidden_size is {hidden}, so allowed are numbers that divide it"
        )
    if kv is not None and heads % kv:
        raise ModelDirectoryError(
            f"{source}: num_key_value_heads is {kv}; num_attention_heads is {heads}, so allowed are numbers that "
            "divide it"
        )


def _splits(fields: Mapping[str, Any]) -> bool:
    """Whether the hidden size is split among the heads."""
    kind = fields.get("model_type")
    return kind == "llama" or (kind == "qwen2" and not fields.get("head_dim"))


def check_family(fields: Mapping[str, Any], source: str) -> None:
    """Raise `ModelDirectoryError` for a model that the exact gradient does not drive."""
    kind = fields.get("model_type")
    if kind not in TRAINED:
        raise ModelDirectoryError(
            f"{source}: model_type is {kind!r}, which cannot be trained exactly; allowed are {', '.join(TRAINED)}"
        )
    if fields.get("num_experts"):
        raise ModelDirectoryError(
            f"{source}: num_experts is {fields['num_experts']!r}; models with experts cannot be trained exactly, so "
            "allowed is 0"
        )
    layers = fields.get("layer_types")
    for layer in layers if isinstance(layers, list) else ():
        if layer not in LAYER_TYPES:
            raise ModelDirectoryError(
                f"{source}: layer_types has {layer!r}, which cannot be trained exactly; allowed are "
                f"{', '.join(LAYER_TYPES)}"
            )
    for name in ("rope_parameters", "rope_scaling"):
        said = fields.get(name)
        rope = said.get("rope_type", said.get("type", "default")) if isinstance(said, dict) else "default"
        if rope not in ROPE_TYPES:
            raise ModelDirectoryError(
                f"{source}: {name} has the rope_type {rope!r}, whose angles depend on what else is computed; allowed "
                f"are {', '.join(ROPE_TYPES)}"
            )


def check_shapes(fields: Mapping[str, Any], shapes: Shapes, source: str) -> None:
    """Raise `ModelDirectoryError` for a field that says another size than the weights have. Whoever has no tensor of
    such a name is not asked."""
    for name, allowed, why in _said_by(fields, shapes):
        value = fields.get(name)
        if value is not None and value != allowed:
            raise ModelDirectoryError(f"{source}: {name} is {value}; {why}, so {allowed} is allowed")
    if fields.get("model_type") not in PLAIN:
        return
    hidden, heads, kv, width = (
        fields.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads is None or hidden is None or (width is None and fields["model_type"] == "qwen3"):
        return
    width = width or hidden // heads
    for name, count, ending in (("num_attention_heads", heads, "q_proj"), ("num_key_value_heads", kv, "k_proj")):
        shape = _shape(shapes, f"self_attn.{ending}.weight")
        if shape is not None and count is not None and shape[0] != count * width:
            raise ModelDirectoryError(
                f"{source}: {name} is {count} with heads of {width} numbers; {ending}.weight has {shape[0]} rows, so "
                f"allowed are {name} and head_dim whose product is {shape[0]}"
            )


def _said_by(fields: Mapping[str, Any], shapes: Shapes) -> Iterator[tuple[str, int, str]]:
    """Field, what the weights say it is, and by what."""
    for ending in ("embed_tokens.weight", "lm_head.weight"):
        shape = _shape(shapes, ending)
        if shape is not None:
            yield "vocab_size", shape[0], f"{ending} has {shape[0]} rows"
            yield "hidden_size", shape[1], f"{ending} has {shape[1]} columns"
    layers = {int(part) for name in shapes if (part := _layer(name)) is not None}
    if layers:
        yield "num_hidden_layers", max(layers) + 1, f"the weights have {max(layers) + 1} layers"
    if fields.get("model_type") in TRAINED and (shape := _shape(shapes, ".mlp.up_proj.weight")) is not None:
        yield "intermediate_size", shape[0], f"up_proj.weight has {shape[0]} rows"


def _shape(shapes: Shapes, ending: str) -> tuple[int, ...] | None:
    """Of the matrix whose name ends so."""
    return next((shape for name, (_, shape) in shapes.items() if name.endswith(ending) and len(shape) == 2), None)


def _layer(name: str) -> str | None:
    """The layer's number in a tensor's name."""
    before, found, after = name.partition("layers.")
    part = after.partition(".")[0]
    return part if found and before.endswith("model.") and part.isdigit() else None
