"""Starts vLLM's OpenAI-compatible server, with what OpenGyre needs of it. Runs in vLLM's own environment.

vLLM 0.32 spawns its engine and its worker, each of which imports torch and vLLM again: on a CPU that is most of a
start. Here the processes are forked from this one instead, which has imported everything and has begun nothing. For a
version that this was not tried with the stock way is taken. Not for GPUs: CUDA does not survive a fork once it is
initialised.

It ends with the process that started it.
"""

import ctypes
import os
import signal

TRIED = "0.32.0"
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def fork_instead(method: str) -> None:
    """Have vLLM fork its processes, where that is known to work."""
    import multiprocessing

    from vllm.platforms import current_platform

    import vllm

    if vllm.__version__ != TRIED or not current_platform.is_cpu() or method != "fork":
        return

    import vllm.v1.engine.coordinator as coordinator
    import vllm.v1.engine.core
    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.multiproc_executor as executor
    import vllm.v1.worker.cpu_worker
    from vllm.utils import system_utils

    def forked() -> multiprocessing.context.BaseContext:
        return multiprocessing.get_context("fork")

    for module in (system_utils, coordinator, engine_utils, executor):
        module.get_mp_context = forked


def main() -> None:
    end_with_parent(int(os.environ["GYRE_VLLM_PARENT"]))
    # Each process that is forked ends with the one that forked it; of what is spawned vLLM takes care itself.
    os.register_at_fork(after_in_child=lambda: end_with_parent(os.getppid()))
    fork_instead(os.environ.get("GYRE_VLLM_START", "fork"))
    from vllm.entrypoints.launchers.api_server import entry

    entry.main()


if __name__ == "__main__":
    main()
