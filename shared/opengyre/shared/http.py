"""A service's HTTP side: /healthz, /readyz, /metrics and the routes of its own, under uvicorn in our own loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from opengyre.shared.settings import HttpSettings


class PortTakenError(OSError):
    """The wished port is in use; the message names it."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the lifecycle."""
        yield


def probe_routes(alive: Callable[[], bool], ready: Callable[[], str | None]) -> list[BaseRoute]:
    """Health (restart me if not) and readiness (`ready` says what is missing, or None)."""

    async def healthz(_request: Request) -> Response:
        ok = alive()
        return JSONResponse({"alive": ok}, status_code=200 if ok else 503)

    async def readyz(_request: Request) -> Response:
        missing = ready()
        return JSONResponse({"ready": missing is None, "missing": missing}, status_code=503 if missing else 200)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


def listen(settings: HttpSettings) -> socket.socket:
    """Bind the socket; raises `PortTakenError`."""
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.bind, settings.port))
    except OSError as error:
        sock.close()
        raise PortTakenError(
            f"port {settings.port} on {settings.bind} cannot be used ({error.strerror}); "
            "set http.port (GYRE_HTTP__PORT) to a free one, or to 0"
        ) from error
    return sock


@contextlib.asynccontextmanager
async def serving_http(sock: socket.socket, app: ASGIApp, shutdown_s: float = 5.0) -> AsyncIterator[None]:
    """Serve `app` on `sock` for as long as the block lasts; open requests get `shutdown_s` to end."""
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(shutdown_s),
            http="httptools",
        )
    )
    sock.listen(2048)  # connections wait in the backlog until uvicorn accepts them, so there is nothing to wait for
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        done, _ = await asyncio.wait([task], timeout=shutdown_s + 2)
        if not done:
            task.cancel()
        sock.close()


def app_of(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(routes=list(routes))
