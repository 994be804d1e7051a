"""What the host says of itself on the bus: its status, renewed and put at once on every change, and its changes.

Invariants: a status is never older than the change that is told with it; changes are told in order, each until the
broker has it. The status has a time to live, so that a host that is gone is LOST; one that was LOST (its process hung,
or the broker did not answer) is told so by `on_lapse` before its next status is made.

Awaits: woken by `changed` or by the heartbeat's interval; the broker's acknowledgements are bounded by the bus.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from opengyre.proto import subjects
from opengyre.proto.host import HostStateChanged, HostStatus
from opengyre.shared.bus import Bucket, Bus, BusError

log = logging.getLogger("gyre.host")

MAX_UNTOLD = 1024


class Reporter:
    def __init__(
        self, bus: Bus, status: Callable[[], HostStatus], on_lapse: Callable[[], None], every_s: float, ttl_s: int
    ) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, subjects.KV_HOSTS, HostStatus)
        self._status = status
        self._on_lapse = on_lapse
        self._clock = asyncio.get_running_loop().time
        self._valid_until = self._clock() + ttl_s
        self._every_s = every_s
        self._ttl_s = ttl_s
        self._changed = asyncio.Event()
        self._untold: deque[HostStateChanged] = deque(maxlen=MAX_UNTOLD)

    @property
    def lapsed(self) -> bool:
        """Whether the time to live of the last status that was told is over."""
        return self._clock() > self._valid_until

    def changed(self, change: HostStateChanged | None = None) -> None:
        """Put the status now, and tell the change."""
        if change is not None:
            self._untold.append(change)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            try:
                await self.tell()
            except BusError as error:
                log.warning("the host's status could not be told: %s", error)
                await asyncio.sleep(self._every_s)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._changed.wait()

    async def tell(self) -> None:
        """Put the status and publish what was not told yet; raises `BusError`."""
        if self.lapsed:
            self._on_lapse()
        status = self._status()
        valid_until = self._clock() + self._ttl_s
        await self._bucket.put(status.host, status, ttl_s=self._ttl_s)
        self._valid_until = valid_until
        while self._untold:
            change = self._untold[0]
            await self._bus.publish(subjects.host(change.host, "state"), change)
            if self._untold and self._untold[0] is change:
                self._untold.popleft()

    async def close(self, timeout_s: float = 2.0) -> None:
        """Tell what is left and take the status away: the host is gone, not LOST."""
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.tell()
                await self._bucket.delete(self._status().host)
