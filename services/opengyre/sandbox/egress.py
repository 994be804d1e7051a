"""The ways out of a node's sandboxes: in each with an allow-list, a port of its own loopback on which a proxy answers.

A sandbox has no route. The listening socket was made in its network namespace; this process answers on it and reaches,
for whoever asks, the listed hosts and no others (`proxy`).

Invariants: at most one way out a sandbox, closed when it is removed; a sandbox has no more than `MAX_CONNECTIONS`, all
together no more than a share of the files that this process may have open; of denied hosts at most `MOST_DENIALS` are
kept by name.

Awaits: a connection is woken by its bytes, its end, or its bounds (see `proxy`).
"""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from socket import socket

from prometheus_client import Counter

from opengyre.proto.sandbox import NetworkUse
from opengyre.sandbox import proxy
from opengyre.sandbox.allowlist import PORT, parse
from opengyre.sandbox.core import Spec

log = logging.getLogger("gyre.sandbox")

MAX_CONNECTIONS = 64
"""Of one sandbox; more are closed at once."""
MOST_DENIALS = 64
LOOK_UPS = 8
"""Names that are looked up at once, of all sandboxes together."""

REQUESTS = Counter("gyre_sandbox_network_requests", "Requests of sandboxes to hosts, by outcome", ["outcome"])
BYTES = Counter("gyre_sandbox_network_bytes", "Bytes between sandboxes and hosts", ["direction"])
SENT, RECEIVED = BYTES.labels("sent"), BYTES.labels("received")

Listen = Callable[[str, int], Awaitable[socket]]


@dataclass
class _Out:
    """One sandbox's."""

    sandbox: str
    spec: Spec
    server: asyncio.Server | None = None
    open: set["asyncio.Task[None]"] = field(default_factory=set)
    requests: int = 0
    denied: int = 0
    sent: int = 0
    received: int = 0
    denials: dict[str, int] = field(default_factory=dict)

    def told(self, outcome: str, host: str | None) -> None:
        REQUESTS.labels(outcome).inc()
        self.requests += 1
        if outcome != "denied" or host is None:
            return
        self.denied += 1
        if host not in self.denials:
            if len(self.denials) >= MOST_DENIALS:
                return
            # Once for each: an agent that tries on and on fills no log.
            log.info("sandbox: %s may not reach %s", self.sandbox, host)
        self.denials[host] = self.denials.get(host, 0) + 1

    def moved(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received
        SENT.inc(sent)
        RECEIVED.inc(received)


class Egress:
    """All ways out of a node. ``listen`` makes a socket that listens in a sandbox."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._out: dict[str, _Out] = {}
        self._names: ThreadPoolExecutor | None = None
        self._count = 0
        # Two files a connection; what else the service does has the most of them.
        self._most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)

    async def open(self, spec: Spec) -> None:
        """Make the way out of a sandbox that has an allow-list, unless it is there. Raises what ``listen`` does."""
        if spec.network != "allowlist" or spec.sandbox in self._out:
            return
        if self._names is None:
            self._names = ThreadPoolExecutor(LOOK_UPS, thread_name_prefix="gyre-names")
        out = _Out(spec.sandbox, spec)
        way = proxy.Way(parse(spec.allowed_hosts), self._names, out.told, out.moved)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(out, way, reader, writer)

        self._out[spec.sandbox] = out
        try:
            out.server = await asyncio.start_server(serve, sock=await self._listen(spec.sandbox, PORT))
        except BaseException:
            if self._out.get(spec.sandbox) is out:
                del self._out[spec.sandbox]
            raise
        if self._out.get(spec.sandbox) is not out:  # it was removed meanwhile
            out.server.close()

    async def _serve(
        self, out: _Out, way: proxy.Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(out.open) >= MAX_CONNECTIONS or self._count >= self._most:
            writer.close()
            return
        out.open.add(task)
        self._count += 1
        try:
            await proxy.serve(way, reader, writer)
        except OSError as error:
            log.info("sandbox: a connection of %s ended: %s", out.sandbox, error)
        finally:
            self._count -= 1
            out.open.discard(task)
            writer.close()

    def use(self, sandbox: str) -> NetworkUse | None:
        """What a sandbox did with its way out since that was opened, or None where it has none."""
        out = self._out.get(sandbox)
        if out is None:
            return None
        return NetworkUse(
            allowed_hosts=out.spec.allowed_hosts,
            requests=out.requests,
            denied=out.denied,
            sent_bytes=out.sent,
            received_bytes=out.received,
            denials=dict(out.denials),
        )

    async def close(self, sandbox: str) -> None:
        """Close the way out of a sandbox, with its connections."""
        out = self._out.pop(sandbox, None)
        if out is None:
            return
        if out.server is not None:
            out.server.close()
        tasks = list(out.open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close_all(self) -> None:
        """Close everything; sandboxes stay."""
        for sandbox in list(self._out):
            await self.close(sandbox)
        if self._names is not None:
            self._names.shutdown(wait=False, cancel_futures=True)
            self._names = None
