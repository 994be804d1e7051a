"""Fixtures that every suite may use: a real NATS server and Valkey on free ports, ended by the test that began them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from opengyre.shared import embedded
from opengyre.shared.bus import Bus, bootstrap

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts its background jobs with SIGINT ignored, and so would be every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A law holds or not; how long an example takes on a shared machine says nothing about it. A failure prints its blob;
# it is not kept on disk, since unit tests write nothing.
settings.register_profile("shared", deadline=None, database=None, print_blob=True)
settings.load_profile("shared")


START_S = 60.0
"""A server is there in a moment, unless the machine is busy."""


class Process:
    """A program that a test starts, kills, freezes and starts again on the same port, which is held for it."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.command = command
        self.port = port
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-2000:]
            time.sleep(0.02)
        raise AssertionError(f"{self.command[0]} did not listen on {self.port}")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGSTOP:  # until the last of its threads has stopped, which may answer meanwhile
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """kill -9, and wait for it to be gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(START_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class NatsServer(Process):
    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(embedded.nats_command(folder, port), port, folder / "nats.log")
        self.url = f"nats://127.0.0.1:{port}"


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with embedded.hold_port() as held:
        server = NatsServer(tmp_path / "nats", held.getsockname()[1])
        server.start()
        yield server
        server.stop()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Process]:
    with embedded.hold_port() as held:
        port, folder = held.getsockname()[1], tmp_path / "valkey"
        server = Process(embedded.valkey_command(folder, port), port, folder / "valkey.log")
        server.start()
        yield server
        server.stop()


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A connection to a server on which the bootstrap has run."""
    async with Bus(nats_server.url, "test") as connection:
        await bootstrap(connection)
        yield connection


@pytest.fixture
def python() -> str:
    return sys.executable
