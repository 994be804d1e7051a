"""What `gyre run RECIPE.toml --dry-run` expects of memory and time, and what it refuses.

Facts come from the policy's directory (or a config of its shape), from the settings in force, and from the recipe's
`[hardware]`; what they amount to is `opengyre.sizing`. Whether a serving replica fits is asked of what starts vLLM.
Every refusal is one sentence with the number that would do.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cli.fits import Room, Serving, check_cells, fitting
from opengyre.cli.recipe import Plan
from opengyre.cli.task_files import TaskFileError
from opengyre.elastic.explain import unfit
from opengyre.host.vllm_machine import free_memory
from opengyre.host.vllm_plan import BYTES, CANARY_NATS, Facts, facts_of
from opengyre.policy.directory import read_config, read_json, tiny_config
from opengyre.proto.run import RunSpec
from opengyre.shared.settings import HostSettings
from opengyre.sizing import memory
from opengyre.sizing.hardware import Hardware, HardwareError, Machine, machine_of
from opengyre.sizing.shape import Shape, shape_of
from opengyre.sizing.time import Load, Times, load_of, times
from opengyre.tiny.config import ModelDirectoryError


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and seconds; `assumptions` says what they rest on."""

    hardware: str
    model: str
    """Where the shape is from."""
    parameters: int
    serving: Serving
    training: memory.Train
    """Of one process of a training cell."""
    trainer: memory.Trainer
    memory_bytes: int
    """Of a card, or of this machine."""
    sampled_tokens: int
    """Of one execution, at most."""
    times: Times
    assumptions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What will not be as one may expect."""


def estimated(
    recipe: Path, found: Plan, host: HostSettings, hardware: Hardware | None, held_bytes: int = 0
) -> Estimate | None:
    """None where nothing is known of the policy's shape: its directory is elsewhere, or its family is not counted.

    `held_bytes`: of this machine's memory, beside what is free. Raises `TaskFileError`.
    """
    try:
        free = free_memory() + held_bytes
        machine = machine_of(hardware or Hardware(), cores=os.cpu_count() or 1, free_bytes=free)
        if hardware is not None:
            check_cells(found.run, machine.cells)
        known = _known(recipe, found.run, hardware)
        if known is None:
            return None
        facts, shape, tiny = known
        return _estimate(found.run, facts, shape, _engine(host, machine, tiny), machine)
    except (ModelDirectoryError, HardwareError) as error:
        raise TaskFileError(f"{recipe}: {error}") from error


def _known(recipe: Path, spec: RunSpec, hardware: Hardware | None) -> tuple[Facts, Shape, bool] | None:
    """Facts of the policy, its shape, and whether the tiny decoder computes it."""
    directory = Path(spec.model)
    if directory.is_dir():
        fields = read_config(directory)
        try:
            shape = shape_of(fields, str(directory / "config.json"))
        except ModelDirectoryError:
            return None  # a family that is not counted is one that may be trained all the same
        return facts_of(directory), shape, tiny_config(fields) is not None
    if hardware is None or hardware.config is None:
        return None
    path = recipe.parent / hardware.config
    shape = shape_of(read_json(path), str(path))
    facts = Facts(
        directory=spec.model,
        vocabulary=shape.vocabulary,
        context=shape.context,
        weight_bytes=shape.parameters * BYTES.get(shape.dtype, 4),
        kv_values=shape.kv_values,
        heads=shape.heads,
        dtype=shape.dtype,
    )
    return facts, shape, False


def _engine(host: HostSettings, machine: Machine, tiny: bool) -> HostSettings:
    """The settings of a host of this hardware; what they say themselves goes before."""
    changes: dict[str, Any] = {}
    if host.engine == "tiny" and not tiny:
        changes["engine"] = "vllm"  # it is what can serve it
    if machine.gpus and host.vllm_tensor_parallel == 1:
        changes["vllm_tensor_parallel"] = machine.cell_gpus
    if machine.gpus and host.ranks == 1:
        changes["ranks"] = machine.cell_gpus
    return host.model_copy(update=changes)


def _estimate(spec: RunSpec, facts: Facts, shape: Shape, host: HostSettings, machine: Machine) -> Estimate:
    fit = fitting(spec, facts, shape, host, Room.of(machine))
    serving = fit.serving
    found = times(
        spec,
        shape,
        machine,
        weight_bytes=serving.weights,
        kv_width=BYTES[serving.dtype],
        kv_tokens=serving.kv_tokens,
        capacity=host.capacity,
    )
    load = load_of(spec)
    return Estimate(
        hardware=machine.name,
        model=facts.directory,
        parameters=shape.parameters,
        serving=serving,
        training=fit.training,
        trainer=fit.trainer,
        memory_bytes=machine.memory_bytes,
        sampled_tokens=load.sampled,
        times=found,
        assumptions=_assumptions(machine, load),
        notes=_notes(spec, serving.dtype, machine.cells),
    )


def _notes(spec: RunSpec, dtype: str, cells: int) -> tuple[str, ...]:
    """Of a division that needs more cells than are assumed, and of a 16-bit engine beside the trainer's float32."""
    fault = unfit(spec.elastic, cells)
    found = () if fault is None else (f"run.{fault}, of the cells that are assumed here; a stack needs more",)
    bound = CANARY_NATS[dtype]
    if bound <= spec.optimization.logprob_gap_alarm:
        return found
    sentence = (
        f"engines serve in {dtype} and cells train in float32: log-probs may be up to about {bound:g} nats apart, and "
        f"optimization.logprob_gap_alarm is {spec.optimization.logprob_gap_alarm:g}; {bound:g} is quiet"
    )
    return (*found, sentence)


def _assumptions(machine: Machine, load: Load) -> tuple[str, ...]:
    budgets = (
        f"an execution samples {load.sampled} tokens of a path of {load.path}, as many as it may, and a group shares "
        "the rest"
    )
    speed = (
        f"a cell that trains keeps up {machine.train_efficiency:g} of {machine.train_flops / 1e12:.3g} TFLOP/s "
        f"(float32), one that serves {machine.decode_efficiency:g} of {machine.flops / 1e12:.3g} TFLOP/s and of "
        f"{machine.bandwidth / 1e9:.4g} GB/s"
    )
    switch = (
        f"a switch reads weights at {machine.load_bytes_s / 1e9:g} GB/s and starts or wakes the engine in "
        f"{machine.start_s:g} s, each way"
    )
    return (
        budgets,
        speed,
        switch,
        "commands, evaluations and the step of the optimizer take no time",
    )
