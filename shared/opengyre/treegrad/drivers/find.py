"""Which driver a model has, and why another has none. `transformers` is imported for its models only."""

from typing import Any, Final

from torch import nn

from opengyre.tiny.model import TinyModel
from opengyre.treegrad.drivers.base import Driver, UndrivableModelError
from opengyre.treegrad.drivers.tiny import TinyDriver

ATTENTION_FAMILIES: Final = ("llama", "qwen2", "qwen3")
HYBRID_FAMILIES: Final = ("qwen3_next", "qwen3_5_text")
FAMILIES: Final = (*ATTENTION_FAMILIES, *HYBRID_FAMILIES)
LAYER_TYPES: Final = ("full_attention", "linear_attention")
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")


def driver_for(model: nn.Module) -> Driver:
    """The driver of a `TinyModel` or of a causal model of `transformers`. Raises `UndrivableModelError` where a chunk
    would not compute what the whole path does."""
    if isinstance(model, TinyModel):
        return TinyDriver(model)
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    allowed = ", ".join(FAMILIES)
    if family not in FAMILIES:
        raise UndrivableModelError(f"model_type is {family!r}; the tree trainer drives {allowed} and the tiny model")
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise UndrivableModelError(
            f"the model is a {type(model).__name__}; the tree trainer drives ...ForCausalLM of {allowed}"
        )
    _check_layers(config, family)
    _check_modules(model)
    from opengyre.treegrad.drivers.hf import HfDriver  # transformers is an extra

    return HfDriver(model)


def _check_layers(config: Any, family: str) -> None:
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise UndrivableModelError(
                f"layer_types of this {family} model has {kind!r}; the tree trainer drives {', '.join(LAYER_TYPES)}"
            )
    if getattr(config, "num_experts", 0):
        raise UndrivableModelError(
            f"num_experts of this {family} model is {config.num_experts}; the tree trainer drives dense models, with 0"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UndrivableModelError(
            f"rope_type of this {family} model is {rope!r}, whose angles depend on what else is computed; allowed are "
            f"{', '.join(ROPE_TYPES)}"
        )


def _check_modules(model: nn.Module) -> None:
    if not model.training:
        return
    config: Any = model.config
    if getattr(config, "attention_dropout", 0.0):
        raise UndrivableModelError(
            f"attention_dropout is {config.attention_dropout} in training mode; allowed is 0, or eval()"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UndrivableModelError(f"the dropout {name} is {module.p} in training mode; allowed is 0, or eval()")
        if getattr(module, "gradient_checkpointing", False):
            raise UndrivableModelError(
                "gradient_checkpointing is on and the model is in training mode; allowed is off: chunks bound memory"
            )
