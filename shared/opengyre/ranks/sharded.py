"""A model that lies on the ranks of a cell in shards (FSDP2), and its gradient as one sum over them.

Two ways through a burst, both of which leave the gradient's shard in each parameter's `.grad`:

- *resident*: all layers are gathered once (`resident`), each rank computes what it likes for as long as it likes (a
  tree walk makes many small forward and backward passes, another number on each rank), adds to an accumulator of full
  gradients, and one reduce-scatter at the end sums them (`add`). Collectives happen at both ends only, so nothing has
  to be padded. Memory of a rank: the shards, the full weights, one full gradient in float32.
- *lockstep*: FSDP2's own hooks gather a layer when it is needed and drop it after; ranks with fewer micro-batches make
  up for it with empty work, since every pass is a collective; gradients are summed in full on each rank and
  reduce-scattered with the last pass. Full weights are never there at once.

Sums, not means: a loss has absolute weights, so the parts' gradients add up to the whole's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

Batch = TypeVar("Batch")


class UnshardableError(ValueError):
    """A model whose layers are not where they are looked for."""


class Sharded:
    """`model`, in shards from now on; every rank of the process group makes one of an equal model, on `device`.

    `compute`: the type in which layers compute, where it is not that of the parameters. All methods are collectives:
    every rank calls them in the same order. Raises `UnshardableError`.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", compute: torch.dtype | None = None) -> None:
        self.mesh = init_device_mesh(device.split(":", maxsplit=1)[0], (dist.get_world_size(),))
        self.model = model.to(device)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        for layer in layers_of(model):
            _shard(layer, self.mesh, policy)
        self._root = _shard(model, self.mesh, policy)
        # Which module is the root is settled by the first that runs; a walk calls parts of the model, so let it be all.
        with torch.no_grad():
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=device))
        self._each(lambda module: module.reshard())

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within, parameters are whole and no pass is a collective."""
        self._each(lambda module: module.set_reshard_after_forward(False, recurse=False))
        self._each(lambda module: module.set_reshard_after_backward(False, recurse=False))
        self._each(lambda module: module.set_requires_gradient_sync(False, recurse=False))
        self._each(lambda module: module.unshard())
        try:
            yield
        finally:
            self._each(lambda module: module.reshard())

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum full gradients over the ranks, in the type they have, and add each rank's shard of them to `.grad`."""
        for name, parameter in self.model.named_parameters():
            part = DTensor.from_local(gradients[name], self.mesh, [Partial("sum")], run_check=False)
            found = part.redistribute(self.mesh, _placed(parameter).placements).to(parameter.dtype)
            parameter.grad = found if parameter.grad is None else parameter.grad + found

    def lockstep(
        self, batches: Sequence[Batch], empty: Batch, loss: Callable[[nn.Module, Batch], Tensor], *, keep: bool = False
    ) -> float:
        """Add the gradient of the sum of `loss(model, batch)` over all ranks' batches; returns this rank's sum.

        `empty` is a batch without weight; its loss is 0 with a graph through all layers. `keep`: a layer that was
        gathered stays until the last pass, which costs memory and saves collectives.
        """
        steps = torch.tensor(len(batches), device=self.mesh.device_type)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        self._each(lambda module: module.set_reshard_after_forward(not keep, recurse=False))
        total = 0.0
        for step in range(int(steps)):
            last = step == int(steps) - 1
            self._root.set_requires_gradient_sync(last)
            self._each(lambda module, last=last: module.set_reshard_after_backward(last or not keep, recurse=False))
            value = loss(self.model, batches[step] if step < len(batches) else empty)
            torch.autograd.backward(value)
            total += float(value.detach())
        return total

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The full gradient, a tensor at a time by name, on every rank; zeros for what has none. Each step is a
        collective, so every rank takes them all."""
        for name, parameter in sorted(self.model.named_parameters()):
            if parameter.grad is None:
                yield name, torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            else:
                yield name, _full(parameter.grad)

    def weights(self) -> dict[str, Tensor]:
        """The full parameters by name, on every rank."""
        return {name: _full(parameter.detach()) for name, parameter in self.model.named_parameters()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these full weights, which every rank has."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                found = _placed(parameter)
                whole = DTensor.from_local(tensors[name].to(parameter), self.mesh, [Replicate()], run_check=False)
                parameter.copy_(whole.redistribute(self.mesh, found.placements))

    def _each(self, act: Callable[[FSDPModule], Any]) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                act(module)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, where our own model and those of `transformers` have them: `model.layers`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnshardableError(f"the model is a {type(model).__name__}; allowed are those with layers in model.layers")
    return list(layers)


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    found = fully_shard(module, mesh=mesh, mp_policy=policy)
    found.set_gradient_divide_factor(1.0)
    # gloo has no reduction that divides, not even by one.
    found.set_force_sum_reduction_for_comms(True)
    return found


def _placed(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "it is gathered; shards are there outside of `resident`"
    return tensor


def _full(tensor: Tensor) -> Tensor:
    return _placed(tensor).full_tensor()
