"""What a rank of a training cell does: holds the policy in shards, and adds the gradient of its part of a group.

Invariants: every rank runs the same functions in the same order (they are collectives); what is added of a group is
added on all ranks or on none. At rest a rank holds its shards of the weights and of the sum; the full weights and one
full gradient are there while it works, and one full tensor at a time while the sum is written.
"""

import collections
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from opengyre.host.compute import Work, gradient
from opengyre.learn.codec import write_tensors
from opengyre.learn.gradient import GradientStats
from opengyre.policy.open import Policy, open_policy
from opengyre.proto.weights import Manifest
from opengyre.ranks.rank import Rank
from opengyre.ranks.sharded import Sharded
from opengyre.shared.blobs import Written
from opengyre.tiny.config import ModelDirectoryError


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a group. `fresh`: the sum begins with it. `work` may have no items."""

    work: Work
    fresh: bool
    chunk: int
    offload: bool
    forest_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """`finite`: whether all ranks' losses and gradients are; if not, nothing was added and the sum is zero."""

    stats: GradientStats
    unique_tokens: int
    finite: bool


def load(rank: Rank, given: tuple[Manifest, Manifest | None]) -> int | str:
    """Hold this policy, and the reference's if there is one. The vocabulary, or why a directory cannot be used."""
    rank.kept.clear()
    opened = _open(*given)
    # All or none go on: sharding is a collective.
    if not _all(rank, not isinstance(opened, str)) or isinstance(opened, str):
        return opened if isinstance(opened, str) else "another rank cannot open the model directory"
    policy, other = opened
    rank.kept.update(policy=policy, sharded=Sharded(policy.model, rank.device), reference=other)
    if other is not None:
        other.model.to(rank.device)
    return policy.vocabulary


def _open(base: Manifest, reference: Manifest | None) -> tuple[Policy, Policy | None] | str:
    try:
        policy = open_policy(Path(base.directory))
        policy.driver()
        return policy, open_policy(Path(reference.directory)) if reference is not None else None
    except ModelDirectoryError as error:
        return str(error)


def add(rank: Rank, part: Part) -> Added:
    """Add the gradient of a group to the sum, this rank by its part."""
    policy: Policy = rank.kept["policy"]
    sharded: Sharded = rank.kept["sharded"]
    if part.fresh:
        sharded.model.zero_grad()
    with sharded.resident():
        into = {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for name, parameter in policy.parameters().items()
        }
        found = gradient(
            policy,
            part.work,
            into,
            reference=rank.kept["reference"],
            chunk=part.chunk,
            offload=part.offload,
            forest_tokens=part.forest_tokens,
        )
    finite = math.isfinite(found.stats.loss) and all(bool(tensor.isfinite().all()) for tensor in into.values())
    finite = _all(rank, finite)
    if finite:
        sharded.add(into)
    else:
        sharded.model.zero_grad()
    return Added(found.stats, found.unique_tokens, finite)


def total(rank: Rank, path: Path) -> Written | None:
    """The sum as safetensors, float32, which the first rank writes to an empty file that is there."""
    sharded: Sharded = rank.kept["sharded"]
    tensors = sharded.gradients()
    if rank.number != 0:
        collections.deque(tensors, maxlen=0)
        return None
    return write_tensors(path, {name: parameter.shape for name, parameter in sharded.model.named_parameters()}, tensors)


def _all(rank: Rank, mine: bool) -> bool:
    flag = torch.tensor(float(mine), device=rank.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
