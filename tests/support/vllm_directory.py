"""A model directory with nothing in it but what the vLLM engine reads beforehand."""

import json
from pathlib import Path
from typing import Any


def model(folder: Path, **changes: Any) -> Path:
    fields = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "dtype": "bfloat16", **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    return folder
