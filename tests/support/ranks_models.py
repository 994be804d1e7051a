"""Updates of sharded models in tests: functions that ranks find by name."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opengyre.learn.objective import objective
from opengyre.proto.run import Optimization
from opengyre.ranks.rank import Rank
from opengyre.ranks.sharded import Sharded
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.collect import empty_accumulator
from opengyre.treegrad.drivers import driver_for
from opengyre.treegrad.forest import Path, build
from opengyre.treegrad.table import event_tensors
from opengyre.treegrad.walk import accumulate
from support.treegrad import make, path_log_probs, random_paths


def objective_of(loss: Any) -> Any:
    return objective(Optimization(loss=loss))


def paths_of(seed: int) -> list[Path]:
    return random_paths(random.Random(seed), leaves=9, depth=4)


def stepped(model: nn.Module, gradients: dict[str, Tensor] | None = None) -> None:
    """One step of AdamW, whose first step is of one size whatever the gradient's is: so with a large epsilon."""
    for name, parameter in model.named_parameters():
        if gradients is not None:
            parameter.grad = gradients[name]
    torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.1).step()


def _loss_of(loss: str) -> Any:
    def found(model: nn.Module, path: Path | None) -> Tensor:
        if path is None:
            tokens = torch.zeros(1, 1, dtype=torch.int64)
            logits = model(tokens) if isinstance(model, TinyModel) else model(tokens, use_cache=False).logits
            return logits.sum() * 0
        logp = path_log_probs(model, path.sequence)
        return objective_of(loss)(logp, event_tensors(build([path]), logp.device, logp.dtype))[0]

    return found


def update(rank: Rank, given: tuple[str, str, int, str, tuple[int, ...]]) -> tuple[dict, dict, tuple[int, int]]:
    """One update of a sharded model by this rank's paths: the gradient, the weights after it, and sizes of a shard."""
    family, way, seed, loss, mine = given
    sharded = Sharded(make(family, dtype=torch.float32))
    paths = [paths_of(seed)[at] for at in mine]
    if way == "resident":
        with sharded.resident():
            driver = driver_for(sharded.model)
            gradients = empty_accumulator(driver)
            if paths:
                accumulate(driver, build(paths), objective_of(loss), gradients, chunk=3)
        sharded.add(gradients)
    else:
        sharded.lockstep(paths, None, _loss_of(loss), keep=way == "kept")
    gradient = {name: tensor.clone() for name, tensor in sharded.gradients()}
    stepped(sharded.model)
    whole = sum(parameter.numel() for parameter in sharded.model.parameters())
    local = sum(_local(parameter) for parameter in sharded.model.parameters())
    return gradient, sharded.weights(), (local, whole)


def _local(parameter: Tensor) -> int:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().numel()


def moved(rank: Rank, given: str) -> bool:
    """Whether a sharded model takes other weights."""
    sharded = Sharded(make(given, dtype=torch.float32))
    other = {name: tensor.detach() for name, tensor in make(given, 2, dtype=torch.float32).named_parameters()}
    sharded.load(other)
    found = sharded.weights()
    return all(torch.equal(found[name], other[name]) for name in other)
