"""The gradient of some sequences of a group, in one of two ways that agree to rounding.

`tree`: each distinct token once, exact, in bounded memory, for every policy that has a driver. `flat`: sequences in
full, several at a time; for the tiny decoder only, to which paths that share little cost less in wide batches.
`flat_is_cheaper` chooses (measured: docs/decisions.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from opengyre.host.learners import UntrainableError
from opengyre.learn.events import LossStats
from opengyre.learn.gradient import GradientStats, InvalidSequenceError, Item
from opengyre.learn.gradient import accumulate as accumulate_flat
from opengyre.learn.objective import objective
from opengyre.policy.open import Policy
from opengyre.proto.run import Optimization
from opengyre.tiny.model import TinyModel
from opengyre.treegrad.forest import Forest, ForestError, Path, build
from opengyre.treegrad.walk import Walk, accumulate

TOKEN: Final = 1.9
"""What a token of the tree costs the tiny decoder, in tokens of a batch of whole paths: it goes forward twice, in
smaller steps."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be computed. `items` are of the executions numbered `executions`, one number an item."""

    items: Sequence[Item]
    executions: Sequence[int]
    optimization: Optimization
    version: int
    """Of the policy's weights."""


@dataclass(frozen=True, slots=True)
class Found:
    stats: GradientStats
    unique_tokens: int
    """Tokens that went forward and backward, each chunk's recomputation not counted."""


def forest_of(work: Work) -> Forest:
    """Raises `UntrainableError`."""
    paths = [
        Path(item.sequence, item.advantage, item.weight, execution)
        for item, execution in zip(work.items, work.executions, strict=True)
    ]
    try:
        return build(paths)
    except ForestError as error:
        raise UntrainableError(str(error)) from error


def flat_is_cheaper(policy: Policy, forest: Forest) -> bool:
    """Whether this policy computes these paths in full."""
    if not isinstance(policy.model, TinyModel):
        return False
    return forest.path_tokens() <= TOKEN * forest.nodes


def gradient(
    policy: Policy,
    work: Work,
    into: dict[str, Tensor],
    *,
    reference: Policy | None = None,
    chunk: int = 2048,
    offload: bool = False,
) -> Found:
    """Add the gradient to `into` (parameter name -> float32). `reference`: the policy of a KL term.

    Raises `UntrainableError` before anything is added.
    """
    forest = forest_of(work)
    if flat_is_cheaper(policy, forest):
        return flat(policy, work, into, reference=reference)
    return tree(policy, forest, work, into, reference=reference, chunk=chunk, offload=offload)


def flat(policy: Policy, work: Work, into: dict[str, Tensor], *, reference: Policy | None = None) -> Found:
    """Every path in full. Raises `UntrainableError` before anything is added."""
    other = reference.model if reference is not None else None
    assert isinstance(policy.model, TinyModel)
    assert other is None or isinstance(other, TinyModel)
    try:
        stats = accumulate_flat(
            policy.model,
            work.items,
            into,
            loss=objective(work.optimization),
            base_version=work.version,
            reference=other,
        )
    except InvalidSequenceError as error:
        raise UntrainableError(str(error)) from error
    return Found(stats, sum(len(item.sequence.tokens) for item in work.items))


def tree(
    policy: Policy,
    forest: Forest,
    work: Work,
    into: dict[str, Tensor],
    *,
    reference: Policy | None = None,
    chunk: int = 2048,
    offload: bool = False,
) -> Found:
    """Every distinct token once."""
    stats = GradientStats()
    if not len(forest.events):
        return Found(stats, 0)
    other = Walk(reference.driver(), forest, chunk=chunk, offload=offload).log_probs()[0] if reference else None
    found = accumulate(
        policy.driver(),
        forest,
        objective(work.optimization),
        into,
        chunk=chunk,
        offload=offload,
        entropy=True,
        base_version=work.version,
        reference=other,
    )
    report = found.report
    assert isinstance(report, LossStats)
    stats.merge(report)
    stats.sequences = len(work.items)
    stats.entropy_sum = float(torch.sum(found.entropy)) if found.entropy is not None else 0.0
    return Found(stats, found.stats.unique_tokens)
