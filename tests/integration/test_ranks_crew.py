"""Ranks under their supervisor: work on all of them, and no process left however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.ranks import crew as crew_module
from opengyre.ranks.crew import Crew, RanksError, crew
from support.ranks import die, fail, large, sleep, total

pytestmark = pytest.mark.torch

PARENT = """
import asyncio
from support.ranks import sleep
from opengyre.ranks.crew import crew

async def main():
    async with crew(1) as found:
        print(*found.pids, flush=True)
        await found.burst(sleep, [600], timeout_s=600)

asyncio.run(main())
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_all_ranks_work_and_keep_what_they_are_told_to() -> None:
    async with crew(2) as found:
        pids = found.pids
        assert await found.burst(total, [1.0, 2.0], timeout_s=60) == [(1, 3.0), (1, 3.0)]
        assert await found.burst(total, [4.0, 5.0], timeout_s=60) == [(2, 9.0), (2, 9.0)]
        megabytes = os.urandom(1 << 22)
        assert await found.burst(large, [megabytes, b"ab"], timeout_s=60) == [megabytes[::-1], b"ba"]
        with pytest.raises(RanksError, match="1 parts were given to 2 ranks"):
            await found.burst(large, [b""], timeout_s=60)
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("work", "said", "grace_s"),
    [
        # What the other loses it tells at once, and the kernel may tell of the end of a process later.
        (die, "rank 1 of 2 ended by signal 9", 60.0),
        (fail, "rank 1 of 2 failed: ValueError: no such token", 0.5),
    ],
)
async def test_a_rank_that_dies_or_fails_ends_the_burst_and_is_named(
    work, said: str, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "GRACE_S", grace_s)
    async with crew(2) as found:
        pids = found.pids
        with pytest.raises(RanksError, match=said):
            await found.burst(work, [1, 1], timeout_s=60)
        assert all(map(gone, pids)), "at once, not with the block"
        with pytest.raises(RanksError, match="start another crew"):
            await found.burst(total, [1.0, 2.0], timeout_s=60)


async def test_a_rank_that_is_late_is_named_and_ended() -> None:
    async with crew(2) as found:
        pids = found.pids
        await found.burst(sleep, [0, 0], timeout_s=60)
        with pytest.raises(RanksError, match="rank 1 of 2 did not answer within 5 s"):
            await found.burst(sleep, [0, 600], timeout_s=5)
        assert all(map(gone, pids))


async def test_a_burst_that_is_cancelled_leaves_no_process() -> None:
    async with crew(1) as found:
        pids = found.pids
        burst = asyncio.create_task(found.burst(sleep, [600], timeout_s=600))
        await asyncio.sleep(0)
        burst.cancel()
        with pytest.raises(asyncio.CancelledError):
            await burst
        assert all(map(gone, pids))


async def test_ranks_end_with_a_supervisor_that_is_killed() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        pids = [int(pid) for pid in (await process.stdout.readline()).split()]
    assert len(pids) == 1
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(60):
        while not all(map(gone, pids)):  # noqa: ASYNC110 - a process that is nobody's child here tells nobody
            await asyncio.sleep(0.02)


async def test_a_crew_needs_a_rank() -> None:
    with pytest.raises(RanksError, match="0 ranks"):
        async with crew(0) as found:
            assert isinstance(found, Crew)
