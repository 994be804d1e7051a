"""A gradient that is written a tensor at a time: the bytes that `safetensors` makes, without these in memory."""

import tempfile
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opengyre.learn.codec import GradientFormatError, write_file, write_tensors
from opengyre.shared.blobs import reference
from support.gradients import flatten

pytestmark = pytest.mark.torch

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any shape, also empty and without dimensions, in order in memory or not, with and without a graph."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))).to(draw(DTYPES))
    if draw(st.booleans()):
        values = values.transpose(0, -1) if values.dim() else values
    return values.requires_grad_(draw(st.booleans()))


@given(st.dictionaries(NAMES, tensors(), max_size=6))
def test_a_file_is_byte_for_byte_what_safetensors_makes(gradients: dict[str, Tensor]) -> None:
    wanted = flatten(gradients)
    with tempfile.NamedTemporaryFile() as file:
        said = write_file(Path(file.name), gradients)
        assert file.read() == wanted
    assert (said.reference, said.size) == (reference(wanted), len(wanted))


def test_no_bytes_of_a_gradient_are_made_while_it_is_written(tmp_path: Path) -> None:
    """As one bytes object an 8B policy's was 32 GB beside the 32 GB that it was made of."""
    gradients = {f"layer.{number}": torch.ones(1 << 20) for number in range(8)}
    path = tmp_path / "gradient"
    path.touch()
    tracemalloc.start()
    try:
        said = write_file(path, gradients)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said.size > 32 << 20
    assert peak < 1 << 20


def test_a_tensor_is_let_go_before_the_next_is_made(tmp_path: Path) -> None:
    """A cell of several ranks gathers them one by one: two at a time would be two embeddings."""
    names = ("a", "b", "c")
    made: list[weakref.ref[np.ndarray]] = []

    def fresh() -> Tensor:
        assert [number for number, array in enumerate(made) if array() is not None] == []
        array = np.ones((3, 5), np.float32)
        made.append(weakref.ref(array))
        return torch.from_numpy(array)

    def each() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, fresh()

    path = tmp_path / "gradient"
    path.touch()
    write_tensors(path, dict.fromkeys(names, (3, 5)), each())
    assert path.read_bytes() == flatten({name: torch.ones(3, 5) for name in names})
    assert len(made) == len(names)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"b": (2,), "a": (2,)}, r"tensor b \(2,\) is given; next is a \(2,\)"),
        ({"a": (2,), "b": (3,)}, r"tensor b \(3,\) is given; next is b \(2,\)"),
        ({"a": (2,), "b": (2,), "c": (2,)}, r"tensor c \(2,\) is given; next is no more"),
        ({"a": (2,)}, "tensor b is missing"),
    ],
)
def test_tensors_that_are_not_those_of_the_header_are_refused(tmp_path: Path, given_: dict, said: str) -> None:
    path = tmp_path / "gradient"
    path.touch()
    with pytest.raises(GradientFormatError, match=said):
        write_tensors(path, {"a": (2,), "b": (2,)}, ((name, torch.ones(shape)) for name, shape in given_.items()))


def test_a_file_that_was_given_up_is_not_made_again(tmp_path: Path) -> None:
    """Who waited for it was cancelled, and has removed it; the thread that writes knows nothing of that."""
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "gradient", {"a": torch.ones(2)})
    assert not (tmp_path / "gradient").exists()
