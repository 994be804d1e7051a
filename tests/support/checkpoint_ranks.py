"""What ranks do with a checkpoint: a function that their processes find by name."""

from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from opengyre.policy.open import build
from opengyre.ranks.rank import Rank
from opengyre.ranks.sharded import Sharded
from opengyre.trainer import checkpoint


def resharded(rank: Rank, given: tuple[Path, Path]) -> tuple[dict[str, Tensor], int]:
    """Load the parameters of a checkpoint into the shards of a model, and write them from there; the full parameters,
    and how many numbers of them this rank holds."""
    source, target = given
    model = build(source).model
    sharded = Sharded(model)
    for parameter in model.parameters():
        parameter.detach().zero_()
    state = {f"model/{name}": parameter.detach() for name, parameter in sharded.model.named_parameters()}
    checkpoint.load_into(source / "state", state)
    checkpoint.save(state, target)
    held = sum(tensor.to_local().numel() for tensor in state.values() if isinstance(tensor, DTensor))
    return {name: tensor.clone() for name, tensor in sharded.weights().items()}, held
