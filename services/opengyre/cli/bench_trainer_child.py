"""One measurement in a process of its own: `python -m opengyre.cli.bench_trainer_child`, a `Job` on stdin.

The result is on stdout, progress on stderr. Memory is the process's peak (the device's, on a GPU) over what it held
when weights, sequences and a warm-up of the same way were there; freed memory has been given back before.
"""

import ctypes
import gc
import resource
import sys
import time
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
import torch

from opengyre.cli.bench_trainer_job import Job, Measured
from opengyre.cli.bench_trainer_shapes import Shape, pairs, paths
from opengyre.cli.bench_trainer_ways import WAYS, Gradient, model
from opengyre.treegrad.collect import empty_accumulator
from opengyre.treegrad.drivers.hf import HfDriver
from opengyre.treegrad.forest import build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATUS, CLEAR = FilePath("/proc/self/status"), FilePath("/proc/self/clear_refs")


def measure(job: Job, memory: "Memory") -> tuple[Measured, Gradient]:
    """Run the job here. Raises `ValueError` for what it does not allow."""
    shape = msgspec.convert(job.shape, Shape)
    dtype = DTYPES[job.dtype]
    given = paths(shape)
    longest = max(len(path.sequence.tokens) for path in given)
    net = model(job.model, longest + 64, job.device, dtype)
    way = WAYS[job.way]

    def say(text: str) -> None:
        print(f"{job.say}: {text}", file=sys.stderr, flush=True)

    driver = HfDriver(net)
    warm = Shape("prefix", leaves=2, prefix=16 + longest // 16, branch=16)
    way(net, paths(warm), empty_accumulator(driver), job.chunk, say)
    memory.begin()
    cpu, began = time.process_time(), time.perf_counter()
    gradient = empty_accumulator(driver)
    loss, forward = way(net, given, gradient, job.chunk, say)
    memory.wait()
    ended = time.perf_counter()
    cpu = time.process_time() - cpu
    peak = memory.peak()
    forest = build(given)
    whole = forest.path_lengths()
    measured = Measured(
        way=job.way, unique_tokens=forest.nodes, path_tokens=forest.path_tokens(), longest=forest.longest(),
        unique_pairs=pairs(forest.depth, forest.lengths()), path_pairs=pairs(np.zeros_like(whole), whole),
        events=len(forest.events), seconds=ended - began, cpu_s=cpu, peak_bytes=peak, loss=loss,
        forward_tokens=forward, parameters=sum(p.numel() for p in net.parameters()), device=memory.name,
    )  # fmt: skip
    return measured, gradient


class Memory:
    """The process's own."""

    name = "cpu"

    def begin(self) -> None:
        """What is held now is not counted."""
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
            if trim is not None:
                trim(0)
            CLEAR.write_text("5")  # sets the peak to what is held now
        self._before = self._high()

    def wait(self) -> None:
        """Until all that was asked for is computed."""

    def peak(self) -> int:
        """Bytes since `begin`, at most at once."""
        return self._high() - self._before

    def _high(self) -> int:
        if sys.platform == "linux":
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class GpuMemory(Memory):
    """The device's, as torch's allocator counts it."""

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()

    def begin(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def wait(self) -> None:
        torch.cuda.synchronize()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    torch.set_num_threads(job.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    if job.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{job.say}: torch finds no GPU here; --device cpu measures without one")
    try:
        measured, gradient = measure(job, GpuMemory() if job.device == "cuda" else Memory())
    except (ValueError, torch.OutOfMemoryError) as error:
        sys.exit(f"{job.say}: {str(error).splitlines()[0]}")
    if job.gradient is not None:
        arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in gradient.items()}
        np.savez(job.gradient, **arrays)
    sys.stdout.buffer.write(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
