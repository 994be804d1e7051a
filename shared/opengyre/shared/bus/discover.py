"""Which services are on the bus: the discovery of NATS micro (`nats micro ls`).

Awaits: answers, of which there is no last one: the first that is looked for has `FIRST_S`, each other one a moment
after the one before it; all of them `BOUND_S`. Where nobody at all listens the broker says so at once.
"""

import asyncio
import contextlib

import msgspec
import nats.errors

from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.promptly import promptly

PING = "$SRV.PING"
FIRST_S = 2.0
"""A service that is busy answers later than in a moment, and to be there is all that is asked of it."""
QUIET_S = 0.5
BOUND_S = 5.0
NOBODY = "503"


class _Ping(msgspec.Struct):
    name: str


async def discover(bus: Bus, prefix: str) -> list[str]:
    """Names of the services that begin with `prefix`, each once, sorted; none where none answers in `FIRST_S`."""
    inbox = bus.client.new_inbox()
    subscription = await promptly(bus.client.subscribe(inbox))
    found: set[str] = set()
    try:
        await promptly(bus.client.publish(PING, b"", reply=inbox))
        with contextlib.suppress(TimeoutError, nats.errors.TimeoutError):
            async with asyncio.timeout(BOUND_S):
                moment = FIRST_S
                while True:
                    message = await promptly(subscription.next_msg(timeout=moment))
                    if (message.headers or {}).get("Status") == NOBODY:
                        break
                    with contextlib.suppress(msgspec.DecodeError):  # of somebody else's, who may say what he likes
                        found.add(msgspec.json.decode(message.data, type=_Ping).name)
                    moment = QUIET_S if any(name.startswith(prefix) for name in found) else FIRST_S
    finally:
        with contextlib.suppress(nats.errors.Error):
            await promptly(subscription.unsubscribe())
    return sorted(name for name in found if name.startswith(prefix))
