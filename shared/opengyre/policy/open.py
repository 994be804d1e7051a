"""A model directory as a policy: the module, its parameters by name, and how wide and long it is.

Invariants: parameters are float32, whatever the files hold; names are those of the files, each tensor once, so a
version that is written from them is a model directory again; dropout is off.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from opengyre.policy import directory as files
from opengyre.policy import stock
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.drivers import Driver, UndrivableModelError, driver_for


@dataclass(frozen=True, slots=True)
class Policy:
    """`model_type` is that of `config.json`; a model that the tiny decoder computes has `tiny` here."""

    model: nn.Module
    model_type: str
    vocabulary: int
    context: int
    """Tokens of a sequence at most."""
    config: str = CONFIG_FILE
    """The file that describes it, for messages."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, each once."""
        return dict(self.model.named_parameters())

    def driver(self) -> Driver:
        """What runs the model chunk by chunk; raises `ModelDirectoryError` for a model that cannot be trained so."""
        try:
            return driver_for(self.model)
        except UndrivableModelError as error:
            raise ModelDirectoryError(f"{self.config}: this model cannot be trained exactly: {error}") from error

    def tensors(self) -> dict[str, Tensor]:
        """Name -> what the parameter holds: float32, contiguous."""
        return {name: parameter.detach().float().contiguous() for name, parameter in self.parameters().items()}

    def fill(self, tensors: dict[str, Tensor], source: Path) -> None:
        """Take these weights; raises `ModelDirectoryError` naming a tensor of `source` that is missing or of
        another shape, of whole numbers or not finite."""
        own = self.parameters()
        # Code of others may have stored the tied output embedding as well; the tiny decoder has no name for it.
        repeated = stock.tied(self.model) if self.model_type != "tiny" else {"lm_head.weight"}
        given = {name: tensor for name, tensor in tensors.items() if name not in repeated}
        for name, parameter in own.items():
            if name not in given:
                raise ModelDirectoryError(f"{source}: the tensor {name} is missing")
            if given[name].shape != parameter.shape:
                raise ModelDirectoryError(
                    f"{source}: the tensor {name} has the shape {tuple(given[name].shape)}; {CONFIG_FILE} needs "
                    f"{tuple(parameter.shape)}"
                )
            if not given[name].is_floating_point():
                raise ModelDirectoryError(
                    f"{source}: the tensor {name} is of {given[name].dtype}; allowed are floating-point weights"
                )
            if not bool(torch.isfinite(given[name].float()).all()):
                raise ModelDirectoryError(f"{source}: the tensor {name} has values that are not finite")
        if extra := sorted(given.keys() - own.keys()):
            raise ModelDirectoryError(f"{source}: the tensor {extra[0]} is not one of this model's")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(given[name])


def build(directory: Path) -> Policy:
    """The policy that `config.json` describes, its weights not read. Raises `ModelDirectoryError`."""
    fields = files.read_config(directory)
    described = str(directory / CONFIG_FILE)
    tiny = files.tiny_config(fields)
    if tiny is not None:
        policy = Policy(TinyModel(tiny), "tiny", tiny.vocab_size, tiny.max_position_embeddings, described)
    else:
        model = stock.build(directory, fields)
        config: Any = model.config
        for name in ("vocab_size", "max_position_embeddings"):
            if not isinstance(getattr(config, name, None), int):
                raise ModelDirectoryError(f"{directory / CONFIG_FILE}: {name} is missing; it is a number of tokens")
        policy = Policy(model, config.model_type, config.vocab_size, config.max_position_embeddings, described)
    files.check_tokenizer(directory, policy.vocabulary)
    return policy


def open_policy(directory: Path) -> Policy:
    """The policy in `directory` with its weights, for training. Raises `ModelDirectoryError`."""
    # What is missing is said before a large model is built.
    files.read_config(directory)
    files.weight_files(directory)
    policy = build(directory)
    refill(policy, directory)
    return policy


def refill(policy: Policy, directory: Path) -> None:
    """Take the weights of another directory with the same `config.json`. Raises `ModelDirectoryError`, after which the
    policy's weights may be of both."""
    tensors: dict[str, Tensor] = {}
    for path in files.weight_files(directory):
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise ModelDirectoryError(f"{path} is not a safetensors file: {error}") from error
    policy.fill(tensors, directory)
