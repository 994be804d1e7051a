"""One rank: a process that joins its group, then does one piece of work after another for its supervisor.

Messages come and go over a socket, pickled: both ends are ours. A rank ends when its
supervisor does (a thread reads the lifeline, a pipe that only the supervisor holds open), and when the socket closes.
After work that failed it does nothing more, for its collectives may be out of step with the others', but stays: if it
ended, the others would fail of that, and the cause would have company.

Waits: for the other ranks to join and in every collective, `timeout_s` at most; for work, as long as the supervisor
lives.
"""

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec


class Setup(msgspec.Struct, frozen=True):
    """What a rank is started with. `store` is a file that all ranks reach, for them to find each other."""

    number: int
    world: int
    backend: str
    threads: int
    store: str
    timeout_s: float
    socket: int = -1
    lifeline: int = -1
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """What work is given first. `kept` is for work to leave things for later work."""

    number: int
    world: int
    device: str
    kept: dict[str, Any] = field(default_factory=dict)


Work = Callable[[Rank, Any], Any]
"""A function of a module; what it is given and returns can be pickled."""


@dataclass(frozen=True, slots=True)
class Answer:
    result: Any


@dataclass(frozen=True, slots=True)
class Fault:
    reason: str


def send(connection: Connection, message: Any) -> None:
    # Not `connection.send`: torch would pass tensors as open files, which die with their process.
    connection.send_bytes(pickle.dumps(message, protocol=5))


def receive(connection: Connection) -> Any:
    """The next message; raises `EOFError` when the other end is gone."""
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - the other end is our own process


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _join(setup: Setup) -> Rank:
    # Only a rank needs torch.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(setup.threads)
    torch.set_flush_denormal(True)
    device = "cpu"
    if setup.backend == "nccl":
        torch.cuda.set_device(setup.number % torch.cuda.device_count())
        device = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group(
        setup.backend, init_method=Path(setup.store).as_uri(), rank=setup.number, world_size=setup.world,
        timeout=timedelta(seconds=setup.timeout_s),
    )  # fmt: skip
    return Rank(setup.number, setup.world, device)


def _serve(supervisor: Connection, setup: Setup) -> None:
    try:
        rank = _join(setup)
        send(supervisor, Answer(None))
        while True:
            work, given = receive(supervisor)
            send(supervisor, Answer(work(rank, given)))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - whatever a rank's work raises is the supervisor's to report
        send(supervisor, Fault(f"{type(error).__name__}: {error}"))
    with contextlib.suppress(EOFError):
        receive(supervisor)


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    sys.path[:] = [*setup.path, *(entry for entry in sys.path if entry not in setup.path)]
    threading.Thread(target=_end_with, args=(setup.lifeline,), daemon=True).start()
    _serve(Connection(setup.socket), setup)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors of process groups: they may wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    # Not `main` of this module, which would be a second one beside that of the classes that are pickled.
    from opengyre.ranks.rank import main as run

    run()
