"""Gradients as bytes (safetensors, float32), for handing an accumulator over, and back with all shapes checked.

A large one is checked and read as a file: its bytes would be copied while no other thread of the process runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
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
    _check({name: (found.shape, str(found.dtype)) for name, found in gradients.items()}, like)
    return gradients


def check_file(path: Path, like: Mapping[str, Tensor]) -> None:
    """Raises `GradientFormatError` unless the file's names and shapes are those of `like`. Reads no more than these."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            found = {name: (part.get_shape(), _dtype(str(part.get_dtype()))) for name, part in slices.items()}
    except SafetensorError as error:
        raise GradientFormatError(f"the gradient is not safetensors data: {error}") from error
    _check(found, like)


def read_file(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients in a file that must stay as it is, on the CPU; names and shapes must be those of `like`."""
    check_file(path, like)
    return load_file(path)


def _dtype(name: str) -> str:
    return "torch.float32" if name == "F32" else name


def _check(found: Mapping[str, tuple[Sequence[int], str]], like: Mapping[str, Tensor]) -> None:
    for name in sorted(like.keys() ^ found.keys()):
        state = "missing" if name in like else "not one of the model's"
        raise GradientFormatError(f"the gradient's tensor {name} is {state}")
    for name, wanted in like.items():
        shape, dtype = found[name]
        if tuple(shape) != tuple(wanted.shape) or dtype != "torch.float32":
            raise GradientFormatError(
                f"the gradient's tensor {name} is {tuple(shape)} {dtype}; "
                f"the model needs {tuple(wanted.shape)} torch.float32"
            )
