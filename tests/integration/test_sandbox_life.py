"""Leases, failures on the way, and what is left behind: counted on the system itself."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.sandbox import ExecRequest, RenewRequest, SandboxSpec
from opengyre.sandbox import jail, machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import CannotIsolateError, InfraError, InvalidRequest, SandboxBusy, SandboxGone, Spec
from opengyre.sandbox.discard import discard
from opengyre.sandbox.manager import Manager

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]
DEFAULTS = Spec(sandbox="", workspace_mb=4, memory_mb=128, pids=32)


async def until(condition: Callable[[], bool], bound_s: float = 30.0) -> None:
    """What is waited for is state of the system; it has no event."""
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110 - state of the system, which has no event
            await asyncio.sleep(0.01)


def execs_of(backend: Bubblewrap, sandbox: str) -> Path:
    return backend._home(sandbox, backend._live[sandbox]) / "execs"


class Node:
    """A manager on a folder that can be left as a crash would leave it."""

    def __init__(self, root: Path, max_sandboxes: int = 512) -> None:
        self.backend = Bubblewrap(root)
        self.manager = Manager(self.backend, "n0", DEFAULTS, max_sandboxes)

    def create(self, name: str, **more: object):
        return self.manager.create(SandboxSpec(**({"sandbox": name, "owner": "test"} | more)))  # type: ignore[arg-type]  # fields by keyword, checked at run time

    def exec(self, sandbox: str, exec_id: str, command: str, timeout_s: float = 20.0):
        request = ExecRequest(sandbox=sandbox, exec_id=exec_id, command=command, timeout_s=timeout_s)
        return self.manager.exec(request)

    def marked(self) -> list[str]:
        return [value for _, value in processes._marked() if value.startswith(self.backend.marker(""))]

    def groups(self) -> set[str]:
        return self.backend._groups.names() if self.backend._cgroups is not None else set()

    def folders(self) -> list[str]:
        return [path.name for kind in ("sandboxes", "trash") for path in (self.backend._root / kind).iterdir()]

    def nothing_left(self) -> bool:
        return (self.marked(), self.groups(), self.folders()) == ([], set(), [])

    async def close(self) -> None:
        for info in self.manager.listing({}):
            await self.manager.destroy(info.sandbox)
        await self.manager.stop()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "node")
    await made.manager.start()
    yield made
    await made.close()
    assert made.marked() == []


async def test_create_is_idempotent_also_at_once(node: Node):
    refs = await asyncio.gather(*(node.create("a") for _ in range(5)))
    assert {ref.sandbox for ref in refs} == {"a"}
    assert len(node.marked()) == 1


async def test_exec_runs_once_for_its_id_also_at_once(node: Node):
    await node.create("a")
    results = await asyncio.gather(
        *(node.exec("a", "e", "echo x >> count; sleep 0.2; wc -l < count") for _ in range(5))
    )
    assert {done.stdout for done in results} == {"1\n"}
    assert len(set(results)) == 1
    with pytest.raises(InvalidRequest, match="another command"):
        await node.exec("a", "e", "echo other")


async def test_a_cancelled_caller_finds_its_command_again(node: Node):
    await node.create("a")
    first = asyncio.ensure_future(node.exec("a", "e", "echo x >> count; sleep 0.4; cat count"))
    await asyncio.sleep(0.15)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert (await node.exec("a", "e", "echo x >> count; sleep 0.4; cat count")).stdout == "x\n"


class Clock:
    """The manager's clock, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr("opengyre.sandbox.manager._now", lambda: self.time)


async def test_the_lease_ends_a_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    await node.create("short", ttl_s=10)
    await node.create("idle", idle_ttl_s=10)
    await node.create("long")
    clock.time += 9
    await node.exec("short", "e", "true")
    clock.time += 2
    with pytest.raises(SandboxGone, match="lease"):
        await node.exec("short", "e", "true")
    reaping = asyncio.ensure_future(node.manager.reap())
    await until(lambda: len(node.marked()) <= 1)
    reaping.cancel()
    assert [info.sandbox for info in node.manager.listing({})] == ["long"]
    with pytest.raises(SandboxGone):
        await node.exec("idle", "e", "true")


async def test_a_running_command_keeps_an_idle_sandbox_and_renewal_a_short_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock(monkeypatch)
    await node.create("idle", idle_ttl_s=10)
    await node.create("short", ttl_s=10)
    running = asyncio.ensure_future(node.exec("idle", "e", "sleep 0.4; echo ok"))
    await asyncio.sleep(0)
    clock.time += 9
    node.manager.renew(RenewRequest(sandbox="short", ttl_s=60))
    clock.time += 9
    assert await node.manager._due() == []
    assert (await running).stdout == "ok\n"
    assert await node.manager._due() == []
    clock.time += 11
    assert await node.manager._due() == ["idle"]
    clock.time += 60
    assert await node.manager._due() == ["idle", "short"]


async def test_bug_29_renewing_with_less_does_not_shorten(node: Node):
    ref = await node.create("a", ttl_s=60)
    again = node.manager.renew(RenewRequest(sandbox="a", ttl_s=1, owner="next"))
    assert again.expires_in_s > ref.expires_in_s - 1
    assert node.manager.stat("a").owner == "next"
    assert (await node.create("a", ttl_s=1)).expires_in_s > 50


async def test_the_reaper_removes_what_died(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("opengyre.sandbox.manager.LOOK_S", 0.1)
    await node.create("a")
    record = node.backend._live["a"]
    processes.kill(record.pid, record.started)
    reaping = asyncio.ensure_future(node.manager.reap())
    await until(node.nothing_left)
    reaping.cancel()


async def test_bug_34_a_removal_that_fails_is_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch):
    await node.create("a")
    slot = node.backend._live["a"].slot
    monkeypatch.setattr(node.backend._groups, "remove", lambda name: False)
    with pytest.raises(InfraError, match="tried again"):
        await node.manager.destroy("a")
    assert slot is None or slot in node.backend._slots
    monkeypatch.undo()
    reaping = asyncio.ensure_future(node.manager.reap())
    await until(lambda: node.manager.count() == 0)
    reaping.cancel()
    assert node.nothing_left()
    assert slot not in node.backend._slots


async def test_more_than_allowed_is_refused(tmp_path: Path):
    node = Node(tmp_path / "node", max_sandboxes=1)
    await node.manager.start()
    await node.create("a")
    with pytest.raises(SandboxBusy, match="allowed are 1"):
        await node.create("b")
    await node.close()


@pytest.mark.parametrize(
    ("what", "spec"),
    [
        ("files", {"files": {"x" * 300: "name too long"}}),
        ("files", {"files": {"a": "", "a/b": "a file is no folder"}}),
    ],
)
async def test_bug_38_a_creation_that_fails_leaves_nothing(node: Node, what: str, spec: dict):
    with pytest.raises(InvalidRequest, match="cannot be written"):
        await node.create("bad", **spec)
    assert node.nothing_left()
    await node.create("bad")
    assert len(node.marked()) == 1


@pytest.mark.parametrize("word", ["--no-such-option", "--ro-bind", "--info-fd"])
async def test_bug_38_bubblewrap_that_refuses_leaves_nothing(node: Node, word: str, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> list[str]:
        return ["bwrap", word, "/none", "/none", "--", "true"]

    monkeypatch.setattr(jail, "arguments", broken)
    with pytest.raises(InfraError, match="bubblewrap"):
        await node.create("bad")
    assert node.nothing_left()


async def test_bug_42_a_creation_that_is_cancelled_leaves_nothing(node: Node):
    for delay_ms in (0, 1, 2, 4, 6, 8, 10, 12, 15, 20, 25):
        making = asyncio.ensure_future(node.create("c"))
        await asyncio.sleep(delay_ms / 1000)
        making.cancel()
        with suppress(asyncio.CancelledError):
            await making
            await node.manager.destroy("c")
        await until(node.nothing_left)
        await node.create("c")
        assert (await node.exec("c", "e", "echo ok")).stdout == "ok\n"
        await node.manager.destroy("c")


async def test_a_sandbox_that_is_destroyed_while_it_is_made_leaves_nothing(node: Node):
    for delay_ms in (0, 3, 6, 9, 12, 16):
        making = asyncio.ensure_future(node.create("c"))
        await asyncio.sleep(delay_ms / 1000)
        await node.manager.destroy("c")
        with suppress(SandboxGone, InfraError):
            await making
            await node.manager.destroy("c")
        await until(node.nothing_left)
        await node.create("c")
        await node.manager.destroy("c")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has ranges of user ids to give")
async def test_a_range_of_user_ids_is_free_only_when_whose_it_is_gave_it_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """A sandbox that was removed while it was made, and once more when it was, gave back its range twice: the second
    time it was another one's, and a third one got it too.
    """
    asked, go_on = threading.Event(), threading.Event()
    prepare = node.backend._prepare

    def late(*given: Any) -> tuple[str | None, str | None]:
        if not asked.is_set():  # of all threads this one comes to its work last
            asked.set()
            go_on.wait(30)
        return prepare(*given)

    monkeypatch.setattr(node.backend, "_prepare", late)
    making = asyncio.ensure_future(node.create("removed"))
    await asyncio.to_thread(asked.wait, 30)
    await node.manager.destroy("removed")
    await node.create("second")
    go_on.set()
    with pytest.raises((SandboxGone, InfraError)):
        await making
    await node.create("third")
    assert node.backend._live["second"].slot != node.backend._live["third"].slot
    for name in ("second", "third"):
        await node.manager.destroy(name)
    assert not node.backend._slots


async def test_trap_02_a_launcher_that_dies_leaves_no_orphan(node: Node):
    for delay_ms in (1, 4, 7, 10, 13):
        making = asyncio.ensure_future(node.create("c"))
        await asyncio.sleep(delay_ms / 1000)
        launcher = node.backend._launcher._process
        assert launcher is not None
        launcher.kill()
        with suppress(InfraError):
            await making
            await node.manager.destroy("c")
        await until(node.nothing_left)
        await node.create("c")
        assert (await node.exec("c", "e", "echo ok")).stdout == "ok\n"
        await node.manager.destroy("c")


async def test_a_command_outlives_its_launcher(node: Node):
    await node.create("a")
    command = "echo x >> count; until [ -e go ]; do sleep 0.05; done; cat count"
    running = asyncio.ensure_future(node.exec("a", "e", command, 60.0))
    await until((execs_of(node.backend, "a") / "e" / "claim").exists)
    launcher = node.backend._launcher._process
    assert launcher is not None
    launcher.kill()
    assert (await node.exec("a", "e2", "touch go; echo ok")).stdout == "ok\n"
    assert (await running).stdout == "x\n"


async def test_a_command_that_comes_before_the_end_of_the_launcher_is_noticed_finds_another_one(node: Node):
    """It was sent to the dead one twice, and failed."""
    await node.create("a")
    for number in range(5):
        launcher = node.backend._launcher._process
        assert launcher is not None
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop shall not hear of it
        assert (await node.exec("a", f"e{number}", "echo ok")).stdout == "ok\n"


async def test_a_monitor_that_is_killed_is_an_infra_error_and_the_command_not_run_again(node: Node):
    await node.create("a")
    running = asyncio.ensure_future(node.exec("a", "e", "echo x >> count; sleep 99", 100.0))
    claim = execs_of(node.backend, "a") / "e" / "claim"
    await until(claim.exists)
    while (await node.exec("a", f"look{time.monotonic_ns()}", "cat count")).stdout != "x\n":  # noqa: ASYNC110 - state of the system, which has no event
        await asyncio.sleep(0.02)
    os.kill(json.loads(claim.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(InfraError, match="monitor"):
        await running
    with pytest.raises(InfraError, match="monitor"):
        await node.exec("a", "e", "echo x >> count; sleep 99")
    assert (await node.exec("a", "e2", "cat count")).stdout == "x\n"


async def test_a_second_service_on_the_same_folder_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("opengyre.sandbox.owned.LOCK_BOUND_S", 0.2)
    other = Node(node.backend._root)
    with pytest.raises(InfraError, match="another sandbox service uses"):
        await other.manager.start()
    await other.backend.stop()


async def test_a_machine_without_bubblewrap_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "find_bwrap", lambda: None)
    node = Node(tmp_path / "node")
    with pytest.raises(CannotIsolateError, match="bubblewrap is missing: install"):
        await node.manager.start()
    await node.backend.stop()


async def test_without_isolation_commands_run_with_less_rights_and_say_so(tmp_path: Path):
    backend = Bubblewrap(tmp_path / "node", isolated=False)
    manager = Manager(backend, "n0", DEFAULTS)
    await manager.start()
    assert any("nothing is isolated" in sentence for sentence in backend.unenforced())
    ref = await manager.create(SandboxSpec(sandbox="p", owner="test", files={"a/b": "x"}))
    assert not ref.isolated

    async def run(exec_id: str, command: str, timeout_s: float = 10.0):
        return await manager.exec(ExecRequest(sandbox="p", exec_id=exec_id, command=command, timeout_s=timeout_s))

    done = await run("e1", "cat a/b; echo; id -u; (setsid sleep 71 &)")
    assert (done.isolated, done.exit_code) == (False, 0)
    assert done.stdout.split() == ["x", "65534" if os.geteuid() == 0 else str(os.getuid())]
    assert (await run("e2", "sleep 72 & sleep 73", timeout_s=0.3)).timed_out
    assert (await manager.read("p", "a/b", 10)) == b"x"
    if os.geteuid() == 0:
        await run("e3", f"ln -s {tmp_path}/secret link")
        (tmp_path / "secret").write_text("s3cret")
        (tmp_path / "secret").chmod(0o600)
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await manager.read("p", "link", 100)
    await manager.destroy("p")
    await manager.stop()
    assert [value for _, value in processes._marked() if value.startswith(backend.marker(""))] == []
    assert not backend._plain("p").exists()


HOST = """
import asyncio, sys
from pathlib import Path
from typing import Any
from opengyre.proto.sandbox import ExecRequest, SandboxSpec
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Spec
from opengyre.sandbox.manager import Manager

async def main():
    manager = Manager(Bubblewrap(Path(sys.argv[1])), "n0", Spec(sandbox="", workspace_mb=4, memory_mb=128, pids=32))
    await manager.start()
    async def one(name):
        await manager.create(SandboxSpec(sandbox=name, owner="test", ttl_s=float(sys.argv[2])))
        await manager.exec(ExecRequest(sandbox=name, exec_id="e", command="echo x >> count; sleep 1.2; cat count"))
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(one(f"k{number}"))

asyncio.run(main())
"""


def crash(root: Path, after_s: float, ttl_s: float) -> None:
    """A service that makes sandboxes and runs commands, killed after so long."""
    process = subprocess.Popen([sys.executable, "-c", HOST, str(root), str(ttl_s)], stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (root / "sandboxes").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(after_s)
    process.kill()
    process.wait(10)


@pytest.mark.parametrize("after_s", [0.08, 0.15, 0.3, 0.6])
async def test_bug_23_a_killed_service_takes_up_what_lives_and_leaks_nothing(tmp_path: Path, after_s: float):
    root = tmp_path / "node"
    await asyncio.to_thread(crash, root, after_s, 600.0)
    node = Node(root)
    await node.manager.start()
    names = {info.sandbox for info in node.manager.listing({})}
    assert {value.split(".")[1] for value in node.marked()} == names
    assert node.groups() == names
    for name in names:
        # Taken up where it runs, begun where it did not get so far: once in each case.
        done = await node.exec(name, "e", "echo x >> count; sleep 1.2; cat count")
        assert (done.stdout, done.exit_code) == ("x\n", 0)
        assert (await node.exec(name, "after", "wc -l < count")).stdout == "1\n"
    await node.close()
    assert node.marked() == []
    assert node.folders() == []


async def test_bug_22_what_a_killed_service_left_goes_when_its_lease_is_over(tmp_path: Path):
    root = tmp_path / "node"
    await asyncio.to_thread(crash, root, 0.6, 1.0)
    node = Node(root)
    await node.manager.start()
    reaping = asyncio.ensure_future(node.manager.reap())
    await until(node.nothing_left)
    reaping.cancel()
    await node.close()


def test_what_is_written_into_a_folder_while_it_is_removed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command's watcher writes down its end: the folder stayed until the next start of the service."""
    folder, remove, late = tmp_path / "gone", shutil.rmtree, iter(["exit.json"])
    folder.mkdir()

    def raced(path: Path, *, ignore_errors: bool) -> None:
        remove(path, ignore_errors=ignore_errors)
        for name in late:
            path.mkdir()
            (path / name).touch()
            return

    monkeypatch.setattr(shutil, "rmtree", raced)
    discard(folder)
    assert not folder.exists()
