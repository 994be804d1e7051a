"""What ranks do in tests: functions that their processes find by name."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from opengyre.ranks.rank import Rank


def total(rank: Rank, given: float) -> tuple[int, float]:
    found = torch.tensor([given])
    dist.all_reduce(found)
    rank.kept["bursts"] = rank.kept.get("bursts", 0) + 1
    return rank.kept["bursts"], float(found)


def large(rank: Rank, given: bytes) -> bytes:
    return given[::-1]


def fail(rank: Rank, given: Any) -> None:
    if rank.number == given:
        raise ValueError("no such token")
    dist.barrier()


def die(rank: Rank, given: Any) -> None:
    if rank.number == given:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: Rank, given: float) -> None:
    time.sleep(given)
