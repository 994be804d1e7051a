"""Whether a policy fits the hosts that serve and train it: their settings, and memory. Pure.

Every refusal is one sentence that names the field and the number that would do.
"""

from dataclasses import dataclass
from typing import Final, Self

import msgspec

from opengyre.elastic.explain import unfit
from opengyre.host.vllm_plan import BYTES, OVERHEAD_BYTES, Facts, plan
from opengyre.proto.run import RunSpec
from opengyre.shared.settings import HostSettings
from opengyre.sizing import memory
from opengyre.sizing.hardware import GIB, Machine
from opengyre.sizing.shape import Shape
from opengyre.sizing.time import split
from opengyre.tiny.config import ModelDirectoryError

CONTEXT: Final = "GYRE_HOST__VLLM_CONTEXT"
UNBOUNDED: Final = 1 << 62
"""Bytes, where memory is not looked at."""


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for cells and trainer."""

    gpus: int
    cells: int
    memory_bytes: int
    """Of a card, or of the machine."""
    host_bytes: int | None
    """Main memory for the trainer; None: not looked at."""
    more: str = "hardware.cells ="
    """What says how many cells there are."""

    @classmethod
    def of(cls, machine: Machine) -> Self:
        return cls(machine.gpus, machine.cells, machine.memory_bytes, machine.host_bytes)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A serving replica, all its cards together; bytes."""

    engine: str
    dtype: str
    weights: int
    kv: int
    kv_tokens: int
    """Tokens that its keys and values have room for."""
    full_calls: int
    """Calls as long as the context that these hold at once."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What the roles take."""

    serving: Serving
    training: memory.Train
    trainer: memory.Trainer


def fitting(spec: RunSpec, facts: Facts, shape: Shape, host: HostSettings, room: Room) -> Fit:
    """Raises `ModelDirectoryError` for what does not fit."""
    check_positions(spec, shape.context)
    serving = serving_of(spec, facts, host, room)
    training = memory.train_cell(
        shape, path_tokens=spec.harness.context_tokens, chunk=host.chunk, ranks=host.ranks, offload=host.offload
    )
    trainer = memory.trainer(shape, spec.optimization.optimizer)
    _check(spec, shape, host, room, serving, training, trainer)
    return Fit(serving=serving, training=training, trainer=trainer)


def check_cells(spec: RunSpec, cells: int) -> None:
    """Raise `ModelDirectoryError` where so many cells cannot be divided as the run says."""
    if (fault := unfit(spec.elastic, cells)) is not None:
        raise ModelDirectoryError(f"run.{fault}")


def check_positions(spec: RunSpec, positions: int) -> None:
    """Raise `ModelDirectoryError` where an execution may be longer than the policy's sequences."""
    context = spec.harness.context_tokens
    if context > positions:
        raise ModelDirectoryError(
            f"run.harness.context_tokens is {context}; the policy has {positions} positions, so allowed are values "
            f"up to that"
        )


def serving_of(spec: RunSpec, facts: Facts, host: HostSettings, room: Room) -> Serving:
    """What a replica takes; raises `ModelDirectoryError` where the hosts' settings do not let it serve the run."""
    context = spec.harness.context_tokens
    if host.engine != "vllm":
        tokens = int(host.capacity) * context
        return _replica(host.engine, "float32", facts.weight_bytes, facts.kv_values * 4 * tokens, tokens, context)
    if context > host.vllm_context:
        raise ModelDirectoryError(
            f"run.harness.context_tokens is {context}, and host.vllm_context is {host.vllm_context}; allowed are "
            f"values up to that, or {CONTEXT}={context}"
        )
    dtype = facts.dtype if host.vllm_dtype == "auto" else host.vllm_dtype
    if spec.serving.dtype is not None and dtype != spec.serving.dtype:
        raise ModelDirectoryError(
            f"run.serving.dtype is {spec.serving.dtype}, and hosts would serve in {dtype}; allowed is {dtype}, or "
            f"GYRE_HOST__VLLM_DTYPE={spec.serving.dtype}"
        )
    planned = plan(facts, host, gpus=room.gpus, free_bytes=room.memory_bytes)
    return _replica(
        "vllm", dtype, planned.weight_bytes, planned.kv_bytes, planned.kv_bytes // (facts.kv_values * BYTES[dtype]),
        context,
    )  # fmt: skip


def _replica(engine: str, dtype: str, weights: int, kv: int, tokens: int, context: int) -> Serving:
    return Serving(
        engine=engine, dtype=dtype, weights=weights, kv=kv, kv_tokens=tokens, full_calls=tokens // max(1, context)
    )


def _check(
    spec: RunSpec,
    shape: Shape,
    host: HostSettings,
    room: Room,
    serving: Serving,
    training: memory.Train,
    trainer: memory.Trainer,
) -> None:
    """Raise `ModelDirectoryError` where memory does not hold what the roles need."""
    device = room.memory_bytes
    if training.total > device:
        longest = memory.longest_path(shape, device, chunk=host.chunk, ranks=host.ranks, offload=host.offload)
        if longest:
            raise ModelDirectoryError(
                f"run.harness.context_tokens is {spec.harness.context_tokens}; beside weights and gradients a training "
                f"cell has memory for paths of {longest} tokens, so allowed are values up to that, or host.offload"
            )
        raise ModelDirectoryError(
            f"a training cell needs {_gib(training.weights + training.gradients)} GiB for weights and gradients in "
            f"each of {host.ranks} processes, and there are {_gib(device)}; {_ranks_that_do(shape, host, device)}"
        )
    if room.host_bytes is not None and trainer.total > room.host_bytes:
        small = memory.trainer(shape, "adafactor").total <= room.host_bytes
        raise ModelDirectoryError(
            f"the trainer needs {_gib(trainer.total)} GiB of main memory, and there are {_gib(room.host_bytes)}; "
            + ("optimization.optimizer = adafactor would do" if small else f"{_gib(trainer.total)} GiB would do")
        )
    if not room.gpus:
        replica = serving.weights + serving.kv + (OVERHEAD_BYTES if serving.engine == "vllm" else 0)
        needed = held(spec, room.cells, replica, training.total) + trainer.total
        if needed > device:
            fewer = range(room.cells - 1, 0, -1)
            left = device - trainer.total
            fits = next((n for n in fewer if held(spec, n, replica, training.total) <= left), 0)
            raise ModelDirectoryError(
                f"{room.cells} cells and the trainer need {_gib(needed)} GiB of this machine's memory, of which "
                f"{_gib(device)} are free; {room.more} {fits} would do"
                if fits
                else f"a cell and the trainer need {_gib(max(replica, training.total) + trainer.total)} GiB of this "
                f"machine's memory, of which {_gib(device)} are free"
            )


def held(spec: RunSpec, cells: int, replica: int, training: int) -> int:
    """Bytes that the cells hold together at most; a cell serves (`replica`) or trains, and one that switches counts
    with what takes more: at a run's beginning all that may serve do, and at a burst's end all that may train."""
    serve, train = split(spec, cells)
    if serve + train == cells:
        return serve * replica + train * training
    return cells * max(replica, training)


def _ranks_that_do(shape: Shape, host: HostSettings, device: int) -> str:
    for ranks in (2, 4, 8, 16, 32, 64):
        if memory.longest_path(shape, device, chunk=host.chunk, ranks=ranks, offload=host.offload):
            return f"hardware.cell_gpus = {ranks} would do"
    return "no cell of up to 64 processes would do"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size < GIB else f"{size / GIB:.1f}"
