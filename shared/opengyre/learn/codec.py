"""Gradients as files (safetensors, float32), for handing an accumulator over, and back with all shapes checked.

They are as large as the model: as bytes one would be in memory once more, and copied while no other thread of the
process runs. So it is written a tensor at a time, and checked and read as a file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file
from torch import Tensor

from opengyre.learn.layout import header
from opengyre.shared.blobs import Written, write_pieces


class GradientFormatError(ValueError):
    """Bytes that are not a gradient of the wanted model; the message names the tensor."""


def write_file(path: Path, gradients: Mapping[str, Tensor]) -> Written:
    """Write to an empty file that is there; blocks. Equal gradients make equal files. Raises `OSError`."""
    shapes = {name: tensor.shape for name, tensor in gradients.items()}
    return write_tensors(path, shapes, ((name, gradients[name]) for name in sorted(gradients)))


def write_tensors(path: Path, shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, Tensor]]) -> Written:
    """`write_file` for tensors that come one at a time, of whatever type and device: by name, all of `shapes`.

    Each is let go before the next is asked for. Raises `GradientFormatError` for one that is not the next of `shapes`.
    """
    return write_pieces(path, _pieces(shapes, tensors))


def _pieces(shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    yield header(shapes)
    left = sorted(shapes, reverse=True)
    # Not with `zip`, which holds what it gave last while it asks for the next.
    for name, tensor in tensors:
        wanted = left.pop() if left else None
        if name != wanted or tuple(tensor.shape) != tuple(shapes[name]):
            of = f"{wanted} {tuple(shapes[wanted])}" if wanted is not None else "no more"
            raise GradientFormatError(f"the gradient's tensor {name} {tuple(tensor.shape)} is given; next is {of}")
        # No copy of what is float32 and on the CPU as it is.
        yield tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1).view(torch.uint8).numpy().data
        del tensor
    if left:
        raise GradientFormatError(f"the gradient's tensor {left[-1]} is missing")


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
