"""Stacks that several suites begin with; a module with a `stack` of its own has that."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto import subjects
from opengyre.proto.service import ServiceStatus
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.processes import process
from support.rollout_fakes import Stack


@pytest.fixture
async def bare(bus: Bus, nats_server: Any, tmp_path: Path) -> Stack:
    """A run and its model, and no sandboxes."""
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    return made


@pytest.fixture
async def stack(bare: Stack) -> AsyncIterator[Stack]:
    """With a node of sandboxes that run nothing."""
    async with bare.sandboxes.up():
        yield bare


@pytest.fixture
async def host_stack(bare: Stack) -> AsyncIterator[Stack]:
    """With the sandbox service, where this machine stands in for any base."""
    with process(bare, "sandbox", SANDBOX__STAND_IN="host") as running:
        async with Bucket(bare.bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
            await eventually(lambda: running.pid in {s.pid for s in services.values.values() if s.ready}, 120)
        yield bare
