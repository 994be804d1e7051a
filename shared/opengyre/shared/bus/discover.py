"""Which services are on the bus: the discovery of NATS micro (`nats micro ls`).

Awaits: answers, of which there is no last one; the end of a moment without any, or the bound.
"""

import asyncio
import contextlib

import msgspec
import nats.errors

from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.promptly import promptly

PING = "$SRV.PING"
QUIET_S = 0.3
BOUND_S = 3.0


class _Ping(msgspec.Struct):
    name: str


async def discover(bus: Bus, prefix: str) -> list[str]:
    """Names of the services that begin with `prefix`, each once, sorted; none where nobody answers within a moment."""
    inbox = bus.client.new_inbox()
    subscription = await promptly(bus.client.subscribe(inbox))
    found: set[str] = set()
    try:
        await promptly(bus.client.publish(PING, b"", reply=inbox))
        with contextlib.suppress(TimeoutError, nats.errors.TimeoutError):
            async with asyncio.timeout(BOUND_S):
                while True:
                    message = await promptly(subscription.next_msg(timeout=QUIET_S))
                    with contextlib.suppress(msgspec.DecodeError):  # of somebody else's, who may say what he likes
                        found.add(msgspec.json.decode(message.data, type=_Ping).name)
    finally:
        with contextlib.suppress(nats.errors.Error):
            await promptly(subscription.unsubscribe())
    return sorted(name for name in found if name.startswith(prefix))
