"""Causal models of `transformers`, built from local files only and loaded strictly: no tensor is made up or left out.

Files are read here and not by `from_pretrained`, which initialises what is missing at random and says so in its log.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opengyre.policy.directory import EXTRA
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError


def build(directory: Path, fields: dict[str, Any]) -> nn.Module:
    """The model that `config.json` (content: `fields`) describes, float32, with random weights, in evaluation mode.

    Raises `ModelDirectoryError`.
    """
    kind = fields["model_type"]
    if importlib.util.find_spec("transformers") is None:
        raise ModelDirectoryError(
            f"{directory / CONFIG_FILE}: a model of type {kind!r} is opened by the package transformers; {EXTRA}"
        )
    # An extra, and slow to import.
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise ModelDirectoryError(
            f"{directory / CONFIG_FILE}: model_type is {kind!r}, which transformers does not know"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(fields)
        # The generator belongs to who trains: building a model must not move it.
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except Exception as error:  # A family's own code meets the values, so its faults are of any type.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelDirectoryError(
            f"{directory / CONFIG_FILE}: no causal model of type {kind!r} can be built of it: {reason}"
        ) from error
    return model.eval()


def tied(model: nn.Module) -> set[str]:
    """Names that a file may have for tensors which the model holds under another name."""
    own = dict(model.named_parameters())
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own}
