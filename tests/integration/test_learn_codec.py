"""Gradients as files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from opengyre.learn.codec import GradientFormatError, check_file, read_file
from support.gradients import flatten

pytestmark = pytest.mark.torch

LIKE = {"embed": torch.arange(12.0).view(3, 4), "norm": torch.full((4,), 0.5)}


def test_a_gradient_is_read_from_a_file_that_may_then_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "gradient"
    path.write_bytes(flatten(LIKE))
    check_file(path, LIKE)
    back = read_file(path, LIKE)
    path.unlink()  # as after a commit
    assert {name: tensor.tolist() for name, tensor in back.items()} == {n: g.tolist() for n, g in LIKE.items()}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (flatten({"embed": LIKE["embed"]}), "norm is missing"),
        (flatten({**LIKE, "other": torch.zeros(1)}), "other is not one of the model's"),
        (flatten({**LIKE, "norm": torch.zeros(7)}), r"norm is \(7,\) torch\.float32; the model needs \(4,\)"),
        (save({**LIKE, "norm": LIKE["norm"].double()}), r"norm is \(4,\) F64; the model needs \(4,\)"),
        (b"123", "not safetensors"),
    ],
)
def test_a_file_that_is_no_gradient_of_the_model_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "gradient"
    path.write_bytes(content)
    for read in (check_file, read_file):
        with pytest.raises(GradientFormatError, match=what):
            read(path, LIKE)
