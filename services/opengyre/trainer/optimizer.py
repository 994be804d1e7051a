"""The optimizer of a run and its learning rate, by the run's settings.

The learning rate is a pure function of the settings and the update's number, so a schedule has no state: what resumes
at update 12 has the rate of update 12. The optimizer's state goes by parameter names, so that it fits whatever holds
the parameters.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from opengyre.proto.run import Optimization

STATE: Final[dict[str, frozenset[str]]] = {
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "adafactor": frozenset({"step", "row_var", "col_var", "variance"}),
}
"""What each optimizer knows of a parameter at most."""


class OptimizerStateError(ValueError):
    """A state that is not of this optimizer; the message names the tensor."""


def learning_rate(optimization: Optimization, update: int, updates: int | None) -> float:
    """Of update number `update` (from 1) of a run of `updates` in all.

    Warm-up: in equal steps, `update / warmup_updates` of the full rate. Then constant, or down along a line or half a
    cosine so that the update after the last would have 0.
    """
    if optimization.canary:
        return 0.0
    full, warm = optimization.learning_rate, optimization.warmup_updates
    if update <= warm:
        return full * update / warm
    if optimization.schedule == "constant" or updates is None:
        return full
    done = min(1.0, (update - 1 - warm) / max(1, updates - warm))
    return full * (1 - done if optimization.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def make_optimizer(parameters: Mapping[str, nn.Parameter], optimization: Optimization) -> torch.optim.Optimizer:
    """The optimizer of these parameters, without a state. Its learning rate is to be set before each step."""
    chosen = list(parameters.values())
    if optimization.optimizer == "adafactor":
        return torch.optim.Adafactor(chosen, lr=optimization.learning_rate, weight_decay=optimization.weight_decay)
    return torch.optim.AdamW(
        chosen,
        lr=optimization.learning_rate,
        betas=(optimization.beta1, optimization.beta2),
        eps=optimization.epsilon,
        weight_decay=optimization.weight_decay,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<parameter>/<name>` -> tensor; empty before the first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def take_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], kind: str
) -> None:
    """Make `state`, of a `state_of`, the optimizer's. Raises `OptimizerStateError`."""
    for name, tensor in state.items():
        parameter, _, key = name.rpartition("/")
        if parameter not in parameters or key not in STATE[kind]:
            raise OptimizerStateError(f"the optimizer's tensor {name} is not one that {kind} has of this model")
        optimizer.state[parameters[parameter]][key] = tensor
