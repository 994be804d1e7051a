"""The host as a process: killed, it is LOST; told to end, it hands its calls over."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import WeightsPublished
from opengyre.shared.bus import Bucket, Bus
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import write_version
from support import eventually
from support.running_host import reached

pytestmark = pytest.mark.torch


class Program:
    def __init__(self, python: str, url: str, folder: Path) -> None:
        self.folder = folder
        self.command = [python, "-m", "opengyre.host"]
        self.environment = os.environ | {
            "GYRE_BUS__URL": url,
            "GYRE_STATE_DIR": str(folder),
            "GYRE_HOST__HOST": "host0",
            "GYRE_HOST__HEARTBEAT_S": "0.2",
            "GYRE_HOST__LOST_AFTER_S": "4",
            "GYRE_HOST__CAPACITY": "8",
            "OMP_NUM_THREADS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "host.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(60)


@pytest.fixture
def program(python: str, nats_server, tmp_path: Path) -> Iterator[Program]:
    program = Program(python, nats_server.url, tmp_path)
    program.start()
    yield program
    if program.process is not None and program.process.poll() is None:
        program.process.kill()
        program.process.wait(10)


async def publish(bus: Bus, root: Path) -> None:
    model = TinyModel(TinyConfig(vocab_size=64), seed=1)
    save_pretrained(model, root / "config")
    extra = {"config.json": (root / "config" / "config.json").read_bytes()}
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    manifest = write_version(tensors, root / "v0", run="r", version=0, parent=None, step=0, extra=extra)
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("r", RunSpec(run="r", model="unused"))
    await bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))


async def call(http: aiohttp.ClientSession, url: str, number: int) -> dict | None:
    """None where the host no longer takes it."""
    sampling = {"max_tokens": 400, "seed": number}
    body = {"request_id": f"c{number}", "token_ids": [5, 6, 7], "sampling_params": sampling}
    async with http.post(f"{url}/inference/v1/generate", json=body) as response:
        assert response.status in (200, 503)
        return (await response.json())["choices"][0] if response.status == 200 else None


async def test_a_killed_host_is_lost_comes_back_to_its_level_and_hands_over_when_told_to_end(
    bus: Bus, program: Program, tmp_path: Path
) -> None:
    statuses = Bucket(bus, subjects.KV_HOSTS, HostStatus)
    desired = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
    await publish(bus, tmp_path)
    await desired.put("host0", DesiredRole(host="host0", role="train", epoch=1))
    before = await reached(statuses, "host0", HostState.TRAIN)
    program.send(signal.SIGKILL)
    await asyncio.to_thread(program.wait)

    async def gone() -> bool:
        return await statuses.get("host0") is None

    await eventually(gone)
    program.start()
    after = await reached(statuses, "host0", HostState.TRAIN, before.boot)
    assert (after.epoch, after.memory_bytes) == (1, 0)
    await desired.put("host0", DesiredRole(host="host0", role="rollout", epoch=2))
    status = await reached(statuses, "host0", HostState.ROLLOUT)

    async def busy() -> bool:
        found = await statuses.get("host0")
        return found is not None and found[0].running >= 40

    async with aiohttp.ClientSession() as http:
        # Eight at a time, so that many are there still when it is told to end. A status is a heartbeat old, and some
        # may not have come in yet.
        calls = [asyncio.create_task(call(http, status.url, n)) for n in range(64)]
        await eventually(busy)
        program.send(signal.SIGTERM)
        parts = await asyncio.gather(*calls)
    reasons = {part["finish_reason"] for part in parts if part is not None}
    assert "abort" in reasons
    assert reasons <= {"abort", "length"}
    assert await asyncio.to_thread(program.wait) == 0
    await eventually(gone)
