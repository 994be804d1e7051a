"""Seconds of an update, by what it has to compute over what the machine is assumed to keep up. Pure.

An update is `batch_groups * group_size` executions. Each samples as many tokens as it may and its last prompt is as
long as the context, so what is said is an upper bound for short tasks. Executions of a group share all but what they
sample: tokens that a tool gives each of them are not known before, and `train_unshared_s` is where they share nothing.

- Sampling is bound by memory: a step reads the weights once for all calls, and each call's keys and values; or by
  operations, whichever takes longer. Prompts are read once: the prefix cache holds what a conversation had before.
- Training is two passes forward and one back over unique tokens (docs/trainer.md): `PASSES` forwards' worth.
- A switch reads the weights and starts or wakes the engine.
"""

from dataclasses import dataclass, replace

from opengyre.proto.run import RunSpec
from opengyre.sizing.hardware import Machine
from opengyre.sizing.shape import Shape

PASSES = 4
"""Of a token: forward twice, and a pass back that is worth two."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one execution is assumed to be, tokens."""

    sampled: int
    path: int
    """Of its longest prompt and completion together, what is trained of it."""


def load_of(spec: RunSpec) -> Load:
    """As long as its budgets allow."""
    harness = spec.harness
    turns = harness.synthetic_turns if harness.agent == "synthetic" else harness.max_turns
    sampled = min(turns * harness.max_tokens, harness.context_tokens)
    if harness.token_budget is not None:
        sampled = min(sampled, harness.token_budget)
    return Load(sampled, harness.context_tokens)


@dataclass(frozen=True, slots=True)
class Times:
    """Of one update."""

    calls: int
    """At once, of a serving cell."""
    tokens_per_s: float
    """Sampled by one cell."""
    rollout_cell_s: float
    """Seconds of one cell's work, all of the update's sampling; cells divide it."""
    train_cell_s: float
    """Likewise, of its training."""
    train_unshared_s: float
    """Of the update's training, where executions share nothing."""
    switch_s: float
    """Of one cell, there and back."""
    rollout_cells: float
    train_cells: float
    """In the mean, where cells switch."""
    rollout_s: float
    train_s: float
    switches_s: float
    """Lost to switches, on the way of the update."""
    update_s: float


def tokens_per_s(
    shape: Shape, machine: Machine, weight_bytes: int, kv_width: int, calls: float, length: float
) -> float:
    """Of a cell that samples `calls` sequences at once, each `length` tokens long in the mean."""
    read = weight_bytes + calls * length * shape.kv_values * kv_width
    step = max(
        read / (machine.bandwidth * machine.decode_efficiency),
        calls * shape.forward_flops(length) / (machine.flops * machine.decode_efficiency),
    )
    return calls / step


def times(
    spec: RunSpec, shape: Shape, machine: Machine, *, weight_bytes: int, kv_width: int, kv_tokens: int, capacity: float
) -> Times:
    """`weight_bytes`: as they are served, the whole replica; `kv_tokens`: that a replica has room for; `capacity`:
    calls that a host takes at full speed."""
    load, dispatch = load_of(spec), spec.dispatch
    executions = dispatch.update_executions
    rollout_cells, _ = split(spec, machine.cells)
    live = (dispatch.phi + dispatch.mu) * executions / max(1.0, rollout_cells)
    calls = max(1, int(min(capacity, kv_tokens // max(1, load.path), live)))
    rate = tokens_per_s(shape, machine, weight_bytes, kv_width, calls, load.path / 2)
    token = shape.forward_flops(load.path / 2)
    unique = dispatch.batch_groups * (load.path - load.sampled) + executions * load.sampled
    rollout = executions * load.sampled / rate + unique * token / (machine.flops * machine.decode_efficiency)
    trained = PASSES * token / (machine.train_flops * machine.train_efficiency)
    switch = 2 * (weight_bytes / machine.load_bytes_s + machine.start_s)
    found = _together(spec, machine.cells, rollout, unique * trained, switch, calls, rate)
    return replace(found, train_unshared_s=executions * load.path * trained / max(1.0, split(spec, machine.cells)[1]))


def split(spec: RunSpec, cells: int) -> tuple[int, int]:
    """Cells that serve and that train, where that is fixed; all of them both, where they switch."""
    if spec.elastic.policy == "static" and cells > 1:
        training = min(spec.elastic.train_cells, cells - 1)
        return cells - training, training
    return cells, cells


def _together(spec: RunSpec, cells: int, rollout: float, train: float, switch: float, calls: int, rate: float) -> Times:
    elastic, mu = spec.elastic, spec.dispatch.mu
    serving, training = split(spec, cells)
    if elastic.policy == "static" and cells > 1:
        took_rollout, took_train, lost = rollout / serving, train / training, 0.0
        # With nothing in reserve one waits for the other.
        beside = spec.dispatch.phi > 0 or mu > 1
        update = max(took_rollout, took_train) if beside else took_rollout + took_train
        return Times(
            calls, rate, rollout, train, 0.0, switch, serving, training, took_rollout, took_train, lost, update
        )
    lost = switch / mu  # of each cell, once a burst
    took_rollout, took_train = rollout / cells, train / cells
    busy = rollout + train
    shares = (cells * rollout / busy, cells * train / busy)
    return Times(
        calls,
        rate,
        rollout,
        train,
        0.0,
        switch,
        *shares,
        took_rollout,
        took_train,
        lost,
        took_rollout + took_train + lost,
    )
