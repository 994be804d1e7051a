"""vLLM's server as a process of a host: started, watched, ended.

Invariants: one server at a time; it is ended with all it started (a process group of its own), also when this process
dies (the kernel ends the server then, and vLLM its workers). What it holds is measured, not computed.

Awaits: `start` is woken by the server's first healthy answer, by its end, or after `start_s`; `stop` by its end, which
is forced after `STOP_S`.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp

from opengyre.shared.embedded import free_port
from opengyre.tiny.types import EngineError

log = logging.getLogger("gyre.host.vllm")

SIDE = Path(__file__).parent / "vllm_side"
"""Modules that run in vLLM's environment."""
STOP_S = 10.0
LOOK_S = 0.2
TAIL = 12
"""Lines that tell what the log's end is where none of them names an error ..."""
KEPT = 400
"""... and those that are looked through for one: tracebacks of several processes follow each other."""
_NAMED: Final = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception): \S")
_HARMLESS: Final = re.compile(r"^(\([^)]*\) )?(WARNING|INFO|DEBUG) \d\d-\d\d ")
"""A line of vLLM's log that is no error, whatever it names: each start warns that there is no tokenizer."""
_LISTS: Final = re.compile(r"\d+ validation errors? for ")
_REFUSED: Final = re.compile(r"^\S+: error: ")
"""Of a command line: the last line, after its usage."""
_CONSEQUENCE: Final = "Engine core initialization failed"


def cause(lines: Sequence[str]) -> str | None:
    """Of a log's lines, the last that names an error and is not just that another process had one: from its name on,
    with the reason that a list of errors gives in the line after it. None where no line does."""
    if lines and _REFUSED.match(lines[-1]):
        return lines[-1]
    for place in range(len(lines) - 1, -1, -1):
        found = _NAMED.search(lines[place])
        if found is None or _CONSEQUENCE in lines[place] or _HARMLESS.match(lines[place]):
            continue
        said = [lines[place][found.start() :].strip()]
        if _LISTS.search(said[0]):
            said += [line.strip() for line in lines[place + 1 : place + 2]]
        return " ".join(said)
    return None


class Server:
    """A running server; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process
        self._tail: deque[str] = deque(maxlen=KEPT)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        python: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        session: aiohttp.ClientSession,
        start_s: float,
    ) -> "Server":
        """Raises `EngineError` with the cause that its log names, or its last lines."""
        port = free_port()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("GYRE_", "PYTHON"))}
        env |= {**environment, "PYTHONPATH": str(SIDE), "PYTHONUNBUFFERED": "1", "GYRE_VLLM_PARENT": str(os.getpid())}
        process = await asyncio.create_subprocess_exec(
            python, "-m", "gyre_vllm_launch", *arguments, "--host", "127.0.0.1", "--port", str(port),
            env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        server = cls(process, f"http://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(start_s):
                await server._ready(session)
        except TimeoutError:
            await server.stop()
            raise EngineError(f"vLLM was not ready after {start_s:g} s: {await server.last_words()}") from None
        except BaseException:
            await asyncio.shield(server.stop())
            raise
        return server

    async def _ready(self, session: aiohttp.ClientSession) -> None:
        while not await self._healthy(session):
            if self.ended:
                raise EngineError(f"vLLM ended while it started: {await self.last_words()}")
            await asyncio.sleep(LOOK_S)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the reader holds: the rest of it comes as lines
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._tail.append(text)
                log.debug("%s", text)

    async def last_words(self) -> str:
        """What it died of, as its log names it, or the log's end."""
        if self.ended:
            await asyncio.wait({self._reading}, timeout=1)
        lines = list(self._tail)
        said = cause(lines) or " | ".join(lines[-TAIL:]) or "it said nothing"
        status = self._process.returncode
        return said if status is None or status >= 0 else f"{signal.Signals(-status).name} ended it; {said}"

    async def gone(self) -> None:
        """Wait until the server has ended by itself."""
        await self._process.wait()

    async def stop(self) -> None:
        """End it and all it started."""
        for sign, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            for pid in members(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._process.wait()
                    while members(self._process.pid):  # noqa: ASYNC110 - of its children the kernel tells nobody but it
                        await asyncio.sleep(0.05)
                    break
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def memory(self) -> int:
        """Bytes that its processes hold together, each shared page once (PSS). Reads /proc: not for the event loop."""
        return sum(_pss(pid) for pid in members(self._process.pid))


def members(session: int) -> list[int]:
    """Processes of a session that have not ended; vLLM's workers may have process groups of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:  # it has ended
        pass
    return 0
