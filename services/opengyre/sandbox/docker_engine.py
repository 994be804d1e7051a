"""A Docker engine over its socket, with our errors, bounds and habits.

- A connector of our own: aiohttp's has a limit of 100 connections, and each command that runs holds one.
- An exec's status is asked for until it does not run: right after its output's end there may be none yet.
- Every call has a bound; one that makes something is not cut off by a cancellation, so that its end is known.

Awaits: an answer of the engine, bounded by `CALL_S` or the caller's bound; the end of an exec's output, which comes
with the exec's end.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.execs import Exec

from opengyre.sandbox.core import CannotIsolateError, ExecTimeout, InfraError, SandboxError, SandboxGone

CALL_S = 60.0
STATUS_S = 10.0
STDERR_LIMIT = 4096
NOT_FOUND, CONFLICT, NO_CONNECTION = 404, 409, 900
T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for ``work`` even where the caller is cancelled: what undoes it must not run beside it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@asynccontextmanager
async def engine_errors(what: str, sandbox: str | None = None) -> AsyncIterator[None]:
    """Say an engine's error as one of ours. ``sandbox``: whose container it is about."""
    try:
        yield
    except aiodocker.DockerError as error:
        if sandbox is not None and error.status in (NOT_FOUND, CONFLICT):
            raise SandboxGone(f"sandbox {sandbox!r} has ended: {error.message}") from error
        raise InfraError(f"{what} failed: {error.message}") from error
    except TimeoutError as error:
        raise ExecTimeout(f"the engine did not answer {what} in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise InfraError(f"{what} failed: {error}") from error


class Engine:
    """One engine's socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connector: aiohttp.UnixConnector | None = None
        self._docker: aiodocker.Docker | None = None

    @property
    def docker(self) -> aiodocker.Docker:
        assert self._docker is not None, "open() makes it"
        return self._docker

    async def open(self) -> Mapping[str, Any]:
        """Connect; what the engine says of itself. Raises `CannotIsolateError` where none answers."""
        # The path belongs to the connector: a client that is given both refuses a path of its own.
        self._connector = aiohttp.UnixConnector(str(self._path), limit=0)
        self._docker = aiodocker.Docker(
            url="unix://localhost", connector=self._connector, timeout=aiohttp.ClientTimeout(total=CALL_S)
        )
        try:
            async with engine_errors("a look at the engine"):
                return await self.docker.system.info()
        except SandboxError as error:
            raise CannotIsolateError(f"no Docker engine answers at {self._path}: {error}") from error

    async def close(self) -> None:
        """Let go; containers and commands go on."""
        if self._docker is not None:
            await self._docker.close()
            self._docker = None
        if self._connector is not None:
            await self._connector.close()  # whoever brings a connector closes it
            self._connector = None

    def container(self, name: str) -> DockerContainer:
        """A container by its name or id, whether there is one or not."""
        return self.docker.containers.container(name)

    async def state(self, name: str) -> Mapping[str, Any] | None:
        """``State`` and the rest of a container; None where there is none."""
        try:
            return await self.container(name).show()
        except aiodocker.DockerError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def remove(self, name: str) -> None:
        """Leave nothing of a container; also where it is only just being removed, or was never made."""
        async with asyncio.timeout(CALL_S):
            while True:
                try:
                    await self.container(name).delete(force=True, v=True)
                except aiodocker.DockerError as error:
                    if error.status == NOT_FOUND:
                        return
                    if error.status != CONFLICT:
                        raise
                    await asyncio.sleep(0.05)  # its removal is under way, which tells nobody of its end

    async def exit_code(self, started: Exec, bound_s: float = STATUS_S) -> int | None:
        """Status of an exec that is about to end; None where the engine knows it no more."""
        wait = 0.002
        async with asyncio.timeout(bound_s):
            while True:
                try:
                    shown = await started.inspect()
                except aiodocker.DockerError as error:
                    if error.status == NOT_FOUND:
                        return None
                    raise
                if not shown["Running"] and shown["ExitCode"] is not None:
                    return shown["ExitCode"]
                await asyncio.sleep(wait)
                wait = min(0.25, wait * 2)

    async def run(
        self,
        sandbox: str,
        container: str,
        argv: Sequence[str],
        sink: Callable[[bytes], object],
        *,
        user: str,
        environment: Mapping[str, str],
        source: Callable[[int], bytes] | None = None,
        bound_s: float = CALL_S,
    ) -> tuple[int, str]:
        """Run a program of ours in a container: its status, and the beginning of its standard error.

        ``sink`` takes its output and may raise; ``source`` gives its input, at most so many bytes at a time, until it
        gives none. Where this is given up, the program goes on to its own end, which closed pipes bring about.
        """
        stderr = bytearray()
        async with engine_errors(f"{argv[0]} in sandbox {sandbox!r}", sandbox), asyncio.timeout(bound_s):
            made = await self.container(container).exec(
                list(argv), stdin=source is not None, user=user, environment=dict(environment), workdir="/"
            )
            async with made.start() as stream:
                feeding = asyncio.ensure_future(_feed(stream.write_in, source)) if source is not None else None
                try:
                    while (message := await stream.read_out()) is not None:
                        if message.stream == 1:
                            sink(message.data)
                        elif len(stderr) < STDERR_LIMIT:
                            stderr += message.data[: STDERR_LIMIT - len(stderr)]
                finally:
                    if feeding is not None:
                        feeding.cancel()
                        await asyncio.wait([feeding])
            code = await self.exit_code(made)
        fault = feeding.exception() if feeding is not None and not feeding.cancelled() else None
        # A program that ends before it has read all says why by its status.
        if fault is not None and not code:
            raise InfraError(f"sandbox {sandbox!r} did not take what was sent to it: {fault}") from fault
        if code is None:
            raise InfraError(f"the engine does not know what {argv[0]} did in sandbox {sandbox!r}")
        return code, stderr.decode("utf-8", "replace").strip()


async def _feed(write: Callable[[bytes], Awaitable[None]], source: Callable[[int], bytes]) -> None:
    while piece := await asyncio.to_thread(source, 1 << 16):
        await write(piece)
