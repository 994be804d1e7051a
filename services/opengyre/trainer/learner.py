"""Model and optimizer: the sum of contributions, the guarded step, and both as a checkpoint. Torch work, off the loop.

A gradient is a sum, so contributions add up in a fixed order, in float64, to the update's gradient: what is the same
parts in another division or order is the same sum to the rounding of the parts themselves. It is scaled to the
executions that were really in it.
"""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from opengyre.learn.codec import check_file, read_file
from opengyre.learn.update import NonFiniteGradientError, apply_update
from opengyre.policy.canary import canary_of
from opengyre.policy.open import Policy, build, open_policy
from opengyre.proto.run import Optimization
from opengyre.proto.weights import Manifest
from opengyre.tiny.config import ModelDirectoryError
from opengyre.trainer import checkpoint
from opengyre.trainer.optimizer import (
    OptimizerStateError,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    state_of,
    take_state,
)
from opengyre.trainer.store import CheckpointError
from opengyre.weights.canary import CANARY_FILE
from opengyre.weights.manifest import WeightsError, describe, read
from opengyre.weights.write import write_version

STATE: Final = "state"
"""The folder of tensors in a checkpoint: `model/<parameter>`, `optimizer/<parameter>/<name>`, `rng`."""
FORMER: Final = "optimizer.pt"
"""In the former layout, beside `model.safetensors`."""
INDEX: Final = "model.safetensors.index.json"
EXTRA: Final = (".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model directory that go with every version: config, tokenizer."""
OURS: Final = {"record.json", "manifest.json", CANARY_FILE, INDEX}


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
    learning_rate: float | None = None


class Learner:
    """The policy that is trained. Not thread-safe: one call at a time."""

    def __init__(self, directory: Path, optimization: Optimization, *, resume: bool) -> None:
        """Load the model of `directory`, or with `resume` the checkpoint there, of this layout or the former one.

        Raises `ModelDirectoryError` or `CheckpointError`.
        """
        former = directory / FORMER
        self.policy = build(directory) if resume and not former.exists() else open_policy(directory)
        self.policy.driver()  # Cells would find out that they cannot train it; better now, and by name.
        self.model = self.policy.model
        self.extra = extra_files(directory)
        self._optimization = optimization
        self.optimizer = make_optimizer(self.policy.parameters(), optimization)
        if resume and former.exists():
            self._resume_former(former)
        elif resume:
            self._resume(directory / STATE)

    @property
    def vocabulary(self) -> int:
        return self.policy.vocabulary

    @property
    def context(self) -> int:
        return self.policy.context

    def check(self, gradient: Path) -> None:
        """Raises `GradientFormatError` unless the file is a handed-over gradient of this model."""
        check_file(gradient, self.policy.parameters())

    def add(self, total: Total, name: str, gradient: Path) -> None:
        """Add contribution `name`, a file, to the sum."""
        parsed = read_file(gradient, self.policy.parameters())
        if not all(bool(torch.isfinite(tensor).all()) for tensor in parsed.values()):
            total.broken.append(name)
        for key, tensor in parsed.items():
            if key in total.gradients:
                total.gradients[key] += tensor
            else:
                total.gradients[key] = tensor.double()

    def step(
        self, total: Total, scale: float, *, update: int = 1, updates: int | None = None, refused: str | None = None
    ) -> Stepped:
        """Step by the sum times `scale`, unless it is not finite, or there is none: then the policy does not change.
        The sum is scaled where it is, since it is twice as large as the model.

        `update`: its number, of `updates` in the run; the learning rate depends on them. `refused`: why it is not to be
        stepped by, whatever it is.
        """
        rate = learning_rate(self._optimization, update, updates)
        if refused is not None:
            return Stepped(0.0, refused, rate)
        if not total.gradients:
            return Stepped(0.0, "no execution of it has a score", rate)
        scaled = {name: tensor.mul_(scale) for name, tensor in total.gradients.items()}
        set_learning_rate(self.optimizer, rate)
        try:
            norm = apply_update(self.model, self.optimizer, scaled, self._optimization.gradient_clip_norm).gradient_norm
        except NonFiniteGradientError as error:
            return Stepped(0.0, f"non_finite_gradient: {error.tensor}", rate)
        return Stepped(norm, None, rate)

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, by name."""
        parameters = self.policy.parameters()
        return {
            **{f"model/{name}": parameter.detach() for name, parameter in parameters.items()},
            **{f"optimizer/{name}": tensor for name, tensor in state_of(self.optimizer, parameters).items()},
            "rng": torch.get_rng_state(),
        }

    def save(self, directory: Path) -> None:
        """Write a checkpoint into `directory`, neither atomic nor synced: see `Store.commit`."""
        checkpoint.save(self.state(), directory / STATE)
        for name, content in self.extra.items():
            (directory / name).write_bytes(content)

    def _resume(self, directory: Path) -> None:
        try:
            tensors = checkpoint.load(directory)
            self.policy.fill(_below("model/", tensors), directory)
            state = _below("optimizer/", tensors)
            take_state(self.optimizer, self.policy.parameters(), state, self._optimization.optimizer)
            torch.set_rng_state(tensors["rng"])
        except (checkpoint.CheckpointFormatError, ModelDirectoryError, OptimizerStateError) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be used: {error}") from error
        except KeyError as error:
            raise CheckpointError(f"checkpoint {directory} cannot be used: it has no tensor {error}") from error

    def _resume_former(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
        except (OSError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"checkpoint file {path} cannot be used: {error}") from error

    def write_weights(self, directory: Path, run: str, version: int) -> Manifest:
        """The version that hosts load; equal to what is there if it was written before."""
        return write_policy(self.policy, self.extra, directory, run, version)


def write_policy(policy: Policy, extra: Mapping[str, bytes], directory: Path, run: str, version: int) -> Manifest:
    """Write the version, or what of it is damaged, with the canary that who serves it is compared with. Equal policies
    make equal files."""
    parent = version - 1 if version else None
    canary = _canary(policy, directory)
    if canary is not None:
        extra = {**extra, CANARY_FILE: canary}
    return write_version(
        policy.tensors(), directory, run=run, version=version, parent=parent, step=version, extra=extra
    )


def _canary(policy: Policy, directory: Path) -> bytes | None:
    """That of the version in `directory`, where there is one: a version without stays without."""
    try:
        described = {file.name: file for file in read(directory).files}
    except WeightsError:  # it is not written yet, or its manifest is damaged
        return canary_of(policy)
    if CANARY_FILE not in described:
        return None
    path = directory / CANARY_FILE
    if path.is_file() and describe(path) == described[CANARY_FILE]:
        return path.read_bytes()
    return canary_of(policy)


def read_policy(directory: Path) -> Policy:
    """The policy of the checkpoint in `directory`, without its optimizer. Raises `ModelDirectoryError` or
    `CheckpointFormatError`."""
    if (directory / FORMER).exists():
        return open_policy(directory)
    policy = build(directory)
    policy.fill(_below("model/", checkpoint.load(directory / STATE)), directory)
    return policy


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
