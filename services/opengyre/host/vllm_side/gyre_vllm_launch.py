"""Starts vLLM's OpenAI-compatible server, with what OpenGyre needs of it. Runs in vLLM's own environment.

vLLM 0.32 spawns its engine and its worker, each of which imports torch and vLLM again: on a CPU that is most of a
start. Here the processes are forked from this one instead, which has imported everything and has begun nothing. For a
version that this was not tried with the stock way is taken. Not for GPUs: CUDA does not survive a fork once it is
initialised.

Its engine and its workers wait for each other's messages by asking again and again, with `sched_yield` between, until a
second has passed without one. Where they have several cores, other processes may then get none for seconds (on Linux
6.18, where who yields is set back far), so there they sleep between two looks. On one core alone who yields hands it to
the other, and it stays so.

It ends with the process that started it.
"""

import ctypes
import os
import signal
import time

TRIED = "0.32.0"
LOOK_S = 1e-4
"""Between two looks for a message: a step of a small model takes some milliseconds."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def fork_instead() -> None:
    """Have vLLM fork its processes, which then have what is changed here."""
    import importlib
    import multiprocessing

    import vllm.v1.engine.coordinator as coordinator
    import vllm.v1.engine.utils as engine_utils
    import vllm.v1.executor.multiproc_executor as executor
    from vllm.utils import system_utils

    # What engine and worker would else import each for itself.
    for name in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)

    def forked() -> multiprocessing.context.BaseContext:
        return multiprocessing.get_context("fork")

    for module in (system_utils, coordinator, engine_utils, executor):
        module.get_mp_context = forked


def sleep_between_looks() -> None:
    """Have vLLM's processes sleep where they would yield."""
    import vllm.distributed.device_communicators.shm_broadcast as messages

    def sleep() -> None:
        time.sleep(LOOK_S)

    messages.sched_yield = sleep


def known() -> bool:
    """Whether it is the version for CPUs that this was tried with."""
    from vllm.platforms import current_platform

    import vllm

    return vllm.__version__ == TRIED and current_platform.is_cpu()


def main() -> None:
    end_with_parent(int(os.environ["GYRE_VLLM_PARENT"]))
    # Each process that is forked ends with the one that forked it; those that are spawned see below.
    os.register_at_fork(after_in_child=lambda: end_with_parent(os.getppid()))
    if known():
        fork_instead()
        if len(os.sched_getaffinity(0)) > 1:
            sleep_between_looks()
    from vllm.entrypoints.launchers.api_server import entry

    entry.main()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that was spawned: `multiprocessing` runs the main module in it anew
    end_with_parent(os.getppid())
