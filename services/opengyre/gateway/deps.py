"""What every route stands on: the bus, mirrors of the small buckets, and the route class that bounds each request.

Invariants: a request is answered within `BODY_S + ANSWER_S`; while the broker is away the answer is 503 at once. The
mirrors are for looking; what decides is read from the leader.

Awaits: a request waits for its body (the client, `BODY_S`) and for the bus (`ANSWER_S`).
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from opengyre.gateway.problems import RETRY_AFTER_S, Problem
from opengyre.proto import subjects
from opengyre.proto.decision import GroupEntry
from opengyre.proto.host import HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.service import ServiceStatus
from opengyre.shared.bus import Bucket, Bus, View, reachable
from opengyre.shared.lifecycle import Context

T = TypeVar("T")

BODY_S = 60.0
ANSWER_S = 30.0
LISTED = 20
"""How many names an error lists."""


class Deps:
    """Shared by all routes; `mirrored` fills it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.settings = context.settings.gateway
        self.bus: Bus = context.bus
        self.runs = Bucket(context.bus, subjects.KV_RUNS, RunSpec)
        self.ledger = Bucket(context.bus, subjects.KV_LEDGER, GroupEntry)
        self.run_view: View[RunSpec]
        self.host_view: View[HostStatus]
        self.service_view: View[ServiceStatus]
        self.filled = False
        self.event_readers = 0

    @contextlib.asynccontextmanager
    async def mirrored(self) -> AsyncIterator[None]:
        """Keep the mirrors for as long as the block lasts."""
        hosts = Bucket(self.bus, subjects.KV_HOSTS, HostStatus)
        services = Bucket(self.bus, subjects.KV_SERVICES, ServiceStatus)
        async with self.runs.view() as runs, hosts.view() as host_view, services.view() as service_view:
            self.run_view, self.host_view, self.service_view = runs, host_view, service_view
            self.filled = True
            try:
                yield
            finally:
                self.filled = False

    def cells(self) -> set[str]:
        """Cells of which a host has a heartbeat, as the mirror knows them."""
        return {status.cell for status in self.host_view.values.values()}

    def active_run(self) -> str | None:
        """The run that is active, as the mirror knows it."""
        return next((run for run, spec in sorted(self.run_view.values.items()) if spec.state == "active"), None)

    def present_run(self) -> str | None:
        """The active run or, where none is, the one that was changed last."""
        newest = max(self.run_view.values, key=lambda run: self.run_view.revisions.get(run, 0), default=None)
        return self.active_run() or newest

    async def run(self, run: str) -> tuple[RunSpec, int]:
        """A run's setting and revision; raises `Problem` 404."""
        found = await self.runs.get(run)
        if found is None:
            raise Problem(404, f"there is no run {run}; there are: {listed(self.run_view.values)}", field="run")
        return found


SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def is_unicode(body: bytes) -> bool:
    """False for JSON with half of a surrogate pair, which no store and no sentence could hold."""
    if not SURROGATE.search(body):
        return True
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except (ValueError, RecursionError):
        return True  # no JSON: said elsewhere, with its place
    return True


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def listed(names: "dict[str, Any] | set[str] | list[str]") -> str:
    """Names for a sentence, `LISTED` at most."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return (", ".join(ordered[:LISTED]) + more) or "none"


def deps_of(request: Request) -> Deps:
    """FastAPI dependency."""
    deps: Deps = request.app.state.deps
    return deps


class BoundRoute(APIRoute):
    """A route whose body and whose answer come within their bounds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            deps = deps_of(request)
            try:
                async with asyncio.timeout(BODY_S):
                    await request.body()
            except TimeoutError as error:
                raise Problem(408, f"the body did not arrive within {BODY_S:g} s") from error
            except ClientDisconnect as error:
                raise Problem(400, "the connection ended before the body was complete") from error
            if not is_unicode(await request.body()):
                raise Problem(422, "the body holds half of a surrogate pair; allowed is text that UTF-8 can express")
            if not deps.filled:
                raise Problem(503, "the gateway is starting", headers={"Retry-After": str(RETRY_AFTER_S)})
            async with reachable(deps.bus, ANSWER_S):
                return await inner(request)

        return handler


def answer(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A struct as a JSON answer."""
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type="application/json")


async def chosen_run(deps: Deps, run: str | None) -> tuple[RunSpec, int]:
    """The run that was named or, where none was, the present one; raises `Problem` 404."""
    name = run or deps.present_run()
    if name is None:
        raise Problem(404, "there is no run yet; POST /v1/runs creates one", field="run")
    return await deps.run(name)
