"""The rollout service: takes episodes from the work queue and runs each to its end.

Invariants: a dispatch is acknowledged after `Ended` is stored, and becomes a dead letter only after that as well, where
the log can be written at all, so that no group waits for a member that nobody runs; a dispatch that comes again while
its execution is live here joins it; on a stop, episodes are stopped between events and given back, so that another
replica continues them at once.

Awaits: the work loop is woken by a dispatch, a free place, or `stopping`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import aiohttp
from starlette.routing import BaseRoute

from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import HostStatus
from opengyre.proto.run import RunSpec
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.rollout.giving_up import give_up
from opengyre.rollout.models import Models
from opengyre.rollout.router import Router
from opengyre.rollout.runner import Outcome, Runner
from opengyre.rollout.sandboxes import Sandboxes
from opengyre.rollout.station import Station
from opengyre.shared import logs, metrics
from opengyre.shared.bus import Abandoned, Bucket, Delivery, FencedError, Rejected, RetryLater, work
from opengyre.shared.bus.consume import HOPELESS
from opengyre.shared.lifecycle import Context

log = logging.getLogger("gyre.rollout")

MAX_DELIVER = 50
"""Failed deliveries after which a dispatch is a dead letter; being given back is no failure."""
GAUGES_S = 0.25


class Rollout:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._endpoints = Endpoints(load_secret(context.state_dir))
        self._live: dict[str, tuple[Runner, asyncio.Task[Outcome]]] = {}
        self._failures: Counter[str] = Counter()

    @property
    def live(self) -> tuple[str, ...]:
        """Executions that run here."""
        return tuple(self._live)

    def routes(self) -> Sequence[BaseRoute]:
        return self._endpoints.routes()

    async def run(self) -> None:
        context = self._context
        settings = context.settings.rollout
        # No limit of its own on connections: the router bounds the calls.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            Bucket(context.bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
            Bucket(context.bus, subjects.KV_RUNS, RunSpec).view() as runs,
        ):
            station = Station(
                bus=context.bus,
                blobs=context.blobs,
                waits=context.waits,
                replica=context.replica,
                url=context.url,
                session=session,
                sandboxes=Sandboxes(context.bus, context.waits, settings, context.settings.sandbox),
                router=Router(hosts, runs, session, context.waits, settings.call_timeout_s, settings.hedge_after_s),
                endpoints=self._endpoints,
                models=Models(context.bus),
                stopping=context.stopping,
            )
            helpers = [asyncio.create_task(self._gauge(station.router)), asyncio.create_task(station.router.balance())]

            async def handle(event: Event, delivery: Delivery) -> None:
                await self._handle(station, event, delivery)

            context.missing = None
            try:
                await work(
                    context.bus,
                    *subjects.ROLLOUT_EPISODES,
                    handle,
                    stop=context.stopping,
                    concurrency=settings.max_episodes,
                    max_deliver=2 * MAX_DELIVER,  # it is given up here, before that, unless the log cannot be written
                )
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.wait(helpers)

    async def _handle(self, station: Station, event: Event, delivery: Delivery) -> None:
        if not isinstance(event, EpisodeDispatch):
            raise Rejected(f"{type(event).__name__} is no dispatch of an episode")
        if station.stopping.is_set():
            raise RetryLater("this replica stops", 0.0)
        with logs.bound(run=event.run, group=event.group, execution=event.execution):
            if delivery.deliveries >= HOPELESS - 1:
                await self._give_up(station, event, f"delivered {delivery.deliveries} times and never finished")
            try:
                outcome = await self._outcome(station, event)
            except (RetryLater, Rejected, Abandoned):
                raise
            except Exception as error:
                self._failures[event.execution] += 1
                failed = self._failures[event.execution]
                if failed < MAX_DELIVER:
                    raise
                log.exception("%s failed %d times", event.execution, failed)
                await self._give_up(station, event, f"failed {failed} times: {error!r}")
        self._failures.pop(event.execution, None)
        match outcome:
            case Outcome.ENDED:
                return
            case Outcome.STOPPED:
                raise RetryLater("this replica stops", 0.0)
            case Outcome.FENCED:
                raise Abandoned(f"{event.execution} has another writer (delivery {delivery.deliveries})")

    async def _give_up(self, station: Station, dispatch: EpisodeDispatch, why: str) -> NoReturn:
        """End the execution as our failure and make its dispatch a dead letter: raises `Rejected`, or `Abandoned` where
        another replica has it."""
        try:
            await give_up(Runner(station, dispatch).journal, station.sandboxes, dispatch, station.replica, why)
        except FencedError as error:
            raise Abandoned(f"{dispatch.execution} has another writer") from error
        self._failures.pop(dispatch.execution, None)
        raise Rejected(f"{why}; the execution has ended as infra")

    async def _outcome(self, station: Station, dispatch: EpisodeDispatch) -> Outcome:
        live = self._live.get(dispatch.execution)
        if live is not None:
            return await asyncio.shield(live[1])
        runner = Runner(station, dispatch)
        task = asyncio.create_task(runner.run())
        self._live[dispatch.execution] = (runner, task)
        metrics.LIVE_EPISODES.inc()
        try:
            return await task
        finally:
            del self._live[dispatch.execution]
            metrics.LIVE_EPISODES.dec()

    async def _gauge(self, router: Router) -> None:
        while True:
            suspended = sum(runner.suspended for runner, _ in self._live.values())
            self._context.gauges.update(
                live_episodes=len(self._live), suspended_episodes=suspended, calls_in_flight=router.calls_in_flight
            )
            await asyncio.sleep(GAUGES_S)
