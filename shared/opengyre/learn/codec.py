"""Gradients as bytes (safetensors, float32), for handing an accumulator over, and back with all shapes checked."""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


class GradientFormatError(ValueError):
    """Bytes that are not a gradient of the wanted model; the message names the tensor."""


def flatten(gradients: Mapping[str, Tensor]) -> bytes:
    """Equal gradients make equal bytes."""
    return save({name: gradients[name].detach().float().contiguous() for name in sorted(gradients)})


def unflatten(data: bytes, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients in `data`; names and shapes must be those of `like` (parameters or another gradient)."""
    try:
        gradients = load(data)
    except SafetensorError as error:
        raise GradientFormatError(f"the gradient is not safetensors data: {error}") from error
    for name in sorted(like.keys() ^ gradients.keys()):
        state = "missing" if name in like else "not one of the model's"
        raise GradientFormatError(f"the gradient's tensor {name} is {state}")
    for name, wanted in like.items():
        found = gradients[name]
        if found.shape != wanted.shape or found.dtype != torch.float32:
            raise GradientFormatError(
                f"the gradient's tensor {name} is {tuple(found.shape)} {found.dtype}; "
                f"the model needs {tuple(wanted.shape)} torch.float32"
            )
    return gradients
