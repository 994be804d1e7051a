"""The forest's events as tensors, and log-probs that are shared by the events of one token at one temperature."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opengyre.learn.events import Events
from opengyre.treegrad.forest import Forest, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The distinct log-probs that the events need, ordered by node."""

    node: Ints
    temperature: Tensor
    """`[outputs]`."""
    of_event: Tensor
    """`[events]`: the output that each event reads."""

    def __len__(self) -> int:
        return len(self.node)

    def within(self, low: int, high: int) -> slice:
        """Those of nodes `[low, high)`."""
        begin, end = np.searchsorted(self.node, [low, high])
        return slice(int(begin), int(end))


def outputs(forest: Forest, device: torch.device, dtype: torch.dtype) -> Outputs:
    """The forest's outputs; a temperature is part of what a log-prob is."""
    keys = forest.events.node + 1j * forest.events.temperature
    distinct, of_event = np.unique(keys, return_inverse=True)
    return Outputs(
        node=distinct.real.astype(np.int64),
        temperature=torch.as_tensor(distinct.imag, dtype=dtype, device=device),
        of_event=torch.as_tensor(of_event, device=device),
    )


def event_tensors(
    forest: Forest,
    device: torch.device,
    dtype: torch.dtype,
    *,
    base_version: int | None = None,
    reference: Tensor | None = None,
) -> Events:
    """The table that an objective is a function of. `base_version`: of the model's weights, which ages count from;
    `reference`: log-probs `[events]` under another policy."""
    table = forest.events

    def column(values: object, kind: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=kind, device=device)

    return Events(
        behaviour=column(table.behaviour, dtype),
        advantage=column(table.advantage, dtype),
        weight=column(table.weight, dtype),
        sequence=column(table.sequence, torch.int64),
        execution=column(table.execution, torch.int64),
        reference=None if reference is None else reference.to(device, dtype),
        age=None if base_version is None else column(base_version - table.version, torch.int64),
    )
