"""The gateway: the public REST API. It decides nothing and holds no state.

Invariants: what it answers is read from streams, buckets and the other services at the time of the request; the
mirrors of small buckets are for looking. It is ready while the mirrors are filled and the broker answers.

Awaits: `run` waits for the service's end, and looks every second whether the broker is there.
"""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute

from opengyre.gateway import cells, decisions, events, executions, openapi, problems, runs, status, tasks
from opengyre.gateway.deps import Deps
from opengyre.gateway.edge import Edge
from opengyre.shared.lifecycle import Context

ABOUT = """\
Reinforcement learning for long-running LLM agents on elastic cells of GPUs. Submit tasks to a run, follow what becomes
of them, see and steer the cells. Errors are `application/problem+json` with one sentence that names what is wrong and
what is allowed. A POST may carry an `Idempotency-Key`: the same key with the same request gets the first answer again.
"""


class Gateway:
    """The service, for `opengyre.shared.lifecycle.main`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.deps = Deps(context)

    def routes(self) -> Sequence[BaseRoute]:
        return ()

    def app(self, probes: Sequence[BaseRoute]) -> FastAPI:
        """The application, probes included."""
        settings = self._context.settings.gateway
        app = FastAPI(title="OpenGyre", version="1", description=ABOUT, routes=list(probes), redoc_url=None)
        app.state.deps = self.deps
        app.add_middleware(Edge, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
        problems.install(app)
        modules = (runs, tasks, executions, cells, decisions, status, events)
        for module in modules:
            app.include_router(module.router)
        app.state.routes = [route for module in modules for route in module.router.routes]
        openapi.install(app)
        return app

    async def run(self) -> None:
        async with self.deps.mirrored():
            while not self._context.stopping.is_set():
                here = self._context.bus.connected
                self._context.missing = None if here else f"NATS at {self._context.bus.url} does not answer"
                await self._context.pause(1.0)
