"""Small stock models in directories of their own."""

import json
from pathlib import Path
from typing import Any, Final

import torch

from opengyre.policy.stock import build
from opengyre.tiny.config import CONFIG_FILE
from opengyre.weights.write import write_version

LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
QWEN3: Final[dict[str, Any]] = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}


def save_stock(directory: Path, fields: dict[str, Any], *, seed: int = 0, shard_bytes: int = 1 << 30) -> Path:
    """A model of this config with random weights, in Hugging Face's layout."""
    model = build(directory, fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=fields["initializer_range"], generator=generator)
    write_version(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        directory, run="r", version=0, parent=None, step=0,
        extra={CONFIG_FILE: json.dumps(fields).encode()}, shard_bytes=shard_bytes,
    )  # fmt: skip
    return directory
