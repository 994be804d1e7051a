"""Model directories in Hugging Face's layout: config.json, model.safetensors (or shards), tokenizer files."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opengyre.tiny.config import ModelDirectoryError, TinyConfig
from opengyre.tiny.model import TinyModel

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model of this shape."""
    with torch.device("meta"):
        layout = TinyModel(config)
    return {name: tuple(parameter.shape) for name, parameter in layout.named_parameters()}


def save_pretrained(model: TinyModel, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` (float32). Not atomic: see `opengyre.weights` for that."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save(directory)
    tensors = {name: parameter.detach().float().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def load_tensors(directory: Path, config: TinyConfig) -> dict[str, Tensor]:
    """Every tensor of the model in `directory`, float32; an error names what is missing or of a wrong shape."""
    index = directory / INDEX_FILE
    names = [WEIGHTS_FILE]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(directory / name))
        except FileNotFoundError:
            raise ModelDirectoryError(f"{directory / name} does not exist") from None
        except SafetensorError as error:
            raise ModelDirectoryError(f"{directory / name} is not a safetensors file: {error}") from error
    # Written by Hugging Face code as well, which may store the tied output embedding.
    tensors.pop("lm_head.weight", None)
    wanted = shapes(config)
    for name, shape in wanted.items():
        if name not in tensors:
            raise ModelDirectoryError(f"{directory}: the tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ModelDirectoryError(
                f"{directory}: the tensor {name} has the shape {tuple(tensors[name].shape)}; config.json needs {shape}"
            )
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise ModelDirectoryError(f"{directory}: the tensor {extra[0]} is not one of this model's")
    return {name: tensors[name].float() for name in wanted}


def load_pretrained(directory: Path) -> TinyModel:
    """The model in `directory`, for training."""
    config = TinyConfig.load(directory)
    model = TinyModel(config)
    model.load_state_dict(load_tensors(directory, config))
    return model
