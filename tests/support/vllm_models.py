"""Small random models, whose log-probs transformers says, and settings of the vLLM engine."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.shared.settings import HostSettings
from opengyre.weights.canary import CANARY_FILE, encode, prompts_for

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
            vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
            Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(self.paths[name] / "tokenizer.json"))

    def with_canary(self, name: str, of: str, *, weights: str | None = None) -> Path:
        """A directory with the weights of one and the canary of another model."""
        directory = self.paths["old"].parent / name
        shutil.copytree(self.paths[weights or of], directory)
        prompts = prompts_for(VOCABULARY)
        content = encode(prompts, [self.logprobs(of, prompt) for prompt in prompts])
        assert content is not None
        (directory / CANARY_FILE).write_bytes(content)
        return directory

    def logprobs(self, name: str, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of each token but the first, by a forward in float32."""
        with torch.no_grad():
            logits = self._models[name](torch.tensor([list(tokens)])).logits[0].double() / temperature
        found = torch.log_softmax(logits, -1)
        return [found[place - 1, tokens[place]].item() for place in range(1, len(tokens))]
