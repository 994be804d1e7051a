"""`python -m opengyre.shared.bus.bootstrap`: make every stream, consumer and bucket, or fail on drift."""

import asyncio
import sys

from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.errors import BusError
from opengyre.shared.bus.topology import bootstrap
from opengyre.shared.settings import SettingsError, load


async def run() -> None:
    settings = load()
    async with Bus(settings.bus.url, "bootstrap") as bus:
        made = await bootstrap(bus, settings.bus.replicas)
    print(f"made {len(made)}: {', '.join(made)}" if made else "all streams, consumers and buckets are there")


def main() -> None:
    try:
        asyncio.run(run())
    except (BusError, SettingsError) as error:
        sys.exit(f"bootstrap: {error}")
    except TimeoutError:
        sys.exit("bootstrap: the NATS server does not answer; set bus.url (GYRE_BUS__URL) to its address")


if __name__ == "__main__":
    main()
