"""Small random models, whose log-probs transformers says, and settings of the vLLM engine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.shared.settings import HostSettings

VOCABULARY = 500


def settings(**changes: Any) -> HostSettings:
    return HostSettings(
        engine="vllm", threads=2, capacity=16, vllm_python=os.environ.get("GYRE_HOST__VLLM_PYTHON"), **changes
    )


class Models:
    """Directories of one shape under different weights, with tied embeddings, as SmolLM2 and small Qwen3 have them."""

    def __init__(self, folder: Path) -> None:
        self._models: dict[str, LlamaForCausalLM] = {}
        self.paths: dict[str, Path] = {}
        for seed, name in enumerate(("old", "new")):
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                tie_word_embeddings=True, initializer_range=0.1, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            self._models[name] = LlamaForCausalLM(config).eval()
            self.paths[name] = folder / name
            self._models[name].save_pretrained(self.paths[name])

    def logprobs(self, name: str, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of each token but the first, by a forward in float32."""
        with torch.no_grad():
            logits = self._models[name](torch.tensor([list(tokens)])).logits[0].double() / temperature
        found = torch.log_softmax(logits, -1)
        return [found[place - 1, tokens[place]].item() for place in range(1, len(tokens))]
