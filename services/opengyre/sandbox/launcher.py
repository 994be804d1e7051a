"""The service's side of the launcher process (see `opengyre.sandbox.launch`).

Invariants: one launcher at a time; every request ends in an answer, an error of the service's kinds, or
`LauncherLostError` when the process ended first (the next request starts another). What a lost launcher had begun goes
on without it, so callers repeat or undo by records.

Awaits: `request` is woken by the answer's packet, by the launcher's end, or by its bound.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from opengyre.sandbox.core import ERRORS, ExecTimeout, InfraError, SandboxGone

REPLY_BOUND_S = 30.0
SEND_BOUND_S = 10.0
PACKET = 1 << 18
_CODE = "import sys; sys.path.insert(0, sys.argv[2]); from opengyre.sandbox.launch.main import main; main()"


class LauncherLostError(InfraError):
    """The launcher ended before it answered; whether the request was begun is not known."""


class Launcher:
    """Starts the process when it is first needed."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tagged: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> None:
        """Start the process if there is none."""
        async with self._starting:
            if self._socket is not None:
                return
            await asyncio.to_thread(self._reap)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET)
            try:
                self._process = await asyncio.to_thread(self._spawn, theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            ours.setblocking(False)
            self._socket = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_packet, ours)

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(theirs.fileno()), root],
                # Nothing of the service's environment; the marker tells its children from a sandbox's processes.
                env={"GYRE_EXEC": "launcher"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def _on_packet(self, ours: socket.socket) -> None:
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(ours, PACKET, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._lose(ours)
                return
            answer = json.loads(packet)
            waiting = self._waiting.pop(answer["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result({**answer, "fds": fds})
            else:
                for fd in fds:
                    os.close(fd)

    def _lose(self, ours: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(ours.fileno())
        ours.close()
        if self._socket is ours:
            self._socket = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LauncherLostError("the sandbox launcher ended; the next request starts another"))
        self._waiting.clear()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(timeout=SEND_BOUND_S)
            self._process = None

    def give_up(self, tag: str) -> None:
        """End the wait of the request with that tag, if any: whoever calls has ended what would answer it."""
        waiting = self._tagged.get(tag)
        if waiting is not None and not waiting.done():
            waiting.set_exception(SandboxGone(f"sandbox {tag!r} was destroyed while it was made"))

    async def request(self, op: str, *, tag: str | None = None, **fields: Any) -> dict[str, Any] | None:
        """Ask, and return the ``ok`` of the answer."""
        return (await self._request(op, tag, fields))["ok"]

    async def listen(self, **fields: Any) -> socket.socket:
        """A socket that listens in a sandbox."""
        [fd] = (await self._request("listen", None, fields))["fds"]
        return socket.socket(fileno=fd)

    async def _request(self, op: str, tag: str | None, fields: dict[str, Any]) -> dict[str, Any]:
        await self.start()
        number = next(self._ids)
        packet = json.dumps({"id": number, "op": op, **fields}).encode()
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        if tag is not None:
            self._tagged[tag] = waiting
        try:
            async with asyncio.timeout(REPLY_BOUND_S):
                await self._send(packet)
                answer = await waiting
        except TimeoutError as error:
            raise ExecTimeout(f"the sandbox launcher did not answer {op} within {REPLY_BOUND_S:g} s") from error
        finally:
            self._waiting.pop(number, None)
            if tag is not None and self._tagged.get(tag) is waiting:
                del self._tagged[tag]
        if "error" in answer:
            kind, message = answer["error"]
            raise ERRORS.get(kind, InfraError)(message)
        return answer

    async def _send(self, packet: bytes) -> None:
        while True:
            if self._socket is None:
                raise LauncherLostError("the sandbox launcher ended; the next request starts another")
            ours = self._socket
            try:
                ours.send(packet)
            except BlockingIOError:
                await asyncio.sleep(0.002)  # a burst filled the socket; the launcher empties it
            except OSError as error:
                self._lose(ours)  # at once: whoever asks again is not to meet the same socket
                raise LauncherLostError(f"the sandbox launcher cannot be reached: {error}") from error
            else:
                return

    async def stop(self) -> None:
        """End the launcher; what it started goes on."""
        async with self._starting:
            if self._socket is not None:
                self._lose(self._socket)
            await asyncio.to_thread(self._reap)
