"""What this machine has for vLLM: GPUs and free memory. Needs no torch here; the GPU is asked by vLLM's own python.

Blocking: not for the event loop.
"""

import os
import subprocess
from pathlib import Path

from opengyre.tiny.types import EngineError


def gpus_of(environment: dict[str, str] | os._Environ[str]) -> int:
    """How many GPUs this process may use; needs no torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def free_memory() -> int:
    """Bytes of this machine's memory that may be taken."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise EngineError("/proc/meminfo does not say how much memory is free")


def gpu_memory(python: str) -> int:
    """Bytes of the first GPU's memory that are free. Raises `EngineError`."""
    code = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    try:
        said = subprocess.run([python, "-c", code], check=True, capture_output=True, timeout=120)
        return int(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(f"{python} does not say how much memory the GPU has: {error}") from error
