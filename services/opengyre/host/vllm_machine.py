"""What this machine has for vLLM: GPUs and free memory. Needs no torch here; the GPU is asked by vLLM's own python.

Blocking: not for the event loop.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from opengyre.shared.settings import HostSettings
from opengyre.shared.vllm import own_environment
from opengyre.tiny.types import EngineError

ASK_S: Final = 120.0
_NONE: Final = "none"
_ASK: Final = (
    f"import torch; print(torch.cuda.mem_get_info(0)[0] if torch.version.cuda or torch.version.hip else {_NONE!r})"
)
_WOULD: Final = (
    "a CUDA build of vLLM that finds the GPU would do, or CUDA_VISIBLE_DEVICES set to nothing, to serve on processors"
)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them (numbers or UUIDs); needs no torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one.strip() for one in visible.split(",") if one.strip() not in ("", "-1")]
    return [str(n) for n in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def gpus_of(environment: Mapping[str, str]) -> int:
    """How many GPUs this process may use."""
    return len(visible_gpus(environment))


def each_host(settings: HostSettings) -> int:
    """GPUs that a host takes: those of its replica while it serves, one for each rank while it trains."""
    return max(settings.vllm_tensor_parallel, settings.ranks)


def gpus_by_host(visible: Sequence[str], hosts: int, each: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each host, in order; pure. There are as many as `gpus_fault` asks for."""
    return [",".join(visible[n * each : (n + 1) * each]) for n in range(hosts)]


def gpus_fault(settings: HostSettings, gpus: int, hosts: int) -> str | None:
    """Why so many hosts with these settings have not enough GPUs, and how many would do; None where they have."""
    each = each_host(settings)
    if hosts * each <= gpus:
        return None
    have = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if each > gpus:
        name = "host.vllm_tensor_parallel" if settings.vllm_tensor_parallel == each else "host.ranks"
        return f"{name} is {each}; this machine has {have}, so allowed are up to {gpus}"
    own = "a GPU of its own" if each == 1 else f"{each} GPUs of its own"
    said = f"--hosts is {hosts}, each with {own}; this machine has {have}, so allowed are up to {gpus // each}"
    share = gpus // hosts
    named = {"host.vllm_tensor_parallel": settings.vllm_tensor_parallel, "host.ranks": settings.ranks}
    return f"{said}, or {' and '.join(name for name, n in named.items() if n > share)} up to {share}" if share else said


def free_memory() -> int:
    """Bytes of this machine's memory that may be taken."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise EngineError("/proc/meminfo does not say how much memory is free")


def gpu_memory(python: str) -> int:
    """Bytes of the first GPU's memory that are free. Raises `EngineError` saying why it is not known, and what would
    do."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK], env=own_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=ASK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"host.vllm_python: {python} does not say how much memory the GPU has: {error}") from error
    said = done.stdout.strip()
    if said == _NONE:
        raise EngineError(
            f"this machine has GPUs, and the vLLM of {python} (host.vllm_python) is built for processors; {_WOULD}"
        )
    if done.returncode == 0 and said.isdecimal():
        return int(said)
    why = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1].strip()
    raise EngineError(f"{python} (host.vllm_python) does not say how much memory the GPU has ({why}); {_WOULD}")
