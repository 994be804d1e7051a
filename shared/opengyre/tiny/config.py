"""Shape of the tiny policy, written in the fields of Hugging Face's `LlamaConfig`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


class ModelDirectoryError(ValueError):
    """A model directory that cannot be used; the message names the file or field and what is allowed."""


def _rope(fields: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` as transformers writes it since 5.0: in `rope_parameters`. Empty where that is missing."""
    parameters = fields.get("rope_parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        raise ModelDirectoryError(
            f"{CONFIG_FILE}: rope_parameters is {parameters!r}; the tiny engine needs the rope_type 'default'"
        )
    if other := sorted(parameters.keys() - {"rope_type", "rope_theta"}):
        raise ModelDirectoryError(
            f"{CONFIG_FILE}: rope_parameters has {other[0]!r}; the tiny engine needs rope_type and rope_theta only"
        )
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """A Llama-type decoder with tied embeddings; the defaults make 0.44 M parameters at 512 tokens."""

    vocab_size: int
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 320
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelDirectoryError(f"{CONFIG_FILE}: {name} is {value!r}; allowed are whole numbers from 1")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ModelDirectoryError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of twice num_attention_heads "
                f"({self.num_attention_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_hf(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
        }

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "TinyConfig":
        """Read `config.json`'s content; refuses what this decoder does not compute."""
        heads = fields.get("num_attention_heads")
        fixed = {
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": heads,
        }
        for name, allowed in fixed.items():
            if fields.get(name) != allowed:
                raise ModelDirectoryError(
                    f"config.json: {name} is {fields.get(name)!r}; the tiny engine needs {allowed!r}"
                )
        fields = {**fields, **_rope(fields)}
        try:
            return cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except KeyError as missing:
            raise ModelDirectoryError(f"config.json: the field {missing} is missing") from missing

    def save(self, directory: Path) -> None:
        (directory / CONFIG_FILE).write_text(json.dumps(self.to_hf(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, directory: Path) -> "TinyConfig":
        path = directory / CONFIG_FILE
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelDirectoryError(f"{path} does not exist; a model directory has a config.json") from None
        except ValueError as error:
            raise ModelDirectoryError(f"{path} is not JSON: {error}") from error
        return cls.from_hf(fields)
