"""What the episodes of one replica share."""

import asyncio
from dataclasses import dataclass

import aiohttp

from opengyre.rollout.endpoint import Endpoints
from opengyre.rollout.models import Models
from opengyre.rollout.router import Router
from opengyre.rollout.sandboxes import Sandboxes
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus
from opengyre.shared.waits import Waits


@dataclass(frozen=True)
class Station:
    bus: Bus
    blobs: Blobs
    waits: Waits
    replica: str
    url: str
    """Base URL of this replica's HTTP side."""
    session: aiohttp.ClientSession
    sandboxes: Sandboxes
    router: Router
    endpoints: Endpoints
    models: Models
    stopping: asyncio.Event
