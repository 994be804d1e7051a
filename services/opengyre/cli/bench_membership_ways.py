"""Members of a changing set that sum gradients: what `gyre bench membership` measures, one function a way.

- `blobs`: what OpenGyre does between cells. Each member hands its gradient over through the blob store, and whoever
  leads the update adds up; nobody waits for another.
- `regroup`: one all-reduce of a gloo group, which is formed anew whenever the members change; a newcomer is sent the
  weights in it.
- `torchft`: its manager and lighthouse, which find a quorum before each step; a newcomer heals from another.

Each is told what to do over a pipe and answers there; the first word of a message says what. A member ends when its
pipe does. Times are `time.monotonic()`, one clock for all processes of a machine.
"""

import asyncio
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

WAIT: Final = timedelta(seconds=20)
NAME: Final = "flat"


def quiet() -> None:
    """What libraries print to the terminal is not a measurement."""
    hole = os.open(os.devnull, os.O_WRONLY)
    os.dup2(hole, 1)
    os.dup2(hole, 2)


def blobs(pipe: Connection, parameters: int, directory: str) -> None:
    # The command line starts without torch.
    import torch
    from safetensors.torch import load_file

    from opengyre.learn.codec import write_file
    from opengyre.shared.blobs import Blobs, Written
    from opengyre.shared.settings import CacheSettings

    torch.set_num_threads(1)
    gradient = torch.ones(parameters)

    async def write(path: Path) -> Written:
        return await asyncio.to_thread(write_file, path, {NAME: gradient})

    pipe.send("ready")
    with asyncio.Runner() as loop:
        store = Blobs(Path(directory), CacheSettings())
        while True:
            match pipe.recv():
                case ("join", weights):
                    load_file(weights)
                    pipe.send("joined")
                case ("step", number):
                    gradient[0] = number  # Or all members' would be one blob.
                    pipe.send(loop.run(store.put_by(write, durable=False)).reference)


def regroup(pipe: Connection, parameters: int, directory: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gradient, weights = torch.ones(parameters), torch.zeros(parameters)
    pipe.send("ready")
    while True:
        match pipe.recv():
            case ("group", epoch, rank, world, newcomer):
                if dist.is_initialized():
                    dist.destroy_process_group()
                where = Path(directory, f"epoch{epoch}").as_uri()
                dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=WAIT)
                if newcomer:
                    dist.broadcast(weights, 0)
                pipe.send("grouped")
            case ("step", _):
                try:
                    dist.all_reduce(gradient)
                except RuntimeError:
                    # Leave at once: another survivor may be waiting for us, and would until its time-out.
                    dist.destroy_process_group()
                    pipe.send("broken")
                else:
                    gradient.fill_(1.0)
                    pipe.send("summed")


def torchft(pipe: Connection, parameters: int, name: str) -> None:
    """Goes on by itself from when it is told the lighthouse until it is told to stop. It tells `(members, when)` at its
    first step with so many, and at the end all its steps as `[(when, members)]`."""
    quiet()
    import torch

    # Not a dependency: whoever wants the comparison installs it.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not re-exported
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports] - as said

    torch.set_num_threads(1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    gradient, weights = torch.ones(parameters), torch.zeros(parameters)
    pipe.send("ready")
    while True:
        lighthouse = pipe.recv()
        manager: Any = Manager(
            pg=ProcessGroupGloo(timeout=WAIT), load_state_dict=lambda state: weights.copy_(state[NAME]),
            state_dict=lambda: {NAME: weights}, min_replica_size=1, use_async_quorum=False, rank=0, world_size=1,
            store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, replica_id=name,
            hostname="localhost", timeout=WAIT,
        )  # fmt: skip
        steps: list[tuple[float, int]] = []
        while not pipe.poll():
            manager.start_quorum()
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                before = steps[-1][1] if steps else 0
                steps.append((time.monotonic(), manager.num_participants()))
                if steps[-1][1] != before:
                    pipe.send((steps[-1][1], steps[-1][0]))
            gradient.fill_(1.0)
        pipe.recv()
        manager.shutdown(wait=False)
        pipe.send(steps)


WAYS: Final[dict[str, Callable[..., None]]] = {"blobs": blobs, "regroup": regroup, "torchft": torchft}
