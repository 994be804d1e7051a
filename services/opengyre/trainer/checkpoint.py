"""The tensors of a checkpoint, written and read by `torch.distributed.checkpoint`.

Its format does not depend on how tensors are spread over processes: what one process wrote is read by several that
hold the parameters in parts (`load_into` with DTensors), and the other way round. Here one process writes: gradients
come to the trainer, not parameters to cells. Nothing here is atomic or checked: `store` does both.
"""

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_in_place
from torch.distributed.checkpoint.state_dict_saver import save as write_state


class CheckpointFormatError(ValueError):
    """A directory that is not a checkpoint of tensors; the message names it."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """That there is one process is what we want; torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def save(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the tensors to `directory`, which is made. In a process group every process calls it, and writes its parts
    of DTensors."""
    with _alone():
        # Who commits syncs everything at once.
        writer = FileSystemWriter(directory, sync_files=False)
        write_state(dict(tensors), storage_writer=writer)


def load(directory: Path) -> dict[str, Tensor]:
    """All tensors in `directory`, on the CPU, in this process. Raises `CheckpointFormatError`."""
    try:
        described = FileSystemReader(directory).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointFormatError(f"{directory} is not a checkpoint of tensors: {error}") from error
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in described.items()
        if isinstance(found, TensorStorageMetadata)
    }
    load_into(directory, tensors)
    return tensors


def load_into(directory: Path, tensors: dict[str, Any]) -> None:
    """Fill these tensors (or this process's parts of DTensors, in a process group) with what `directory` holds."""
    with _alone():
        read_in_place(tensors, storage_reader=FileSystemReader(directory))
