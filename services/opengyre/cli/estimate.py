"""What `gyre run RECIPE.toml --dry-run` expects of memory and time, and what it refuses.

Facts come from the policy's directory (or a config of its shape), from the settings in force, and from the recipe's
`[hardware]`; what they amount to is `opengyre.sizing`. Whether a serving replica fits is asked of what starts vLLM.
Every refusal is one sentence with the number that would do.
"""

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from opengyre.cli.recipe import Plan
from opengyre.cli.task_files import TaskFileError
from opengyre.host.vllm_machine import free_memory
from opengyre.host.vllm_plan import BYTES, CANARY_NATS, OVERHEAD_BYTES, Facts, facts_of, plan
from opengyre.policy.directory import read_config, read_json, tiny_config
from opengyre.proto.run import RunSpec
from opengyre.shared.settings import HostSettings
from opengyre.sizing import memory
from opengyre.sizing.hardware import GIB, Hardware, HardwareError, Machine, machine_of
from opengyre.sizing.shape import Shape, shape_of
from opengyre.sizing.time import Load, Times, load_of, times
from opengyre.tiny.config import ModelDirectoryError

CONTEXT: Final = "GYRE_HOST__VLLM_CONTEXT"


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


def estimated(recipe: Path, found: Plan, host: HostSettings, hardware: Hardware | None) -> Estimate | None:
    """None where nothing is known of the policy's shape: its directory is elsewhere, or its family is not counted.
    Raises `TaskFileError`."""
    try:
        known = _known(recipe, found.run, hardware)
        if known is None:
            return None
        facts, shape, tiny = known
        machine = machine_of(hardware or Hardware(), cores=os.cpu_count() or 1, free_bytes=free_memory())
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
    context = spec.harness.context_tokens
    if context > shape.context:
        raise ModelDirectoryError(
            f"run.harness.context_tokens is {context}; the policy has {shape.context} positions, so allowed are values "
            f"up to that"
        )
    serving = _serving(spec, facts, host, machine)
    training = memory.train_cell(shape, path_tokens=context, chunk=host.chunk, ranks=host.ranks, offload=host.offload)
    trainer = memory.trainer(shape, spec.optimization.optimizer)
    _check(spec, shape, host, machine, serving, training, trainer)
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
        training=training,
        trainer=trainer,
        memory_bytes=machine.memory_bytes,
        sampled_tokens=load.sampled,
        times=found,
        assumptions=_assumptions(machine, load),
        notes=_notes(spec, serving.dtype),
    )


def _notes(spec: RunSpec, dtype: str) -> tuple[str, ...]:
    """Of a 16-bit engine beside the trainer's float32."""
    bound = CANARY_NATS[dtype]
    if bound <= spec.optimization.logprob_gap_alarm:
        return ()
    sentence = (
        f"engines serve in {dtype} and cells train in float32: log-probs may be up to about {bound:g} nats apart, and "
        f"optimization.logprob_gap_alarm is {spec.optimization.logprob_gap_alarm:g}; {bound:g} is quiet"
    )
    return (sentence,)


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


def _serving(spec: RunSpec, facts: Facts, host: HostSettings, machine: Machine) -> Serving:
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
    planned = plan(facts, host, gpus=machine.gpus, free_bytes=machine.memory_bytes)
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
    machine: Machine,
    serving: Serving,
    training: memory.Train,
    trainer: memory.Trainer,
) -> None:
    """Raise `ModelDirectoryError` where memory does not hold what the roles need."""
    device = machine.memory_bytes
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
    if machine.host_bytes is not None and trainer.total > machine.host_bytes:
        small = memory.trainer(shape, "adafactor").total <= machine.host_bytes
        raise ModelDirectoryError(
            f"the trainer needs {_gib(trainer.total)} GiB of main memory, and there are {_gib(machine.host_bytes)}; "
            + ("optimization.optimizer = adafactor would do" if small else f"{_gib(trainer.total)} GiB would do")
        )
    if not machine.gpus:
        replica = serving.weights + serving.kv + (OVERHEAD_BYTES if serving.engine == "vllm" else 0)
        # A cell serves or trains; so much is held when all do what takes more.
        needed = machine.cells * max(replica, training.total) + trainer.total
        if needed > device:
            fits = max(0, (device - trainer.total) // max(replica, training.total))
            raise ModelDirectoryError(
                f"{machine.cells} cells and the trainer need {_gib(needed)} GiB of this machine's memory, of which "
                f"{_gib(device)} are free; hardware.cells = {fits} would do"
                if fits
                else f"a cell and the trainer need {_gib(max(replica, training.total) + trainer.total)} GiB of this "
                f"machine's memory, of which {_gib(device)} are free"
            )


def _ranks_that_do(shape: Shape, host: HostSettings, device: int) -> str:
    for ranks in (2, 4, 8, 16, 32, 64):
        if memory.longest_path(shape, device, chunk=host.chunk, ranks=ranks, offload=host.offload):
            return f"hardware.cell_gpus = {ranks} would do"
    return "no cell of up to 64 processes would do"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size < GIB else f"{size / GIB:.1f}"
