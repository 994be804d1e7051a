"""`gyre sandbox exec` where the service dies under it, and where whoever typed it has had enough."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from opengyre.proto.sandbox import DestroyRequest, DestroyResult, ExecRequest, ExecResult, SandboxRef, SandboxSpec
from opengyre.proto.sandbox_jobs import JobStatus, PollRequest
from opengyre.shared.bus import Bus, call
from support import eventually
from support.gyre_command import Gyre
from support.sandboxes import needs_sandboxes

pytestmark = [pytest.mark.sandbox, needs_sandboxes]
NAME = f"execution-{'0123456789' * 8}"


class Node:
    """Node `n5` with one sandbox of a long name, and a service that can be killed and started again."""

    def __init__(self, gyre: Gyre, log: Path) -> None:
        self.gyre = gyre
        self.log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        mine = {
            "GYRE_BUS__URL": self.gyre.url, "GYRE_STATE_DIR": str(self.gyre.state), "GYRE_SANDBOX__NODE": "n5",
        }  # fmt: skip
        command = [sys.executable, "-m", "opengyre.sandbox"]
        with self.log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, **mine}, stdout=out, stderr=out
            )

    async def end(self, how: signal.Signals) -> int:
        assert self.process is not None, "start() makes it"
        self.process.send_signal(how)
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def typed(self, *arguments: str) -> asyncio.subprocess.Process:
        """`gyre sandbox`, as a process."""
        environment = {**os.environ, "GYRE_BUS__URL": self.gyre.url, "GYRE_STATE_DIR": str(self.gyre.state)}
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "opengyre.cli", "sandbox", *arguments), env=environment, stdout=pipe, stderr=pipe
        )


@pytest.fixture
async def node(bus: Bus, nats_server, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(Gyre(nats_server.url, tmp_path / "state"), tmp_path / "service.log")
    await made.start()
    spec = SandboxSpec(sandbox=NAME, owner="o" * 60, labels={"run": "r" * 60})
    await call(bus, "sandbox", "any", "create", spec, SandboxRef, timeout_s=20, patience_s=60)
    yield made
    await call(bus, "sandbox", "n5", "destroy", DestroyRequest(sandbox=NAME), DestroyResult)
    assert await made.end(signal.SIGTERM) == 0, made.log.read_text()[-3000:]


def runs(bus: Bus, exec_id: str, *, running: bool) -> Callable[[], object]:
    """Whether a command of the sandbox is there and runs, or has ended."""

    async def look() -> bool:
        try:
            status = await call(bus, "sandbox", "n5", "poll", PollRequest(sandbox=NAME, exec_id=exec_id), JobStatus)
        except Exception as error:
            if "allowed is one of a command" in str(error):
                return False
            raise
        return status.running is running

    return look


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_service_that_ends_under_a_command_is_asked_again_for_what_it_did(
    node: Node, bus: Bus, how: signal.Signals
) -> None:
    text = "echo once >>count; while [ ! -e go ]; do sleep 0.1; done; cat count"
    process = await node.typed("exec", "--id", "long", "--timeout", "200", NAME, text)
    await eventually(runs(bus, "long", running=True))
    await node.end(how)
    await node.start()
    touch = ExecRequest(sandbox=NAME, exec_id="touch", command="touch go", timeout_s=10)
    await call(bus, "sandbox", "n5", "exec", touch, ExecResult, timeout_s=20, patience_s=90)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, out) == (0, b"once\n"), err
    assert b"node n5 does not answer; asking it again for long" in err or not err


async def test_a_service_that_does_not_come_back_is_given_up_when_the_commands_time_is_over(
    node: Node, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.cli.sandbox_exec.MARGIN_S", 0.5)
    monkeypatch.setattr("opengyre.cli.sandbox_exec.ATTEMPT_S", 0.4)
    typed = asyncio.ensure_future(node.gyre("sandbox", "exec", "--id", "lost", "--timeout", "5", NAME, "sleep 60"))
    await eventually(runs(bus, "lost", running=True))
    await node.end(signal.SIGKILL)
    status, out, said = await asyncio.wait_for(typed, 60)
    assert (status, out) == (1, "")
    assert "node 'n5' does not answer, lost may have run" in said
    assert f"`gyre sandbox logs {NAME} lost` has its output" in said
    await node.start()


async def test_an_interruption_ends_the_command_and_says_so(node: Node, bus: Bus) -> None:
    process = await node.typed("exec", "--id", "mine", "--timeout", "200", NAME, "echo begun; sleep 49 & sleep 50")

    async def begun() -> bool:
        return (await node.gyre("sandbox", "logs", NAME, "mine"))[1] == "begun\n"

    await eventually(begun)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err
    assert out == b""
    assert err.decode() == f"interrupted; command mine was ended, `gyre sandbox logs {NAME} mine` has its output\n"
    status = await call(bus, "sandbox", "n5", "poll", PollRequest(sandbox=NAME, exec_id="mine"), JobStatus)
    assert status.result is not None
    assert status.result.killed_by == "kill"
    assert await begun(), "what it wrote is still there"


async def test_an_interruption_while_no_service_answers_says_when_the_command_ends(node: Node, bus: Bus) -> None:
    process = await node.typed("exec", "--id", "alone", "--timeout", "30", NAME, "sleep 60")
    await eventually(runs(bus, "alone", running=True))
    await node.end(signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err
    assert b"interrupted; command alone could not be ended" in err
    assert b"it is killed after its 30 s" in err
    await node.start()


async def test_ids_and_labels_are_whole_in_a_pipe(node: Node) -> None:
    _, shown, _ = await node.gyre.program("sandbox", "ls")
    (line,) = [line for line in shown.splitlines() if NAME in line]
    assert f"run={'r' * 60}" in line
    assert "o" * 60 in line
    assert "…" not in shown
