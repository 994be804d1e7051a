"""The allocator: replicas of which one leads. It owns admission, the staleness ledger and the role of every cell.

States of a replica: standing by -> leading -> standing by. The leader holds a lease in KV, renews it at a third of
its time to live, and alone answers requests. One that loses it (or cannot renew it) ends its term at once; what it
still had in flight is stopped by compare-and-set. A law that does not hold (`LawBrokenError`) stops the service.

Awaits: a replica that stands by tries for the lease every `tick_s`; `_renew` sleeps; a term ends by itself or by the
loss of the lease.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from starlette.routing import BaseRoute

from opengyre.allocator import figures
from opengyre.allocator.answers import Answers
from opengyre.allocator.errors import DeposedError
from opengyre.allocator.term import Term
from opengyre.elastic.ledger import LawBrokenError
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, BusUnavailableError, Lease, LeaseOwner, serving
from opengyre.shared.lifecycle import Context

log = logging.getLogger("gyre.allocator")

LEASE = "leader.allocator"


class Allocator:
    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> Sequence[BaseRoute]:
        return ()

    async def run(self) -> None:
        """Lead whenever the lease is to be had, until the service stops."""
        context = self._context
        bucket = Bucket(context.bus, subjects.KV_LEASES, LeaseOwner)
        while not context.stopping.is_set():
            lease = Lease(bucket, LEASE, context.replica, context.settings.allocator.lease_s)
            figures.show_leader(context, False)
            try:
                if not await self._acquire(lease):
                    return
                figures.show_leader(context, True)
                log.info("leading, fencing token %d", lease.token)
                try:
                    await self._lead(lease)
                finally:
                    await lease.release()
            except DeposedError as error:
                log.warning("the term is over: %s", error)
                await context.pause(context.settings.allocator.tick_s)
            except (BusUnavailableError, TimeoutError) as error:
                log.warning("the term is over: the broker does not answer: %r", error)
                await context.pause(1)
            except LawBrokenError as error:
                log.critical("stopping: %s", error)
                raise

    async def _acquire(self, lease: Lease) -> bool:
        """Stand by until the lease is ours; False when the service stops first."""
        context = self._context
        if await lease.acquire():
            return True
        context.missing = None
        with context.waits.on("the leader's lease (standing by)", lease.ttl_s):
            while await context.pause(context.settings.allocator.tick_s):
                if await lease.acquire():
                    return True
        return False

    async def _lead(self, lease: Lease) -> None:
        context = self._context
        bus = context.bus
        try:
            async with contextlib.AsyncExitStack() as stack:
                hosts = await stack.enter_async_context(Bucket(bus, subjects.KV_HOSTS, HostStatus).view())
                desired = await stack.enter_async_context(Bucket(bus, subjects.KV_DESIRED, DesiredRole).view())
                runs = await stack.enter_async_context(Bucket(bus, subjects.KV_RUNS, RunSpec).view())
                term = Term(context, lease.token, hosts, desired, runs)
                async with asyncio.TaskGroup() as tasks:
                    renewing = tasks.create_task(_renew(lease))
                    await term.load()
                    async with serving(bus, "allocator", "any", Answers(bus, term).endpoints(), "OpenGyre allocator"):
                        await term.run()
                    renewing.cancel()
        except BaseExceptionGroup as faults:
            raise first_cause(faults) from faults


def first_cause(faults: BaseExceptionGroup) -> BaseException:
    """The fault that ended a group of tasks: the first that is no group itself."""
    found: BaseException = faults
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def _renew(lease: Lease) -> None:
    """Keep the lease until cancelled. Raises `DeposedError` when it is another's or could not be kept in time."""
    while True:
        await asyncio.sleep(lease.ttl_s / 3)
        try:
            async with asyncio.timeout(lease.ttl_s * 2 / 3):
                kept = await lease.renew()
        except TimeoutError as error:
            raise DeposedError("the lease could not be renewed in time") from error
        if not kept:
            raise DeposedError("the lease is another's")
