"""Model and optimizer: the sum of contributions, the guarded step, and both as bytes. Torch work, off the loop.

A gradient is a sum, so contributions add up in a fixed order to the update's gradient; it is scaled to the executions
that were really in it.
"""

import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from opengyre.learn.codec import unflatten
from opengyre.learn.update import NonFiniteGradientError, apply_update
from opengyre.proto.run import Optimization
from opengyre.proto.weights import Manifest
from opengyre.tiny.checkpoint import WEIGHTS_FILE, load_pretrained
from opengyre.weights.write import write_version

OPTIMIZER: Final = "optimizer.pt"
INDEX: Final = "model.safetensors.index.json"
EXTRA: Final = (".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model directory that go with every version: config, tokenizer."""
OURS: Final = {"record.json", "manifest.json", INDEX}


@dataclass(slots=True)
class Total:
    """The running sum of an update. `broken`: contributions that hold an infinity or not-a-number."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stepped:
    """`gradient_norm` is before clipping. `skipped`: the optimizer did not step, for this reason."""

    gradient_norm: float
    skipped: str | None = None


class Learner:
    """The policy that is trained. Not thread-safe: one call at a time."""

    def __init__(self, directory: Path, optimization: Optimization, *, resume: bool) -> None:
        """Load the model of `directory`, and with `resume` its optimizer too. Raises `ModelDirectoryError`."""
        self.model = load_pretrained(directory)
        self.extra = extra_files(directory)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimization.learning_rate, weight_decay=optimization.weight_decay
        )
        self._clip_norm = optimization.gradient_clip_norm
        if resume:
            state = torch.load(directory / OPTIMIZER, weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def parse(self, gradient: bytes) -> dict[str, Tensor]:
        """A handed-over gradient; raises `GradientFormatError` unless it is one of this model's."""
        return unflatten(gradient, dict(self.model.named_parameters()))

    def add(self, total: Total, name: str, gradient: bytes) -> None:
        """Add contribution `name` to the sum."""
        parsed = self.parse(gradient)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in parsed.values()):
            total.broken.append(name)
        for key, tensor in parsed.items():
            if key in total.gradients:
                total.gradients[key] += tensor
            else:
                total.gradients[key] = tensor.clone()

    def step(self, total: Total, scale: float) -> Stepped:
        """Step by the sum times `scale`, unless it is not finite, or there is none: then nothing changes."""
        if not total.gradients:
            return Stepped(0.0, "no execution of it has a score")
        scaled = {name: tensor * scale for name, tensor in total.gradients.items()}
        try:
            return Stepped(apply_update(self.model, self.optimizer, scaled, self._clip_norm).gradient_norm)
        except NonFiniteGradientError as error:
            return Stepped(0.0, f"non_finite_gradient: {error.tensor}")

    def state(self) -> dict[str, bytes]:
        """Name -> content of the files of a checkpoint."""
        buffer = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}, buffer)
        weights = save(self._tensors(), metadata={"format": "pt"})
        return {WEIGHTS_FILE: weights, OPTIMIZER: buffer.getvalue(), **self.extra}

    def write_weights(self, directory: Path, run: str, version: int) -> Manifest:
        """The version that hosts load; equal to what is there if it was written before."""
        parent = version - 1 if version else None
        tensors = self._tensors()
        return write_version(
            tensors, directory, run=run, version=version, parent=parent, step=version, extra=self.extra
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float().contiguous() for name, parameter in self.model.named_parameters()}


def extra_files(directory: Path) -> dict[str, bytes]:
    """Config and tokenizer files of a model directory, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in EXTRA and path.name not in OURS
    }


def finite(value: float) -> float:
    """JSON has no infinities: such a figure becomes 0, and the update that it is of says that it was skipped."""
    return value if math.isfinite(value) else 0
