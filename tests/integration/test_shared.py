"""Blobs with a real Valkey, traces through a real broker, and the life of a service as a process."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from opengyre.proto import subjects
from opengyre.proto.examples import DISPATCH
from opengyre.proto.service import ServiceStatus
from opengyre.shared import blobs as blobs_module
from opengyre.shared import tracing
from opengyre.shared.blobs import BlobMissingError, Blobs, Written, reference, write_pieces
from opengyre.shared.bus import Bucket, Bus, work
from opengyre.shared.embedded import free_port, hold_port
from opengyre.shared.settings import CacheSettings

ECHO = """
import asyncio
from starlette.responses import PlainTextResponse
from starlette.routing import Route

class Echo:
    def __init__(self, context):
        self.context = context

    def routes(self):
        async def hello(request):
            return PlainTextResponse("hello")
        return [Route("/hello", hello)]

    async def run(self):
        self.context.missing = None
        with self.context.waits.on("the end", 60):
            await self.context.stopping.wait()
        print("finished", flush=True)
"""


async def test_blobs_survive_the_loss_of_the_cache(tmp_path: Path, valkey) -> None:
    settings = CacheSettings(url=f"redis://127.0.0.1:{valkey.port}")
    async with Blobs(tmp_path, settings) as blobs:
        ref = await blobs.put(b"tokens")
        blobs.path(ref).unlink()
        assert await blobs.get(ref) == b"tokens", "answered by the cache"
        await blobs.put(b"tokens")
        await asyncio.to_thread(valkey.kill)
        assert await blobs.get(ref) == b"tokens", "answered by the file"
        other = await blobs.put(b"more")
        assert await blobs.get(other) == b"more"
        await blobs.discard(other)
        with pytest.raises(BlobMissingError):
            await blobs.get(other)


async def test_a_damaged_or_malformed_blob_is_missing(tmp_path: Path) -> None:
    async with Blobs(tmp_path, CacheSettings()) as blobs:
        ref = await blobs.put(b"tokens")
        blobs.path(ref).write_bytes(b"other")
        with pytest.raises(BlobMissingError, match="damaged"):
            await blobs.get(ref)
        with pytest.raises(BlobMissingError, match="allowed is"):
            await blobs.get("sha256:../../etc/passwd")


async def test_a_damaged_blob_is_made_whole_by_the_next_put(tmp_path: Path) -> None:
    """Else a task whose group is assembled again would meet the damage again, for ever."""
    async with Blobs(tmp_path, CacheSettings()) as blobs:
        ref = await blobs.put(b"tokens")
        blobs.path(ref).write_bytes(b"tok")
        assert await blobs.put(b"tokens") == ref
        assert await blobs.get(ref) == b"tokens"


async def test_a_durable_blob_is_synced_also_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file and the folder that names it; who wrote it first may not have asked for that."""
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)))
    async with Blobs(tmp_path, CacheSettings()) as blobs:
        ref = await blobs.put(b"tokens", durable=False)
        assert synced == []
        await blobs.put(b"tokens")
    path = blobs.path(ref)
    assert synced == [str(path), str(path.parent)]


async def test_what_is_written_piece_by_piece_is_a_blob_like_any_other(
    tmp_path: Path, valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 100

    async def write(path: Path) -> Written:
        return await asyncio.to_thread(write_pieces, path, (content[:10], memoryview(content)[10:10], content[10:]))

    monkeypatch.setattr(blobs_module, "SLICE", 1000)
    async with Blobs(tmp_path / "blobs", CacheSettings(url=f"redis://127.0.0.1:{valkey.port}")) as blobs:
        written = await blobs.put_by(write, durable=False)
        assert written == Written(reference(content), len(content))
        path = blobs.path(written.reference)
        assert path.read_bytes() == content
        assert [file for file in (tmp_path / "blobs").rglob("*") if file.is_file()] == [path]
        path.unlink()
        assert await blobs.get(written.reference) == content, "answered by the cache: it is small"


@pytest.mark.parametrize("end", [OSError("the disk is full"), None])
async def test_what_was_not_written_to_its_end_leaves_nothing(tmp_path: Path, end: OSError | None) -> None:
    began = asyncio.Event()

    async def write(path: Path) -> Written:
        await asyncio.to_thread(path.write_bytes, b"half")
        began.set()
        if end is not None:
            raise end
        await asyncio.sleep(60)
        raise AssertionError

    async with Blobs(tmp_path, CacheSettings()) as blobs:
        putting = asyncio.create_task(blobs.put_by(write))
        await asyncio.wait_for(began.wait(), 30)
        if end is None:
            putting.cancel()
        with pytest.raises(asyncio.CancelledError if end is None else OSError):
            await putting
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_a_trace_goes_through_the_bus(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    stop = asyncio.Event()

    async def handler(_event: object, _delivery: object) -> None:
        stop.set()

    with tracing.span("submit") as span:
        await bus.publish(subjects.episode_dispatch("r"), DISPATCH)
        trace_id = span.get_span_context().trace_id
    await asyncio.wait_for(work(bus, *subjects.ROLLOUT_EPISODES, handler, stop=stop), 30)
    consumed = [s for s in exporter.get_finished_spans() if s.kind is trace.SpanKind.CONSUMER]
    assert [s.context.trace_id for s in consumed if s.context] == [trace_id]


async def service_process(tmp_path: Path, url: str, **more: str) -> asyncio.subprocess.Process:
    (tmp_path / "echo_service.py").write_text(ECHO)
    code = "from opengyre.shared.lifecycle import main; main('gateway', 'echo_service:Echo')"
    ours = {"PYTHONPATH": str(tmp_path), "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(tmp_path / "state")}
    env = {**os.environ, **ours, **more}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def status_of(bus: Bus) -> ServiceStatus:
    async with Bucket(bus, subjects.KV_SERVICES, ServiceStatus).view() as view, asyncio.timeout(60):
        while not any(status.ready for status in view.values.values()):
            await view.changed(1)
        return next(iter(view.values.values()))


async def test_a_service_lives_and_ends_in_order(tmp_path: Path, nats_server, bus: Bus) -> None:
    process = await service_process(tmp_path, nats_server.url)
    status = await status_of(bus)
    assert [wait.what for wait in status.waits] == ["the end"]
    async with httpx.AsyncClient(base_url=status.url) as client:
        assert (await client.get("/healthz")).json() == {"alive": True}
        assert (await client.get("/readyz")).json() == {"ready": True, "missing": None}
        assert (await client.get("/hello")).text == "hello"
        assert "gyre_episodes_interrupted_total 0.0" in (await client.get("/metrics")).text
    process.send_signal(signal.SIGTERM)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"finished" in out
    lines = [json.loads(line) for line in err.splitlines()]
    assert {line["service"] for line in lines} == {"gateway"}
    resolved = json.loads((tmp_path / "state" / "settings" / "gateway.json").read_text())
    assert resolved["bus"]["url"] == nats_server.url
    bucket = Bucket(bus, subjects.KV_SERVICES, ServiceStatus)
    assert await bucket.get(f"gateway.{status.replica}") is None, "its heartbeat is withdrawn"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"GYRE_BUS__URI": "x"}, b"there is no key 'uri'"),
        ({"GYRE_HTTP__PORT": "{taken}"}, b"cannot be used"),
    ],
)
async def test_a_service_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, nats_server, bus: Bus, more: dict[str, str], sentence: bytes
) -> None:
    assert bus.connected
    filled = {key: value.format(taken=nats_server.port) for key, value in more.items()}
    process = await service_process(tmp_path, nats_server.url, **filled)
    _out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert sentence in err
    assert b"Traceback" not in err


def test_a_port_that_was_found_is_given_to_nobody_before_its_server_starts() -> None:
    """It was one of those that the kernel gives to whoever asks for any, and to every connection."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low < 22_000:
        pytest.skip("nearly all ports are given by the kernel here")
    assert not any(low <= free_port() <= high for _ in range(20))
    with hold_port() as held:
        address = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        for _ in range(2):  # its server starts, and starts again
            with socket.create_server(address), socket.create_connection(address):
                pass


def test_status_is_json_that_people_can_read() -> None:
    status = ServiceStatus(service="s", replica="r", pid=1, url="u", ready=True)
    assert msgspec.json.decode(msgspec.json.encode(status), type=ServiceStatus) == status
