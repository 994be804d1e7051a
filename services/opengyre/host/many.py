"""Several emulated hosts in one process: `<host>-000`, `<host>-001`, ..., each with all that makes a host.

Each has its own identity, cell, heartbeat, role machine and endpoint (`/h/<host>/inference/v1/...`). They share the
connection to the bus, the mirrors of roles and runs, the HTTP server and the process's readiness, waits and gauges.

Awaits: `run` ends when all hosts have ended; one that fails ends the others, and the process.
"""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from opengyre.host.levels import levels
from opengyre.host.service import Host
from opengyre.shared.lifecycle import Context

LOOK_S = 0.25


def serve(context: Context) -> "Host | Hosts":
    """The service that the settings ask for."""
    return Hosts(context) if context.settings.host.count > 1 else Host(context)


class Hosts:
    def __init__(self, context: Context) -> None:
        self._context = context
        settings = context.settings.host
        self._parts = [part(context, f"{settings.host}-{number:03d}") for number in range(settings.count)]
        self._hosts: dict[str, Host] = {}

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/h/{host}/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/h/{host}/inference/v1/abort_requests", self._abort, methods=["POST"]),
        ]

    async def run(self) -> None:
        async with levels(self._context.bus) as shared:
            self._hosts = {part.settings.host.host: Host(part, levels=shared) for part in self._parts}
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(self._look())
                try:
                    async with asyncio.TaskGroup() as running:
                        for host in self._hosts.values():
                            running.create_task(host.run())
                finally:
                    looking.cancel()

    async def _look(self) -> None:
        """What the process lacks is what its first host lacks; its figures are the sums of theirs."""
        while True:
            self._context.missing = next((part.missing for part in self._parts if part.missing), None)
            for name in ("calls_in_flight", "tokens_per_s"):
                self._context.gauges[name] = sum(part.gauges.get(name, 0.0) for part in self._parts)
            self._context.gauges["hosts"] = len(self._parts)
            await asyncio.sleep(LOOK_S)

    async def _generate(self, request: Request) -> Response:
        host = self._hosts.get(request.path_params["host"])
        return _unknown(request) if host is None else await host.inference.generate(request)

    async def _abort(self, request: Request) -> Response:
        host = self._hosts.get(request.path_params["host"])
        return _unknown(request) if host is None else await host.inference.abort(request)


def part(context: Context, name: str) -> Context:
    """The context of one host: its own name, cell and address, the rest the process's."""
    own = context.settings.host.model_copy(update={"host": name, "cell": name, "count": 1})
    settings = context.settings.model_copy(update={"host": own})
    made = Context(context.service, context.replica, settings, context.bus, context.blobs, f"{context.url}/h/{name}")
    made.waits = context.waits
    made.stopping = context.stopping
    return made


def _unknown(request: Request) -> Response:
    message = f"host {request.path_params['host']} is not here"
    return JSONResponse({"error": {"message": message, "type": "not_found", "param": None, "code": 404}}, 404)
