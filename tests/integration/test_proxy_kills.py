"""Law 1 with hosts of their own processes: what a killed host had sampled is kept, and another one goes on after it."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from opengyre.proto import ids, subjects
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.traj import Call, Suspended
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared.bus import Bucket, Bus
from support import eventually
from support.processes import process, publish_version
from support.rollout_fakes import Stack, dispatch

SEED = 9


async def answer(service: str, folder: Path, execution: str, once: Callable[[], Awaitable[None]] | None = None) -> str:
    """The streamed text of a call; `once` is awaited when there are some characters."""
    key = Endpoints(load_secret(folder / "state")).key(execution)
    body = {"model": "r", "messages": [{"role": "user", "content": "write"}], "stream": True}
    text = ""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(f"{service}/x/{execution}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
            if once is not None and len(text) > 10:
                await once()
                once = None
    assert once is None, "it ended before anything could be done to its host"
    return text


@contextlib.contextmanager
def slowed(process: "subprocess.Popen[bytes]", share: float) -> Iterator[None]:
    """Let a process run for that share of the time only; by a program of its own, however busy this one is."""
    script = "while kill -CONT $1 && sleep $2 && kill -STOP $1; do sleep 0.1; done 2>/dev/null"
    command = ["sh", "-c", script, "sh", str(process.pid), str(0.1 * share / (1 - share))]
    with subprocess.Popen(command) as slowing:
        try:
            yield
        finally:
            slowing.kill()
            process.send_signal(signal.SIGCONT)


@pytest.mark.torch
@pytest.mark.parametrize("engine", ["tiny", "emulated"])
async def test_a_call_whose_host_is_killed_goes_on_with_its_tokens(
    bus: Bus, nats_server: Any, tmp_path: Path, engine: str
) -> None:
    """The host that is killed is slow, so that it is under its call for as long as it takes us to kill it."""
    stack = Stack(bus, tmp_path, nats_server.url)
    await stack.prepare()
    await publish_version(stack)
    stack.sandboxes.delay_s = 600
    # An untrained policy may end its turn at any token; under this seed it says much before it does.
    base = msgspec.structs.replace(dispatch(agent="program", program="wait", max_tokens=300, streams="live"), seed=SEED)
    base = msgspec.structs.replace(base, harness=msgspec.structs.replace(base.harness, time_budget_s=240.0))
    calm = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 0))
    moved = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 1))
    with contextlib.ExitStack() as processes:

        def start(name: str, tokens_per_s: str) -> "subprocess.Popen[bytes]":
            settings = {"HOST__ENGINE": engine, "HOST__TOKENS_PER_S": tokens_per_s, "HOST__HEARTBEAT_S": "0.1"}
            return processes.enter_context(process(stack, "host", HOST__HOST=name, **settings))

        async def change_hosts() -> None:
            first.kill()
            start("h1", "1000")

        first = start("h0", "30")
        async with (
            Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
            stack.sandboxes.up(),
            stack.service() as service,
        ):
            await eventually(lambda: [h.state for h in hosts.values.values()] == [HostState.ROLLOUT], 60)
            await stack.submit(calm)
            await stack.submit(moved)
            await eventually(lambda: len(stack.sandboxes.ran) == 2)
            with slowed(first, 0.2) if engine == "tiny" else contextlib.nullcontext():
                text = await answer(service.url, tmp_path, moved.execution, change_hosts)
            whole = await answer(service.url, tmp_path, calm.execution)
            logs = [await stack.log(episode) for episode in (calm, moved)]
    [one], [two] = ([event for event in log if isinstance(event, Call)] for log in logs)
    assert text == whole
    assert two.sampled_ids == one.sampled_ids
    assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert two.versions == one.versions
    assert (one.hosts, two.hosts) == (("h1",), ("h0", "h1")), "each sampled some of it"
    assert two.parked_s > 0
    assert any(isinstance(event, Suspended) for event in logs[1])
