"""Commands in bubblewrap sandboxes: run, spawned, looked at, read from, ended.

Invariants: a command runs once for its id: its monitor's claim decides, whoever asks and however often; it depends on
its monitor only, which depends on nobody, so that its end and its output are found by any later service.

Awaits: a request to the launcher (bounded there); the end of a monitor, by pidfd, bounded by the command's timeout
and `GRACE_S`, or by what the caller waits.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from opengyre.proto.sandbox import ExecResult
from opengyre.proto.sandbox_jobs import JobStatus, LogPage
from opengyre.sandbox import commands, processes
from opengyre.sandbox.base import Base
from opengyre.sandbox.core import (
    PLAIN,
    ExecTimeout,
    InfraError,
    InvalidRequest,
    Options,
    SandboxGone,
    Spec,
    unsupported,
)
from opengyre.sandbox.launch import spools
from opengyre.sandbox.launch.files import WORKSPACE
from opengyre.sandbox.launcher import LauncherLostError
from opengyre.sandbox.records import Answer, Claim, Processes, load

GRACE_S = 30.0
KILL_BOUND_S = 10.0
INLINE_COMMAND = 16 << 10  # JSON may write a character as six bytes
# What a monitor makes of them: see `opengyre.sandbox.launch.execs`.
_SIGNALS = {"KILL": signal.SIGTERM, "TERM": signal.SIGUSR1, "INT": signal.SIGINT}


class Running(Base):
    """The part of the backend that is about commands."""

    async def exec(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> ExecResult:
        record = self._record(spec.sandbox)
        claim = await self._begin(spec, exec_id, command, timeout_s, limit, options)
        answer = self._answer(spec.sandbox, record, exec_id)
        if answer is None:
            if not await processes.ended(claim.pid, claim.started, timeout_s + GRACE_S):
                raise ExecTimeout(f"command {exec_id!r} has not ended {GRACE_S:g} s after its timeout")
            answer = self._answer(spec.sandbox, record, exec_id)
        return self._result(spec.sandbox, record, exec_id, answer)

    async def spawn(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> None:
        await self._begin(spec, exec_id, command, timeout_s, limit, options)

    async def poll(self, sandbox: str, exec_id: str, wait_s: float = 0.0) -> JobStatus:
        record = self._record(sandbox)
        claim = self._claim(sandbox, record, exec_id)
        answer = self._answer(sandbox, record, exec_id)
        if answer is None:
            if not await processes.ended(claim.pid, claim.started, wait_s):
                return JobStatus(exec_id=exec_id, running=True)
            answer = self._answer(sandbox, record, exec_id)
        return JobStatus(exec_id=exec_id, running=False, result=self._result(sandbox, record, exec_id, answer))

    async def logs(
        self, sandbox: str, exec_id: str, stream: Literal["stdout", "stderr"], offset: int, limit: int
    ) -> LogPage:
        record = self._record(sandbox)
        self._claim(sandbox, record, exec_id)
        running = self._answer(sandbox, record, exec_id) is None
        spool = self._home(sandbox, record) / spools.FOLDER / spools.name(exec_id, stream)
        page = await asyncio.to_thread(_page, spool, offset, limit)
        if page is not None:
            data, at, total = page
            return LogPage(data=data, offset=at, next_offset=at + len(data), total=total, running=running)
        answer = self._answer(sandbox, record, exec_id)
        if answer is None:  # it has not begun to write
            return LogPage(data=b"", offset=0, next_offset=0, total=0, running=running)
        return commands.shortened(answer, stream, offset, limit)

    async def kill(self, sandbox: str, exec_id: str, signal: Literal["KILL", "TERM", "INT"] = "KILL") -> None:
        record = self._record(sandbox)
        claim = self._claim(sandbox, record, exec_id)
        if self._answer(sandbox, record, exec_id) is None:
            processes.send(claim.pid, claim.started, _SIGNALS[signal])
            if signal != "KILL":
                return
            if not await processes.ended(claim.pid, claim.started, KILL_BOUND_S):
                raise InfraError(f"command {exec_id!r} does not end; destroy its sandbox")
            answer = self._answer(sandbox, record, exec_id)
            if answer is not None and answer.killed_by is not None:
                return
            # It had ended by itself when its monitor heard of this, or the monitor itself was killed.
        if signal == "KILL":
            marker = f"{self.marker(sandbox)}.{exec_id}"
            await self._launcher.request("kill", marker=marker, **self._inside(sandbox))

    def _exec_folder(self, sandbox: str, record: Processes, exec_id: str) -> Path:
        return self._home(sandbox, record) / "execs" / exec_id

    def _answer(self, sandbox: str, record: Processes, exec_id: str) -> Answer | None:
        return load(self._exec_folder(sandbox, record, exec_id) / "answer.json", Answer)

    def _claim(self, sandbox: str, record: Processes, exec_id: str) -> Claim:
        claim = load(self._exec_folder(sandbox, record, exec_id) / "claim", Claim)
        if claim is None:
            raise InvalidRequest(f"exec_id is {exec_id!r}; allowed is one of a command of sandbox {sandbox!r}")
        return claim

    async def _begin(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options
    ) -> Claim:
        record = self._record(spec.sandbox)
        folder = self._exec_folder(spec.sandbox, record, exec_id)
        digest = commands.digest(command, options)
        claim = load(folder / "claim", Claim)
        if claim is None:
            user = options.user or spec.user
            if user is not None and not self.capabilities().users:
                raise unsupported("users", f"user {user[:100]!r}", self.capabilities().backend)
            request = commands.request(
                spec,
                record,
                marker=self.marker(spec.sandbox),
                exec_id=exec_id,
                cwd=self._place(spec.sandbox, spec.workdir or record.workdir or WORKSPACE),
                uid=self._uid(record),
                memory_by_cgroup=self._groups.memory,
                spool_mb=self._spool_mb,
                options=options,
            )
            request |= {"folder": str(folder), "digest": digest, "timeout_s": timeout_s, "output_limit": limit}
            claim = await self._launch(spec.sandbox, command, options.stdin, request, cpus=spec.cpus is not None)
        if claim.digest != digest:
            raise InvalidRequest(f"exec_id {exec_id!r} was used for another command; allowed is an id for each")
        return claim

    async def _launch(
        self, sandbox: str, command: str, stdin: bytes | None, request: dict[str, Any], *, cpus: bool
    ) -> Claim:
        request["cgroups"] = self._groups.joins(sandbox, limits_only=True, cpus=cpus)
        request["oom_files"] = self._groups.oom_files(sandbox)
        beside: list[Path] = []
        try:
            if len(command) <= INLINE_COMMAND:
                request["command"] = command
            else:
                beside.append(self._temporary(sandbox))
                beside[-1].write_bytes(command.encode("utf-8", "surrogateescape"))
                request["command_file"] = str(beside[-1])
            if stdin is not None:
                beside.append(self._temporary(sandbox))
                beside[-1].write_bytes(stdin)
                request["stdin_file"] = str(beside[-1])
            try:
                made = await self._launcher.request("exec", **request)
            except LauncherLostError:
                # The claim makes it safe to ask again, whether the first request was begun or not.
                made = await self._launcher.request("exec", **request)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {sandbox!r} was destroyed") from None
        finally:
            for path in beside:
                path.unlink(missing_ok=True)
        if made is not None:
            return Claim(pid=made["pid"], started=made["started"], digest=request["digest"])
        claim = load(Path(request["folder"]) / "claim", Claim)
        if claim is None:
            raise SandboxGone(f"sandbox {sandbox!r} was destroyed")
        return claim

    def _result(self, sandbox: str, record: Processes, exec_id: str, answer: Answer | None) -> ExecResult:
        # A command that dies of SIGKILL may have died with its sandbox.
        if answer is None or answer.gone or answer.exit_code == 137:
            if self._live.get(sandbox) is not record or not self._is_live(record):
                raise SandboxGone(f"sandbox {sandbox!r} ended while command {exec_id!r} was in it")
            if answer is None or answer.gone:
                raise InfraError(f"the monitor of command {exec_id!r} was killed, so what it did is not known")
        if answer.refused is not None:
            raise InvalidRequest(answer.refused)
        if answer.infra_error is not None:
            raise InfraError(answer.infra_error)
        return commands.result(exec_id, answer, isolated=self._isolated)

    async def quiet(self, sandbox: str) -> None:
        # As uid 0 where there is one: it may signal every user of the sandbox.
        inside = self._inside(sandbox)
        if self._own_ids:
            inside["uid"] = 0
        await self._launcher.request("quiet", marker=self.marker(sandbox), **inside)

    async def trim(self) -> None:
        """Hold what commands have written to its bound, also where what they left behind writes on."""
        for sandbox, record in list(self._live.items()):
            bound = commands.keep_limit(record.spool_limit, self._spool_mb)
            await asyncio.to_thread(_trim, self._home(sandbox, record), bound)

    def execs(self, sandbox: str) -> tuple[int, list[str]]:
        """Number of recorded commands, and ids of those that run."""
        folders = list((self._home(sandbox, self._record(sandbox)) / "execs").iterdir())
        return len(folders), [folder.name for folder in folders if not (folder / "answer.json").exists()]


def _trim(home: Path, bound: int) -> None:
    """Hold the outputs of a sandbox's commands to the bound; nothing where it has none, or is being removed."""
    with suppress(FileNotFoundError):
        execs = os.open(home / "execs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            folder = os.open(home / spools.FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found = spools.sizes(folder)
                if found:
                    spools.trim(folder, spools.ended(execs, list(found)), bound)
            finally:
                os.close(folder)
        finally:
            os.close(execs)


def _page(path: Path, offset: int, limit: int) -> tuple[bytes, int, int] | None:
    """Bytes of a file, where they begin, and how many it has; None where there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        total = os.fstat(fd).st_size
        at = max(0, total + offset) if offset < 0 else min(offset, total)
        return os.pread(fd, limit, at), at, total
    finally:
        os.close(fd)
