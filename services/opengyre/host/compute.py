"""The gradient of some sequences of a group, in one of two ways that agree to rounding.

`tree`: each distinct token once, exact, in bounded memory, for every policy that has a driver. `flat`: sequences in
full, several at a time; for the tiny decoder only, to which paths that share little cost less in wide batches.
`flat_is_cheaper` chooses (measured: docs/decisions.md).

A forest with more distinct tokens than `forest_tokens` is walked in parts, one after the other: log-probs of all parts,
the loss once on the table of them all, then each part backward with its rows of `g`. Exact, whatever the loss couples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
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
from opengyre.treegrad.drivers.base import Driver
from opengyre.treegrad.forest import Forest, ForestError, Path, build
from opengyre.treegrad.split import split
from opengyre.treegrad.table import event_tensors
from opengyre.treegrad.walk import Walk, evaluate

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
    forest_tokens: int | None = None,
) -> Found:
    """Add the gradient to `into` (parameter name -> float32). `reference`: the policy of a KL term. `forest_tokens`:
    see `tree`; paths in full are computed in bounded batches anyway.

    Raises `UntrainableError` before anything is added.
    """
    forest = forest_of(work)
    if flat_is_cheaper(policy, forest):
        return flat(policy, work, into, reference=reference)
    return tree(
        policy, forest, work, into, reference=reference, chunk=chunk, offload=offload, forest_tokens=forest_tokens
    )


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


@dataclass(frozen=True, slots=True)
class _Part:
    """A forest of its own; `rows`: which of the whole's events are its events, in order."""

    forest: Forest
    rows: Tensor


def _parts(forest: Forest, tokens: int | None) -> list[_Part]:
    """The forest, in parts of at most so many distinct tokens where a path allows it."""
    if tokens is None or forest.nodes <= tokens:
        return [_Part(forest, torch.arange(len(forest.events)))]
    return [
        _Part(forest.select(chosen), torch.as_tensor(np.flatnonzero(np.isin(forest.events.sequence, chosen))))
        for chosen in split(forest, tokens)
    ]


def _log_probs(
    driver: Driver, parts: Sequence[_Part], *, entropy: bool, chunk: int, offload: bool
) -> tuple[Tensor, Tensor | None, Walk]:
    """Of all parts' events, in the whole's order, with the entropy there; and the walk of the last part, which goes
    on best where it ended. The others' are made again: only one part's keys and values are held."""
    found: list[tuple[Tensor, Tensor | None]] = []
    walk = Walk(driver, parts[0].forest, chunk=chunk, offload=offload)
    found.append(walk.log_probs(entropy=entropy))
    for part in parts[1:]:
        walk = Walk(driver, part.forest, chunk=chunk, offload=offload)
        found.append(walk.log_probs(entropy=entropy))
    order = torch.argsort(torch.cat([part.rows for part in parts])).to(found[0][0].device)
    spread = torch.cat([s for _, s in found if s is not None])[order] if entropy else None
    return torch.cat([logp for logp, _ in found])[order], spread, walk


def tree(
    policy: Policy,
    forest: Forest,
    work: Work,
    into: dict[str, Tensor],
    *,
    reference: Policy | None = None,
    chunk: int = 2048,
    offload: bool = False,
    forest_tokens: int | None = None,
) -> Found:
    """Every distinct token once; with more of them than `forest_tokens`, once in each part that it is in."""
    stats = GradientStats()
    if not len(forest.events):
        return Found(stats, 0)
    parts, driver = _parts(forest, forest_tokens), policy.driver()
    other = None
    if reference is not None:
        other, _, _ = _log_probs(reference.driver(), parts, entropy=False, chunk=chunk, offload=offload)
    logp, spread, last = _log_probs(driver, parts, entropy=True, chunk=chunk, offload=offload)
    table = event_tensors(forest, logp.device, logp.dtype, base_version=work.version, reference=other)
    _, report, g = evaluate(objective(work.optimization), logp, table)
    last.backward(g[parts[-1].rows.to(g.device)], into)
    del last  # Before the next part's keys and values are there.
    for part in reversed(parts[:-1]):
        Walk(driver, part.forest, chunk=chunk, offload=offload).backward(g[part.rows.to(g.device)], into)
    assert isinstance(report, LossStats)
    stats.merge(report)
    stats.sequences = len(work.items)
    stats.entropy_sum = float(torch.sum(spread)) if spread is not None else 0.0
    return Found(stats, sum(part.forest.nodes for part in parts))
