"""Commands in containers: each runs once for its id, is bounded, and is found again after a crash of the service.

Invariants:
- ``begun.json`` is there before the engine hears of a command, and names the engine's exec before that is started. An
  exec can be started once, so whoever finds the record may start it, and nobody starts it twice.
- A command's output goes to files of the node, so no pipe holds whoever waits, and a flood is bounded by a file's size.
- What a command did is in ``ended.json``, whoever waits for it and whoever has stopped to.
- A command's deadline is its own, by the machine's monotonic clock from its start: no crash of the service puts it off.
  Nobody but the service ends a command, so one whose deadline passes while there is none ends at the next start.

States of a command: begun (``begun.json``), known to the engine (its ``engine_exec``), ended (``ended.json``).

Awaits: a watch waits for the end of the exec's own output and its status, or for its next look (`TICK_S`) at the
bounds; whoever joins a command waits for its watch, which ends by the command's timeout and `GRACE_S`.
"""

import asyncio
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec
from aiodocker.execs import Exec

from opengyre.proto.sandbox import ExecResult
from opengyre.proto.sandbox_jobs import JobStatus, LogPage
from opengyre.sandbox import commands, docker_config, docker_host, docker_spool
from opengyre.sandbox.core import (
    InfraError,
    InvalidRequest,
    Options,
    SandboxBusy,
    SandboxGone,
    Spec,
)
from opengyre.sandbox.docker_engine import Engine, engine_errors
from opengyre.sandbox.docker_spool import Begun, Ended, Place, Stream
from opengyre.sandbox.launch import tree
from opengyre.sandbox.records import load, save

TICK_S = 0.25
GRACE_S = 30.0
AGAIN_S = 2.0
LAST_S = 0.1
NAMED_S = 5.0
SIGNALS = {"TERM": 15, "INT": 2}
_FAULTS = (aiodocker.DockerError, aiohttp.ClientError, OSError)


class Commands:
    """All commands of one node."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watches: dict[tuple[str, str], asyncio.Task[Ended]] = {}
        self._killed: set[tuple[str, str]] = set()
        self._leaving: set[str] = set()
        self._stopping = False

    async def stop(self) -> None:
        """Stop looking; commands go on."""
        self._stopping = True
        await self._cancel(list(self._watches.values()))

    def leave(self, sandbox: str) -> None:
        """The sandbox is being removed: what its commands end with from now on is that."""
        self._leaving.add(sandbox)

    async def forget(self, sandbox: str) -> None:
        """Stop looking at the commands of a sandbox that has been removed; whoever waits hears that it is gone."""
        await self._cancel([watch for (owner, _), watch in self._watches.items() if owner == sandbox])
        self._leaving.discard(sandbox)

    async def _cancel(self, watches: "list[asyncio.Task[Ended]]") -> None:
        for watch in watches:
            watch.cancel()
        if watches:
            await asyncio.wait(watches)

    def adopt(self, place: Place) -> None:
        """Take up the commands of a sandbox that another process of the service began."""
        for folder in (place.home / "execs").iterdir():
            begun = load(folder / "begun.json", Begun)
            if begun is None or begun.engine_exec is None:
                # The engine has not heard of it, and whoever asked for it has had no answer: it begins when asked for.
                shutil.rmtree(folder, ignore_errors=True)
            elif load(folder / "ended.json", Ended) is None:
                self._watch(place, folder.name, self._go_on(place, folder.name, begun))

    def _watch(self, place: Place, exec_id: str, work: Coroutine[Any, Any, Ended]) -> None:
        key = (place.sandbox, exec_id)
        task = asyncio.get_running_loop().create_task(work)
        self._watches[key] = task

        def done(_: "asyncio.Task[Ended]") -> None:
            if self._watches.get(key) is task:
                del self._watches[key]
            self._killed.discard(key)
            if not task.cancelled():
                task.exception()  # whoever joins hears of it; nobody has to

        task.add_done_callback(done)

    def begin(
        self, place: Place, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options
    ) -> None:
        """Start a command if nobody has; `InvalidRequest` where its id stands for another one."""
        text = command.encode("utf-8", "surrogateescape")
        digest = commands.digest(command, options)
        folder = place.home / "execs" / exec_id
        begun = load(folder / "begun.json", Begun)
        if begun is not None:
            if begun.digest != digest:
                raise InvalidRequest(f"exec_id {exec_id!r} was used for another command; allowed is an id for each")
            return
        begun = Begun(
            digest=digest,
            began=time.monotonic(),
            since=tree.now_ticks(),
            timeout_s=timeout_s,
            limit=limit,
            spool_limit=docker_config.spool_limit(spec),
            no_output_timeout_s=options.no_output_timeout_s,
            oom_kills=docker_host.oom_kills(place.first),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save(folder / "begun.json", begun)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {place.sandbox!r} was destroyed") from None
        self._watch(place, exec_id, self._start(place, spec, exec_id, text, begun, options))

    async def _start(
        self, place: Place, spec: Spec, exec_id: str, command: bytes, begun: Begun, options: Options
    ) -> Ended:
        folder = place.home / "execs" / exec_id
        try:
            async with engine_errors(f"command {exec_id!r}", place.sandbox):
                await asyncio.to_thread(docker_spool.prepare, place.home, exec_id, command, options)
                made = await self._engine.container(place.container).exec(
                    docker_config.run(exec_id, command),
                    user=options.user or place.user,
                    environment=docker_config.environment(spec, place.marker, _marker(place, exec_id), options),
                    workdir=options.cwd or place.cwd,
                )
            begun = msgspec.structs.replace(begun, engine_exec=made.id)
            save(folder / "begun.json", begun)
        except BaseException:
            # The engine has started nothing: the id is free again.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return await self._go_on(place, exec_id, begun, made)

    async def _go_on(self, place: Place, exec_id: str, begun: Begun, made: Exec | None = None) -> Ended:
        """Start an exec that has not been started, watch it to its end, and write down what it did."""
        known = made or self._engine.docker.containers.exec(begun.engine_exec or "")
        said = bytearray()
        fresh = made is not None
        if not fresh and await self._never_started(known):
            # Its time begins only now; else it would be started and ended at the same moment, in whatever order.
            begun = msgspec.structs.replace(begun, began=time.monotonic(), since=tree.now_ticks())
            save(place.home / "execs" / exec_id / "begun.json", begun)
            fresh = True
        running = asyncio.ensure_future(self._run(known, said, fresh=fresh))
        try:
            killed_by, late = await self._bound(place, exec_id, begun, known, running)
        finally:
            running.cancel()
            await asyncio.wait([running])
        ended = await self._judge(place, exec_id, begun, running, said, killed_by, late=late)
        try:
            save(place.home / "execs" / exec_id / "ended.json", ended)
        except FileNotFoundError:
            return Ended(gone=True)
        return ended

    async def _run(self, known: Exec, said: bytearray, *, fresh: bool) -> int | None:
        """The exec's status, at its end; None where the engine has forgotten it. ``said``: the engine's words."""
        if fresh:
            async with known.start() as stream:
                # All that a command writes goes elsewhere; this ends with it.
                while (message := await stream.read_out()) is not None:
                    said += message.data[: 4096 - len(said)]
        return await self._engine.exit_code(known, bound_s=30 * 86400)

    async def _never_started(self, known: Exec) -> bool:
        try:
            shown = await known.inspect()
        except _FAULTS:
            return False  # whoever waits for its status hears of it
        return not shown["Running"] and shown["ExitCode"] is None and not shown["Pid"]

    async def _bound(
        self, place: Place, exec_id: str, begun: Begun, known: Exec, running: "asyncio.Task[int | None]"
    ) -> tuple[str | None, bool]:
        """Wait for a command's end, and bring it about where due. Why it was, and whether even that was in vain."""
        grew_at, written = time.monotonic(), (0, 0)
        while True:
            left = begun.began + begun.timeout_s - time.monotonic()
            await asyncio.wait([running], timeout=max(0.0, min(TICK_S, left)))
            key = (place.sandbox, exec_id)
            if running.done():
                return ("kill" if key in self._killed else None), False
            now = docker_spool.sizes(place.home, exec_id)
            if now != written:
                grew_at, written = time.monotonic(), now
            why = docker_spool.overdue(begun, time.monotonic(), now, grew_at)
            if why is not None:
                return why, not await self._ended(place, exec_id, begun, known, running)

    async def _ended(self, place: Place, exec_id: str, begun: Begun, known: Exec, running: "asyncio.Task[Any]") -> bool:
        """End a command, again and again where it does not end: the engine may only be about to start it. ``running``
        ends with it; False where all is in vain for `GRACE_S`.
        """
        deadline = time.monotonic() + GRACE_S
        pause = AGAIN_S / 64
        while time.monotonic() < deadline:
            await self._end(place, exec_id, begun, known)
            done, _ = await asyncio.wait([running], timeout=pause)
            if done:
                return True
            pause = min(2 * pause, AGAIN_S)
        return False

    async def _end(self, place: Place, exec_id: str, begun: Begun, known: Exec) -> None:
        leader = await self._leader(known)
        marker = _marker(place, exec_id)
        await asyncio.to_thread(docker_host.end_command, place.container, place.first, leader, marker, begun.since)

    async def _leader(self, known: Exec) -> int:
        try:
            shown = await known.inspect()
        except _FAULTS:
            return 0  # its marker and its age find it
        return shown["Pid"] if shown["Running"] else 0

    async def _judge(
        self,
        place: Place,
        exec_id: str,
        begun: Begun,
        running: "asyncio.Task[int | None]",
        said: bytearray,
        killed_by: str | None,
        *,
        late: bool,
    ) -> Ended:
        fault = None if running.cancelled() else running.exception()
        code = None if running.cancelled() or fault is not None else running.result()
        words = said.decode("utf-8", "replace").strip()
        if killed_by is None and (code is None or code == 137 or fault is not None):
            # What ends so may have ended with its sandbox.
            if await self._ends(place):
                return Ended(gone=True)
            code = code if code is not None else _written_code(place, exec_id)
        if late or (killed_by is None and fault is not None):
            return Ended(infra_error=f"command {exec_id!r} has not come to an end: {fault or 'it could not be killed'}")
        if words and killed_by is None:
            return Ended(infra_error=f"command {exec_id!r} could not be started: {words[:500]}")
        if killed_by is None and code is None:
            return Ended(infra_error=f"the engine does not know any more what command {exec_id!r} did")
        result = await asyncio.to_thread(docker_spool.collect, place, exec_id, begun, code, killed_by)
        if result.killed_by == "output" and killed_by is None:
            await asyncio.to_thread(
                docker_host.end_command, place.container, place.first, 0, _marker(place, exec_id), begun.since
            )
        return Ended(result=result)

    async def _ends(self, place: Place) -> bool:
        """Whether the sandbox has ended. Its init is the last to go: that is looked for twice."""
        for _ in range(2):
            if place.sandbox in self._leaving or not tree.runs(place.first):
                return True
            await asyncio.sleep(LAST_S)
        return False

    async def join(self, place: Place, exec_id: str) -> ExecResult:
        """Wait for a command's end; what it did."""
        watch = self._watches.get((place.sandbox, exec_id))
        ended = load(place.home / "execs" / exec_id / "ended.json", Ended)
        if ended is None and watch is not None:
            await asyncio.wait([watch])
            if watch.cancelled():
                if self._stopping:
                    raise SandboxBusy("the service is stopping; repeat the call")
                raise SandboxGone(f"sandbox {place.sandbox!r} was destroyed while command {exec_id!r} was in it")
            ended = watch.result()
        return self._told(place, exec_id, ended)

    def _told(self, place: Place, exec_id: str, ended: Ended | None) -> ExecResult:
        if ended is None or ended.gone:
            raise SandboxGone(f"sandbox {place.sandbox!r} ended while command {exec_id!r} was in it")
        if ended.infra_error is not None:
            raise _start_error(ended.infra_error)
        assert ended.result is not None, "one of the three is set"
        return ended.result

    async def poll(self, place: Place, exec_id: str, wait_s: float) -> JobStatus:
        """Whether it runs, and what it did."""
        self._begun(place, exec_id)
        watch = self._watches.get((place.sandbox, exec_id))
        if watch is not None:
            done, _ = await asyncio.wait([watch], timeout=wait_s)
            if not done:
                return JobStatus(exec_id=exec_id, running=True)
        return JobStatus(exec_id=exec_id, running=False, result=await self.join(place, exec_id))

    async def started(self, place: Place, exec_id: str) -> None:
        """Wait until the engine has been told to start a command, or it has failed to."""
        folder = place.home / "execs" / exec_id
        watch = self._watches.get((place.sandbox, exec_id))
        while watch is not None and not watch.done():
            begun = load(folder / "begun.json", Begun)
            if begun is not None and begun.engine_exec is not None:
                return
            await asyncio.wait([watch], timeout=0.01)
        if load(folder / "ended.json", Ended) is None:
            await self.join(place, exec_id)

    def logs(self, place: Place, exec_id: str, stream: Stream, offset: int, limit: int) -> LogPage:
        """A page of a command's output. Blocking."""
        self._begun(place, exec_id)
        running = (place.sandbox, exec_id) in self._watches
        ended = load(place.home / "execs" / exec_id / "ended.json", Ended)
        if ended is not None and ended.result is not None and docker_spool.is_dropped(place.home, exec_id):
            return commands.shortened(ended.result, stream, offset, limit)
        total = docker_spool.size(place.home, exec_id, stream)
        begin = max(0, total + offset) if offset < 0 else min(offset, total)
        data = docker_spool.read(place.home, exec_id, stream, begin, limit)
        return LogPage(data=data, offset=begin, next_offset=begin + len(data), total=total, running=running)

    async def kill(self, place: Place, exec_id: str, signal: str) -> None:
        """End a command with all that it started, or send its process group a signal."""
        self._begun(place, exec_id)
        watch = self._watches.get((place.sandbox, exec_id))
        if watch is None:
            return
        await self.started(place, exec_id)
        begun = self._begun(place, exec_id)
        if watch.done() or begun.engine_exec is None:
            return
        known = self._engine.docker.containers.exec(begun.engine_exec)
        if signal in SIGNALS:
            await self._signal(place, exec_id, known, watch, SIGNALS[signal])
            return
        self._killed.add((place.sandbox, exec_id))
        if not await self._ended(place, exec_id, begun, known, watch):
            raise InfraError(f"command {exec_id!r} could not be killed in {GRACE_S:g} s")

    async def _signal(self, place: Place, exec_id: str, known: Exec, watch: "asyncio.Task[Ended]", number: int) -> None:
        """Send a signal; the engine may name a command's process only after that has begun to write."""
        deadline = time.monotonic() + NAMED_S
        while not watch.done():
            leader = await self._leader(known)
            if leader and await asyncio.to_thread(docker_host.signal_group, place.container, leader, number):
                return
            if time.monotonic() > deadline:
                raise InfraError(f"the engine does not name the process of command {exec_id!r}, so it heard no signal")
            await asyncio.wait([watch], timeout=LAST_S)

    def _begun(self, place: Place, exec_id: str) -> Begun:
        begun = load(place.home / "execs" / exec_id / "begun.json", Begun)
        if begun is None:
            raise InvalidRequest(f"exec_id {exec_id!r} is of no command of sandbox {place.sandbox!r}")
        return begun


def of(home: Path) -> tuple[int, list[str]]:
    """Number of recorded commands, and ids of those that run."""
    folders = list((home / "execs").iterdir())
    return len(folders), [folder.name for folder in folders if not (folder / "ended.json").exists()]


def _marker(place: Place, exec_id: str) -> str:
    return f"{place.marker}.{exec_id}"


def _written_code(place: Place, exec_id: str) -> int | None:
    """The status that the command's own shell has written down, where the engine has forgotten it."""
    text = docker_spool.read(place.home, exec_id, "code", 0, 16).strip()
    return int(text) if text.isdigit() else None


def _start_error(text: str) -> InfraError | InvalidRequest:
    """Whether an engine's words are about what the caller asked for. Pure."""
    if "unable to find user" in text or "no matching entries in passwd" in text:
        return InvalidRequest(f"user is not one of the image's; allowed is a name in it or a number ({text[:200]})")
    if "chdir to cwd" in text or ("mkdir " in text and "cwd" in text):
        return InvalidRequest(f"cwd is no folder of the sandbox; allowed is one that is there ({text[:200]})")
    return InfraError(text)
