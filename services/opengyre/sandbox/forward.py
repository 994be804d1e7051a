"""Ports of sandboxes that lead to one address outside each: how an agent in a sandbox reaches its model.

A sandbox has no network. The listening socket was made in its network namespace; the connections that come in there
are carried by this process to the address that the port stands for, and to no other.

Invariants: at most one listener a sandbox and port; a port that is asked for again leads to the new address, for new
connections; the listeners of a sandbox are closed when it is removed.

Awaits: a connection is woken by its bytes or its end. One whose address does not answer is tried again for
`CONNECT_S`, so that a service that is started again is found; then it is closed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from socket import socket

log = logging.getLogger("gyre.sandbox")

CONNECT_S = 60.0
AGAIN_S = 0.25
CHUNK = 1 << 16
MAX_CONNECTIONS = 128
"""Of one port; more are closed at once."""

Listen = Callable[[str, int], Awaitable[socket]]
Address = tuple[str, int]


@dataclass
class _Port:
    address: Address
    server: asyncio.Server | None = None
    open: set["asyncio.Task[None]"] = field(default_factory=set)


class Forwards:
    """All forwarded ports of a node. `listen` makes a socket that listens in a sandbox."""

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._ports: dict[str, dict[int, _Port]] = {}
        self._opening = asyncio.Lock()

    async def point(self, sandbox: str, port: int, address: Address) -> bool:
        """Open the port, or lead it elsewhere; False where the sandbox's ports were closed meanwhile, this one too."""
        async with self._opening:
            ports = self._ports.setdefault(sandbox, {})
            known = ports.get(port)
            if known is not None:
                known.address = address
                return True
            made = _Port(address)

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._serve(made, reader, writer)

            made.server = await asyncio.start_server(serve, sock=await self._listen(sandbox, port))
            if self._ports.get(sandbox) is not ports:
                made.server.close()
                return False
            ports[port] = made
            return True

    async def _serve(self, port: _Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(port.open) >= MAX_CONNECTIONS:
            writer.close()
            return
        port.open.add(task)
        try:
            await _carry(port, reader, writer)
        except (OSError, TimeoutError) as error:
            log.info("sandbox: a forwarded connection ended: %s", error)
        finally:
            port.open.discard(task)
            writer.close()

    async def close(self, sandbox: str) -> None:
        """Close the ports of a sandbox and their connections."""
        for port in self._ports.pop(sandbox, {}).values():
            assert port.server is not None
            port.server.close()
            tasks = list(port.open)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def close_all(self) -> None:
        """Close everything."""
        for sandbox in list(self._ports):
            await self.close(sandbox)


async def _carry(port: _Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(CONNECT_S):
        while True:
            try:
                far_reader, far_writer = await asyncio.open_connection(*port.address)
                break
            except OSError:
                await asyncio.sleep(AGAIN_S)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pipe(reader, far_writer))
            both.create_task(_pipe(far_reader, writer))
    except* OSError:
        pass  # one side is gone: the connection is over
    finally:
        far_writer.close()


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()
    with suppress(OSError):
        sink.write_eof()
