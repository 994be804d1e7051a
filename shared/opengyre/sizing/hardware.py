"""What a run is to be made on: the table `[hardware]` of a recipe. Every figure but the first three is an assumption.

Known cards are those of NVIDIA's data sheets (dense products of 16-bit numbers; memory and its bandwidth); any other is
said by its figures. Without cards the machine's processors are assumed, at what two of its cores were measured to do.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

GIB: Final = 1 << 30
GPUS: Final = {
    # GiB, TFLOP/s of dense bfloat16, of float32, GB/s.
    "A100-80GB": (80.0, 312.0, 19.5, 2039.0),
    "H100-80GB": (80.0, 989.0, 67.0, 3350.0),
    "H200-141GB": (131.0, 989.0, 67.0, 4800.0),
    "L40S-48GB": (48.0, 362.0, 91.6, 864.0),
}
CORE_TFLOPS: Final = 0.0575
"""Float32, of one core with AVX2: 115 GFLOP/s were measured with two."""
CORES_GB_S: Final = 12.0
"""Of memory, all cores together."""

Share = Annotated[float, msgspec.Meta(ge=0.001, le=1)]
Positive = Annotated[float, msgspec.Meta(ge=0.001, le=1_000_000)]
"""Beyond any machine on both sides, and never so far that a time or a size overflows."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As a recipe says it."""

    gpus: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    """In all. 0: processors only."""
    cell_gpus: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """That share one replica: tensor parallel when it serves, sharded when it trains."""
    gpu: str | None = None
    """A card that is known by name."""
    cells: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """None: gpus / cell_gpus; without GPUs 2."""
    gpu_gib: Positive | None = None
    """Memory of a card."""
    peak_tflops: Positive | None = None
    """Of a card (or of all cores), in the type that engines compute in."""
    train_tflops: Positive | None = None
    """Of a card (or of all cores) in float32, in which cells train."""
    memory_gb_s: Positive | None = None
    """Bandwidth of its memory."""
    host_gib: Positive | None = None
    """Main memory of the machine that the trainer's process is on. None: not looked at, or this machine's."""
    train_efficiency: Share = 0.3
    """Share of the peak that training keeps up."""
    decode_efficiency: Share = 0.5
    """Share of peak and bandwidth that sampling keeps up."""
    load_gb_s: Positive = 2.0
    """At which weights are read at a switch."""
    start_s: Positive | None = None
    """Of an engine at a switch. None: 20 without GPUs, where it is started anew, else 1, where it wakes."""
    config: str | None = None
    """A config.json of the policy, relative to the recipe, for where its directory is not at hand."""


class HardwareError(Exception):
    """A figure that is missing or does not fit; one sentence."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`Hardware` with everything in place. A cell's figures are those of its cards together."""

    gpus: int
    cell_gpus: int
    cells: int
    memory_bytes: int
    """Of a card, or of this machine."""
    host_bytes: int | None
    flops: float
    """Operations a second at the peak, of a cell that serves."""
    train_flops: float
    """Of a cell that trains, in float32."""
    bandwidth: float
    """Bytes a second, of a cell."""
    train_efficiency: float
    decode_efficiency: float
    load_bytes_s: float
    start_s: float
    name: str


def machine_of(hardware: Hardware, *, cores: int, free_bytes: int) -> Machine:
    """`cores` and `free_bytes` are this machine's. Raises `HardwareError` naming the field and what is allowed."""
    known = (None, None, None, None)
    if hardware.gpu is not None:
        if hardware.gpu not in GPUS:
            raise HardwareError(
                f"hardware.gpu is {hardware.gpu!r}; allowed are {', '.join(GPUS)}, or none of them with gpu_gib, "
                "peak_tflops, train_tflops and memory_gb_s"
            )
        known = GPUS[hardware.gpu]
    if not hardware.gpus:
        return _processors(hardware, cores, free_bytes)
    if hardware.gpus % hardware.cell_gpus:
        fitting = ", ".join(str(n) for n in range(1, hardware.gpus + 1) if hardware.gpus % n == 0)
        raise HardwareError(
            f"hardware.cell_gpus is {hardware.cell_gpus}; with {hardware.gpus} GPUs allowed are {fitting}"
        )
    figures = []
    for name, said, data_sheet in zip(
        ("gpu_gib", "peak_tflops", "train_tflops", "memory_gb_s"),
        (hardware.gpu_gib, hardware.peak_tflops, hardware.train_tflops, hardware.memory_gb_s),
        known,
        strict=True,
    ):
        value = said if said is not None else data_sheet
        if value is None:
            raise HardwareError(f"hardware.{name} is not set; it is needed, or a card by name: {', '.join(GPUS)}")
        figures.append(value)
    return Machine(
        gpus=hardware.gpus,
        cell_gpus=hardware.cell_gpus,
        cells=_cells(hardware, hardware.gpus // hardware.cell_gpus),
        memory_bytes=int(figures[0] * GIB),
        host_bytes=None if hardware.host_gib is None else int(hardware.host_gib * GIB),
        flops=figures[1] * 1e12 * hardware.cell_gpus,
        train_flops=figures[2] * 1e12 * hardware.cell_gpus,
        bandwidth=figures[3] * 1e9 * hardware.cell_gpus,
        train_efficiency=hardware.train_efficiency,
        decode_efficiency=hardware.decode_efficiency,
        load_bytes_s=hardware.load_gb_s * 1e9,
        start_s=1.0 if hardware.start_s is None else hardware.start_s,
        name=f"{hardware.gpus} x {hardware.gpu or 'GPU'}, {hardware.cell_gpus} a cell",
    )


def _processors(hardware: Hardware, cores: int, free_bytes: int) -> Machine:
    cells = _cells(hardware, None)
    memory = free_bytes if hardware.host_gib is None else int(hardware.host_gib * GIB)
    # Cells share the processors: each has its part while all work.
    return Machine(
        gpus=0,
        cell_gpus=1,
        cells=cells,
        memory_bytes=memory,
        host_bytes=memory,
        flops=(hardware.peak_tflops or CORE_TFLOPS * cores) * 1e12 / cells,
        train_flops=(hardware.train_tflops or hardware.peak_tflops or CORE_TFLOPS * cores) * 1e12 / cells,
        bandwidth=(hardware.memory_gb_s or CORES_GB_S) * 1e9 / cells,
        train_efficiency=hardware.train_efficiency,
        decode_efficiency=hardware.decode_efficiency,
        load_bytes_s=hardware.load_gb_s * 1e9,
        start_s=20.0 if hardware.start_s is None else hardware.start_s,
        name=f"{cores} cores, {cells} cells share them",
    )


def _cells(hardware: Hardware, most: int | None) -> int:
    if hardware.cells is None:
        return most or 2
    if most is not None and hardware.cells > most:
        raise HardwareError(
            f"hardware.cells is {hardware.cells}; {hardware.gpus} GPUs make {most} cells of {hardware.cell_gpus}"
        )
    return hardware.cells
