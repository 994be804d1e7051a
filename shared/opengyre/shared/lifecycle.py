"""How a service lives: settings, logs, bus, HTTP, heartbeat, its work; then the same backwards.

States: starting -> running -> stopping -> gone. SIGTERM or SIGINT begins the stopping: `stopping` is set, the service
finishes or hands over what it does within `GRACE_S`, then HTTP, heartbeat and bus are closed in this order. A second
signal, or the loss of the bus for good, ends the process at once with status 1.

Awaits: the main task waits for the service's `run` to return; `run` is expected to watch `context.stopping`.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from opengyre.proto import subjects
from opengyre.proto.service import ServiceStatus
from opengyre.shared import logs, metrics, tracing
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, BusError
from opengyre.shared.http import PortTakenError, app_of, listen, probe_routes, serving_http
from opengyre.shared.masked import masked
from opengyre.shared.settings import Settings, SettingsError, load
from opengyre.shared.waits import Waits

log = logging.getLogger("gyre.lifecycle")

GRACE_S = 20.0
STATUS_TTL_S = 5


class Context:
    """What a service is given."""

    def __init__(self, service: str, replica: str, settings: Settings, bus: Bus, blobs: Blobs, url: str) -> None:
        self.service = service
        self.replica = replica
        """Name of this process among the service's replicas; new at each start."""
        self.settings = settings
        self.bus = bus
        self.blobs = blobs
        self.url = url
        """Base URL of this process's HTTP side."""
        self.waits = Waits()
        self.stopping = asyncio.Event()
        self.gauges: dict[str, float] = {}
        """Figures for `ServiceStatus`; set them as they change."""
        self.missing: str | None = "starting"
        """What readiness lacks; a service sets it to None when it is ready."""

    @property
    def state_dir(self) -> Path:
        return self.settings.state_dir

    async def pause(self, seconds: float) -> bool:
        """Sleep, or less if the service is stopping; whether to go on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        return not self.stopping.is_set()


class Service(Protocol):
    """A service. `app` (optional) replaces the default application and must include the probe routes it is given."""

    def __init__(self, context: Context) -> None: ...

    def routes(self) -> Sequence[BaseRoute]:
        """HTTP routes beside the probes."""
        ...

    async def run(self) -> None:
        """Work until `context.stopping` is set and what was begun is finished or handed over."""
        ...


def main(service: str, factory: str) -> None:
    """Run `factory` (`package.module:Class`); the settings are checked before it, and its heavy imports, are loaded."""
    try:
        settings = load()
    except SettingsError as error:
        sys.exit(f"{service}: {error}")
    module, _, name = factory.partition(":")
    replica = f"{os.uname().nodename.partition('.')[0]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    replica = "".join(c if c.isalnum() or c in "-_" else "_" for c in replica)
    logs.configure(settings.log, service, replica)
    try:
        code = uvloop.run(_serve(service, replica, settings, getattr(importlib.import_module(module), name)))
    except PortTakenError as error:
        sys.exit(f"{service}: {error}")
    except TimeoutError:
        sys.exit(f"{service}: NATS at {masked(settings.bus.url)} does not answer; set bus.url (GYRE_BUS__URL)")
    except BusError as error:
        sys.exit(f"{service}: {error}")
    sys.exit(code)


async def _serve(name: str, replica: str, settings: Settings, factory: Any) -> int:
    sock = listen(settings.http)
    host = settings.http.advertise or ("127.0.0.1" if settings.http.bind in ("0.0.0.0", "::") else settings.http.bind)  # noqa: S104 - compared with, not bound to
    url = f"http://{host}:{sock.getsockname()[1]}"
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    _write_resolved(settings, name, replica)
    provider = tracing.configure(name, replica)
    try:
        async with (
            Bus(settings.bus.url, f"{name}.{replica}") as bus,
            Blobs(settings.state_dir / "blobs", settings.cache) as blobs,
        ):
            context = Context(name, replica, settings, bus, blobs, url)
            service = factory(context)
            probes = probe_routes(lambda: not bus.lost.is_set(), lambda: context.missing)
            make_app = getattr(service, "app", None)
            app: ASGIApp = make_app(probes) if make_app else app_of([*probes, *service.routes()])
            async with serving_http(sock, app):
                return await _run(context, service)
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)


async def _run(context: Context, service: Service) -> int:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if context.stopping.is_set():
            os._exit(1)
        log.info("stopping")
        context.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(service.run(), name=context.service)
    helpers = [
        asyncio.create_task(_heartbeat(context)),
        asyncio.create_task(_measure_lag()),
        asyncio.create_task(context.bus.lost.wait()),
    ]
    stopping = asyncio.create_task(context.stopping.wait())
    lost = helpers[-1]
    try:
        log.info("running on %s", context.url)
        await asyncio.wait([running, stopping, lost], return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            log.error("the bus is lost for good; leaving, to be started again")
            return 1
        if not running.done():
            await asyncio.wait([running], timeout=GRACE_S)
        if not running.done():
            log.warning("not finished within %g s; leaving", GRACE_S)
            running.cancel()
            await asyncio.wait([running], timeout=5)
            return 1
        running.result()
    finally:
        for task in (running, stopping, *helpers):
            task.cancel()
        await asyncio.wait([running, stopping, *helpers], timeout=5)
    return 0


async def _heartbeat(context: Context) -> None:
    bucket = Bucket(context.bus, subjects.KV_SERVICES, ServiceStatus)
    key = f"{context.service}.{context.replica}"
    try:
        while True:
            status = ServiceStatus(
                service=context.service,
                replica=context.replica,
                pid=os.getpid(),
                url=context.url,
                ready=context.missing is None,
                missing=context.missing,
                waits=context.waits.report(),
                gauges=dict(context.gauges),
            )
            try:
                await bucket.put(key, status, ttl_s=STATUS_TTL_S)
            except BusError as error:
                log.warning("heartbeat: %s", error)
            await asyncio.sleep(1)
    finally:
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(1):
                await bucket.delete(key)


async def _measure_lag() -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(1)
        metrics.EVENT_LOOP_LAG.set(max(0.0, loop.time() - before - 1))


def _write_resolved(settings: Settings, service: str, replica: str) -> None:
    folder = settings.state_dir / "settings"
    folder.mkdir(parents=True, exist_ok=True)
    # Hosts are told apart by their settings; replicas of the others share theirs.
    path = folder / (f"host-{settings.host.host}.json" if service == "host" else f"{service}.json")
    path.touch(mode=0o600)
    path.write_text(settings.resolved(), encoding="utf-8")
    log.debug("settings of %s written to %s", replica, folder)
