"""The supervisor over real processes: restart, order, bounds, and that nothing outlives it."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import stack as stacks
from opengyre.cli.stack import Lock, Stack, StackError
from opengyre.cli.supervisor import Supervisor
from opengyre.cli.supervisor_child import rotate, tail
from opengyre.cli.supervisor_plan import MARK, Program
from opengyre.cli.supervisor_state import State
from opengyre.proto import subjects
from opengyre.proto.service import ServiceStatus
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.embedded import free_port

LISTEN = """
import signal, socket, sys, time
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(("127.0.0.1", int(sys.argv[1])))
sock.listen()
print("listening", flush=True)
time.sleep(600)
"""


def listener(name: str, *flags: str, stop_s: float = 5.0) -> Program:
    port = free_port()
    command = (sys.executable, "-c", LISTEN, str(port), *flags)
    return Program(name, command, ready="port", port=port, stop_s=stop_s)


@pytest.fixture
async def reports() -> list[str]:
    return []


@pytest.fixture
async def supervisor(tmp_path: Path, reports: list[str]) -> AsyncIterator[Supervisor]:
    async with Supervisor(tmp_path / "logs", reports.append) as it:
        yield it


async def alive(pid: int) -> bool:
    return await asyncio.to_thread(Path(f"/proc/{pid}").exists)


async def gone(pid: int, bound_s: float = 30.0) -> bool:
    deadline = asyncio.get_running_loop().time() + bound_s
    while await alive(pid):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def test_a_killed_process_is_started_again_at_once(supervisor: Supervisor, reports: list[str]) -> None:
    supervisor.start([listener("one")])
    assert await supervisor.wait_ready(["one"], 60) == {}
    child = supervisor.children["one"]
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while child.pid in (first, None):
        await supervisor.changed(5)
    assert await supervisor.wait_ready(["one"], 60) == {}
    assert child.life.restarts == 1
    assert "one was ended by SIGKILL; started again in 0 s" in reports[0]
    assert "listening" in reports[0]  # the end of its log


async def test_a_crash_loop_waits_longer_each_time_and_says_why(supervisor: Supervisor, reports: list[str]) -> None:
    supervisor.start([Program("bad", (sys.executable, "-c", "import sys; sys.exit('no such setting')"))])
    child = supervisor.children["bad"]
    while child.life.failures < 3:
        await supervisor.changed(10)
    assert child.life.state is State.BACKOFF
    assert [line.split("; ")[1].split(" in ")[1] for line in reports] == ["0 s", "0.5 s", "1 s"]
    assert "no such setting" in reports[-1]


async def test_a_program_that_is_missing_is_named(supervisor: Supervisor, reports: list[str]) -> None:
    supervisor.start([Program("absent", ("/no/such/program",))])
    while not reports:
        await supervisor.changed(5)
    assert reports[0].startswith("absent cannot be started")


async def test_a_process_that_does_not_stop_is_killed_after_its_bound(
    supervisor: Supervisor, reports: list[str]
) -> None:
    supervisor.start([listener("deaf", "--deaf", stop_s=0.5)])
    assert await supervisor.wait_ready(["deaf"], 60) == {}
    pid = supervisor.children["deaf"].pid
    assert pid is not None
    async with asyncio.timeout(30):
        await supervisor.stop()
    assert await gone(pid)
    assert "deaf did not end within 0.5 s and is killed" in reports


async def test_a_service_that_gives_no_sign_is_killed_and_started_again(
    supervisor: Supervisor, reports: list[str], bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.cli.supervisor.FROZEN_S", 0.5)
    supervisor.start([Program("mute", (sys.executable, "-c", "import time; time.sleep(600)"))])
    supervisor.follow(bus.url)
    child = supervisor.children["mute"]
    while child.life.restarts == 0:
        await supervisor.changed(10)
    assert reports[0] == "mute gave no sign of life for 0.5 s and is killed"
    assert "mute was ended by SIGKILL" in reports[1]


async def test_readiness_comes_from_the_status_of_the_process(supervisor: Supervisor, bus: Bus) -> None:
    supervisor.start([Program("service", (sys.executable, "-c", "import time; time.sleep(600)"))])
    supervisor.follow(bus.url)
    child = supervisor.children["service"]
    while child.pid is None:
        await supervisor.changed(5)
    bucket = Bucket(bus, subjects.KV_SERVICES, ServiceStatus)
    status = ServiceStatus(service="service", replica="r", pid=child.pid + 1, url="http://x", ready=True)
    await bucket.put("service.r", status)
    assert await supervisor.wait_ready(["service"], 1.5) == {"service": "starting"}  # another process's sign
    lacking = msgspec.structs.replace(status, pid=child.pid, ready=False, missing="host0 loads version 3")
    await bucket.put("service.r", lacking)
    assert await supervisor.wait_ready(["service"], 60) == {}
    assert child.missing == "host0 loads version 3"


async def test_stages_end_one_after_the_other(supervisor: Supervisor) -> None:
    supervisor.start([listener("nats"), listener("gateway"), listener("rollout")])
    assert await supervisor.wait_ready(["nats", "gateway", "rollout"], 60) == {}
    order: list[str] = []
    stopping = asyncio.create_task(supervisor.stop())
    while len(order) < 3:
        order += [n for n, c in supervisor.children.items() if c.life.state is State.DOWN and n not in order]
        await supervisor.changed(0.5)
    await stopping
    assert order == ["gateway", "rollout", "nats"]


def test_killing_the_supervisor_ends_its_children_but_not_what_they_detached(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from opengyre.cli.supervisor import Supervisor
        from opengyre.cli.supervisor_plan import Program

        DETACH = '''
        import subprocess, time
        p = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(p.pid, flush=True)
        time.sleep(600)
        '''.strip()

        async def main():
            async with Supervisor(Path(sys.argv[1]), print) as s:
                s.start([Program("parent", (sys.executable, "-c", DETACH))])
                while s.children["parent"].pid is None or not s.children["parent"].log.stat().st_size:
                    await asyncio.sleep(0.02)
                print(s.children["parent"].pid, s.children["parent"].log.read_text().strip(), flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        parent, detached = map(int, process.stdout.readline().split())
        process.kill()
        process.wait(60)
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/{parent}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{parent}").exists()
        assert Path(f"/proc/{detached}").exists()
    finally:
        os.kill(detached, signal.SIGKILL)


def test_logs_are_rotated_and_only_so_many_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for number in range(6):
        log.write_text(f"run {number}\n")
        rotate(log, keep=2)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x.1.log": "run 5\n", "x.2.log": "run 4\n"}
    assert tail(tmp_path / "x.1.log") == ["run 5"]
    assert tail(tmp_path / "absent.log") == []


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    assert stacks.owner(tmp_path) is None
    with Lock(tmp_path):
        assert stacks.owner(tmp_path) == os.getpid()
        with pytest.raises(StackError, match=r"a stack runs already in .*; `gyre down"), Lock(tmp_path):
            pass
    assert stacks.owner(tmp_path) is None


def test_who_asks_for_the_owner_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that started while `gyre status` asked whether there is one was told that one runs already."""
    monkeypatch.setattr(stacks, "ASKING_S", 60.0)
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, lambda: fcntl.flock(asking, fcntl.LOCK_UN))
        timer.start()
        with Lock(tmp_path):
            assert stacks.owner(tmp_path) == os.getpid()
        timer.join()


def test_a_former_owner_is_not_taken_for_one_that_has_not_written_its_id_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gyre down` ended whatever process had the id by then."""
    with subprocess.Popen(["sleep", "600"]) as other, (tmp_path / "lock").open("w+b") as lock:
        try:
            os.pwrite(lock.fileno(), f"{other.pid}\n".encode(), 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert stacks.owner(tmp_path) is None
            monkeypatch.setattr(stacks, "ASKING_S", 60.0)

            def write() -> None:
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)

            timer = threading.Timer(0.1, write)
            timer.start()
            assert stacks.owner(tmp_path) == os.getpid()
            timer.join()
        finally:
            other.kill()


def test_the_stack_file_is_private_and_damage_is_named(tmp_path: Path) -> None:
    stack = Stack(nats="nats://x", valkey=None, gateway="http://y", api_key="k", state_dir=str(tmp_path))
    stacks.write(tmp_path, stack)
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    assert stacks.read(tmp_path) == stack
    (tmp_path / "stack.json").write_text('{"nats": 1}')
    with pytest.raises(StackError, match=r"stack.json is damaged .*nats"):
        stacks.read(tmp_path)


def test_a_process_is_ours_only_by_its_mark(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(tmp_path)}) as process:
        try:
            deadline = time.monotonic() + 30
            while not stacks.belongs(process.pid, tmp_path) and time.monotonic() < deadline:
                time.sleep(0.01)  # until the exec has happened
            assert stacks.belongs(process.pid, tmp_path)
            assert not stacks.belongs(process.pid, tmp_path / "other")
            assert not stacks.belongs(os.getpid(), tmp_path)
        finally:
            process.kill()
