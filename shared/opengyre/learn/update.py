"""One guarded optimizer step from an accumulated gradient."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class NonFiniteGradientError(ValueError):
    """The gradient holds an infinity or not-a-number; nothing was changed. `tensor` is the first such tensor's name."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"the gradient of {tensor} is not finite; the update was refused")
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class StepStats:
    """`gradient_norm` is the norm before clipping; `scale` is what the gradient was multiplied by (1 without)."""

    gradient_norm: float
    scale: float


def apply_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], clip_norm: float
) -> StepStats:
    """Clip `gradients` (parameter name -> tensor, all parameters) to the norm `clip_norm` and step `optimizer`.

    Raises `NonFiniteGradientError`, with model and optimizer untouched, if a gradient is not finite.
    """
    named = dict(model.named_parameters())
    if missing := sorted(named.keys() ^ gradients.keys()):
        raise ValueError(f"gradients and model differ in {missing[0]}; each parameter needs one gradient")
    for name, gradient in gradients.items():
        if not torch.isfinite(gradient).all():
            raise NonFiniteGradientError(name)
    norm = float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in gradients.values()])))
    scale = min(1.0, clip_norm / norm) if norm > 0 else 1.0
    for name, parameter in named.items():
        parameter.grad = (gradients[name] * scale).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepStats(gradient_norm=norm, scale=scale)
