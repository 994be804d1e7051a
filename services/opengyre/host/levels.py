"""What hosts are told by levels: their roles and the runs. One pair of mirrors serves all hosts of a process.

Awaits: `levels` is entered when both mirrors are complete (30 s at most).
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, Bus, View


@dataclass(frozen=True)
class Levels:
    desired: View[DesiredRole]
    runs: View[RunSpec]


@contextlib.asynccontextmanager
async def levels(bus: Bus) -> AsyncIterator[Levels]:
    async with (
        Bucket(bus, subjects.KV_DESIRED, DesiredRole).view() as desired,
        Bucket(bus, subjects.KV_RUNS, RunSpec).view() as runs,
    ):
        yield Levels(desired, runs)
