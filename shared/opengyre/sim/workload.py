"""What a simulation runs on: how long rollouts take, what they and the training cost, what a switch costs.

Hours throughout. The paper's workload is our calibration against Table 1 of QwenGyre (arXiv 2609.33848): six numbers
fitted to seven rows, so consistent with the table and no proof of it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    """`B` and `G` with their costs on cells that are all alike; a cell is `cell_nodes` nodes."""

    nodes: int = 32
    cell_nodes: int = 1
    batch_groups: int = 16
    group_size: int = 8
    mean_h: float = 2.09
    """Mean time of a rollout on an engine that serves at full speed."""
    sigma: float = 0.336
    """Standard deviation of its logarithm."""
    shared: float = 0.42
    """Share of the logarithm's variance that the members of a group have in common."""
    rollout_node_h: float = 25.7
    """Node-hours of the rollouts of an update."""
    train_node_h: float = 11.75
    """Node-hours of the training of an update; divides evenly over cells and executions."""
    switch_h: float = 0.08
    """A cell serves and trains nothing for so long when it switches."""
    episodes: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    """Recorded groups: hours of each member at full speed. They are drawn instead of the lognormal's."""
    in_order: bool = False
    """Take the recorded groups one after the other, again from the first after the last, instead of drawing."""

    def __post_init__(self) -> None:
        """Raises `ValueError` that names the first field out of range."""
        ranges: tuple[tuple[str, float, float], ...] = (
            ("nodes", 1, 1_000_000), ("cell_nodes", 1, self.nodes), ("batch_groups", 1, 1_000_000),
            ("group_size", 1, 4096), ("mean_h", 1e-9, 1e6), ("sigma", 0, 5), ("shared", 0, 1),
            ("rollout_node_h", 1e-9, 1e12), ("train_node_h", 1e-9, 1e12), ("switch_h", 0, 1e3),
        )  # fmt: skip
        for name, low, high in ranges:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"workload.{name} is {value}; allowed are values from {low:g} to {high:g}")
        if self.nodes % self.cell_nodes:
            raise ValueError(f"workload.cell_nodes is {self.cell_nodes}; it must divide the {self.nodes} nodes")
        if any(len(group) != self.group_size or min(group) <= 0 for group in self.episodes):
            raise ValueError(f"workload.episodes: each group has {self.group_size} durations above 0")

    @property
    def cells(self) -> int:
        return self.nodes // self.cell_nodes

    @property
    def update_executions(self) -> int:
        return self.batch_groups * self.group_size

    @property
    def capacity(self) -> float:
        """Rollouts that a cell serves at full speed."""
        return self.cell_nodes * self.update_executions * self.mean_h / self.rollout_node_h

    @property
    def train_rate(self) -> float:
        """Executions that a cell trains in an hour."""
        return self.cell_nodes * self.update_executions / self.train_node_h

    def floor_h(self, updates: int) -> float:
        """Hours of `updates` if every node were always busy."""
        return updates * (self.rollout_node_h + self.train_node_h) / self.nodes

    def scaled(self, nodes: int) -> "Workload":
        """The same work for each node on another number of nodes: groups and costs grow with them."""
        by = nodes / self.nodes
        return replace(
            self, nodes=nodes, batch_groups=max(1, round(self.batch_groups * by)),
            rollout_node_h=self.rollout_node_h * by, train_node_h=self.train_node_h * by,
        )  # fmt: skip

    def groups(self, seed: int) -> Iterator[list[float]]:
        """Endless groups of durations; the same for the same seed, however many are taken."""
        random = np.random.default_rng(seed)
        if self.episodes and self.in_order:
            yield from map(list, itertools.cycle(self.episodes))
        if self.episodes:
            while True:
                yield list(self.episodes[int(random.integers(len(self.episodes)))])
        middle = math.log(self.mean_h) - self.sigma**2 / 2
        common, own = self.sigma * math.sqrt(self.shared), self.sigma * math.sqrt(1 - self.shared)
        while True:
            draws = random.standard_normal(self.group_size + 1)
            yield np.exp(middle + common * draws[0] + own * draws[1:]).tolist()


PAPER = Workload()
"""The workload that reproduces Table 1."""


def recorded(groups: Sequence[Sequence[float]], like: Workload) -> Workload:
    """`like` with the episodes of a recorded run (hours at full speed), its other costs unchanged."""
    size = len(groups[0]) if groups else like.group_size
    durations = [duration for group in groups for duration in group]
    if not durations:
        raise ValueError("the run has no whole group of finished episodes yet; there is nothing to simulate from")
    return replace(like, group_size=size, mean_h=sum(durations) / len(durations), episodes=tuple(map(tuple, groups)))
