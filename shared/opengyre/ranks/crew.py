"""The supervisor of a cell's ranks: starts them, gives each its part of a burst of work, ends them all.

States: started (all ranks have joined) -> at work -> started ... -> ended. A crew ends with its block, with a rank that
dies, fails or is late, and with a cancellation: a collective has no meaning without all who are in it, so nothing is
repaired, and the caller starts another crew. When it has ended no process of it is left, and a rank whose supervisor
was killed ends itself.

Awaits: `burst` is woken by an answer of each rank, by the end of a process (its socket closes), or by its bound.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

from opengyre.ranks.rank import Answer, Fault, Setup, Work, receive, send

GRACE_S: Final = 0.5
"""How long after a first fault others may tell theirs: a rank that died is the cause, not one that lost it."""
END_S: Final = 5.0


class RanksError(Exception):
    """A burst that came to nothing; the message names the rank and what happened to it."""


@dataclass(frozen=True, slots=True)
class _Started:
    process: asyncio.subprocess.Process
    connection: Connection
    lifeline: int


class Crew:
    """Made by `crew`. One burst at a time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[_Started] = []
        # A send and a receive of each rank may block at once.
        self._pool = ThreadPoolExecutor(2 * world, thread_name_prefix="ranks")
        self._ended = False
        self._busy = False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    async def burst(self, work: Work, given: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """`work(rank, given[rank])` on all ranks at once; their results. Raises `RanksError`, and ends the crew."""
        if self._ended:
            raise RanksError("the ranks have ended; start another crew")
        if self._busy:
            raise RanksError("the ranks are at work; a crew does one burst at a time")
        if len(given) != self.world:
            raise RanksError(f"{len(given)} parts were given to {self.world} ranks; each needs one")
        self._busy = True
        try:
            return await self._outcomes([(work, part) for part in given], timeout_s)
        except BaseException:
            # A cancellation too leaves ranks inside collectives.
            await self._end()
            raise
        finally:
            self._busy = False

    async def _start(self, setups: Iterable[Setup], timeout_s: float) -> None:
        for setup in setups:
            self._ranks.append(await _launch(setup))
        await self._outcomes(None, timeout_s)

    async def _outcomes(self, messages: Sequence[Any] | None, timeout_s: float) -> list[Any]:
        asked = {
            asyncio.ensure_future(self._ask(number, None if messages is None else messages[number])): number
            for number in range(self.world)
        }
        late = asyncio.get_running_loop().time() + timeout_s
        pending = set(asked)
        faults: dict[int, Fault | str] = {}
        answers: dict[int, Any] = {}
        try:
            while pending and (left := late - asyncio.get_running_loop().time()) > 0:
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    outcome = task.result()
                    if isinstance(outcome, Answer):
                        answers[asked[task]] = outcome.result
                    elif not faults:
                        late = min(late, asyncio.get_running_loop().time() + GRACE_S)
                    if not isinstance(outcome, Answer):
                        faults[asked[task]] = outcome
        finally:
            for task in pending:
                task.cancel()
        if faults:
            raise RanksError(self._cause(faults))
        if pending:
            names = ", ".join(str(number) for number in sorted(asked[task] for task in pending))
            raise RanksError(f"rank {names} of {self.world} did not answer within {timeout_s:g} s")
        return [answers[number] for number in range(self.world)]

    def _cause(self, faults: dict[int, Fault | str]) -> str:
        """A process that ended goes before what others say about it."""
        number = min(faults, key=lambda at: (isinstance(faults[at], Fault), at))
        fault = faults[number]
        said = f"failed: {fault.reason}" if isinstance(fault, Fault) else fault
        return f"rank {number} of {self.world} {said}"

    async def _ask(self, number: int, message: Any) -> Answer | Fault | str:
        """The rank's answer, or how its process ended."""
        rank, loop = self._ranks[number], asyncio.get_running_loop()
        try:
            if message is not None:
                await loop.run_in_executor(self._pool, send, rank.connection, message)
            return await loop.run_in_executor(self._pool, receive, rank.connection)
        except (EOFError, OSError):
            code = await _wait(rank.process)
        return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """End all processes, at once; a burst under way raises `RanksError`."""
        self._ended = True
        for rank in self._ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill()

    async def _end(self) -> None:
        """No process is left."""
        self.kill()
        for rank in self._ranks:
            await _wait(rank.process)
        # A thread that reads from a rank is woken by its end.
        await asyncio.to_thread(self._pool.shutdown)
        for rank in self._ranks:
            rank.connection.close()
            os.close(rank.lifeline)
        self._ranks = []


async def _wait(process: asyncio.subprocess.Process) -> int:
    """The exit code; a process that outlives its pipe is killed."""
    try:
        async with asyncio.timeout(END_S):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _launch(setup: Setup) -> _Started:
    ours, theirs = socket.socketpair()
    lifeline, held = os.pipe()
    try:
        setup = msgspec.structs.replace(setup, socket=theirs.fileno(), lifeline=lifeline)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "opengyre.ranks.rank", msgspec.json.encode(setup).decode(),
            stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(), lifeline),
        )  # fmt: skip
    except BaseException:
        ours.close()
        os.close(held)
        raise
    finally:
        theirs.close()
        os.close(lifeline)
    return _Started(process, Connection(ours.detach()), held)


@contextlib.asynccontextmanager
async def crew(
    world: int, *, backend: str = "gloo", threads: int = 1, start_s: float = 120.0, collective_s: float = 60.0
) -> AsyncIterator[Crew]:
    """`world` ranks that have joined one process group (`gloo` on CPUs, `nccl` with a GPU each), on this machine.

    `threads`: torch's in each; `collective_s`: how long a collective waits for the others. Raises `RanksError`.
    """
    if world < 1:
        raise RanksError(f"{world} ranks were asked for; allowed are 1 or more")
    with tempfile.TemporaryDirectory(prefix="gyre-ranks-") as directory:
        found = Crew(world)
        path = tuple(filter(None, sys.path))
        store = str(Path(directory, "store"))
        setups = [Setup(number, world, backend, threads, store, collective_s, path=path) for number in range(world)]
        try:
            await found._start(setups, start_s)  # noqa: SLF001 - of this module
            yield found
        finally:
            await found._end()  # noqa: SLF001 - as above
