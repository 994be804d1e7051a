"""Traps of sandboxes and bugs that others met, each with a test: the ones that no other module of the suite has, and an
index of all of them.

A trap is `test_trap_NN_*`; a bug is `test_row_NN_*` or, where it was there before, `test_bug_NN_*`.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.sandbox import processes
from opengyre.sandbox.core import ExecTimeout, InfraError, InvalidRequest, SandboxError, Spec
from support import eventually
from support.sandboxes import Node, attached, names_of_tests, needs_sandboxes, node

pytestmark = [pytest.mark.sandbox, needs_sandboxes]
SMALL = Spec(sandbox="", workspace_mb=4, memory_mb=128, pids=32)
SMALL_S = Spec(sandbox="s", workspace_mb=4, memory_mb=128, pids=32)

TRAPS = range(1, 16)
ROWS = range(1, 43)
SAME = {
    "row_05": "trap_05",  # a background child that keeps stdout
    "row_07": "trap_05",  # the same in Python's own wait
    "row_17": "trap_15",  # zombies
    "row_21": "trap_01",  # an inherited environment
    "row_32": "row_33",  # a network of Docker's for each: there are none, however many at once
    "trap_08": "row_05",  # the same in Docker's exec
}
"""Bugs and traps that are another one by another name."""
NOT_OURS = {
    "row_37": "no terminal multiplexer is in the path of control: commands are processes, their ends pidfds",
}
"""What cannot happen here, and why."""


def test_every_trap_and_every_bug_has_a_test() -> None:
    found = {
        f"{'trap' if match[1] == 'trap' else 'row'}_{match[2]}"
        for name in names_of_tests(Path(__file__).parents[1])
        if (match := re.match(r"test_(trap|row|bug)_(\d\d)_", name))
    }
    wanted = {f"trap_{number:02}" for number in TRAPS} | {f"row_{number:02}" for number in ROWS}
    assert wanted - found - set(SAME) - set(NOT_OURS) == set()
    assert set(SAME.values()) <= found | set(SAME)
    assert not found & set(NOT_OURS)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path / "node", SMALL) as made:
        await made.create()
        yield made


# Traps


async def test_trap_07_a_hundred_open_streams_hold_nothing_up(tmp_path: Path) -> None:
    """A stand-in for the engine answers what it is and holds all else open: each running command is such a stream."""
    pytest.importorskip("aiodocker", reason="the client of the Docker backend is not installed")
    from aiohttp import web

    from opengyre.sandbox.docker_engine import Engine

    held, release = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal held
        if not request.path.endswith(("/info", "/version")):
            held += 1
            await release.wait()
        return web.json_response({"ApiVersion": "1.41", "Name": "stand-in"})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    engine = Engine(tmp_path / "socket")
    try:
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        await engine.open()
        streams = [asyncio.ensure_future(engine.state(f"c{number}")) for number in range(150)]
        await eventually(lambda: held == 150)
        async with asyncio.timeout(30):
            assert (await engine.docker.system.info())["Name"] == "stand-in"
        release.set()
        await asyncio.gather(*streams)
    finally:
        release.set()
        await engine.close()
        await runner.cleanup()


async def test_trap_09_a_child_that_memory_ended_is_told(tmp_path: Path) -> None:
    """Not by the command's own status: a child dies, the command goes on."""
    async with node(tmp_path / "node", Spec(sandbox="", workspace_mb=1, memory_mb=32, pids=32)) as box:
        if not box.backend.capabilities().memory_limit:
            pytest.skip("memory of a sandbox cannot be limited as a whole here")
        await box.create()
        assert not (await box.run("true")).oom
        done = await box.run("head -c 200m /dev/zero | tail -c 150m > /dev/null; echo after")
        assert done.stdout == "after\n"
        assert done.oom
        assert not (await box.run("true")).oom, "it is told of the command that it happened to"


async def test_trap_12_no_tool_of_the_sandbox_is_relied_upon(tmp_path: Path) -> None:
    """Nothing but a shell: no ps, no kill, no tar, no sleep on its PATH."""
    async with node(tmp_path / "node", SMALL) as box:
        await box.create(env={"PATH": "/nonexistent"}, files={"in.txt": "x"})
        assert (await box.run("ls")).exit_code == 127
        assert (await box.run("while :; do :; done & while :; do :; done", timeout_s=0.3)).timed_out
        await box.manager.write("s", "a/b", b"y", 0o644)
        assert await box.manager.read("s", "a/b", 10) == b"y"
        verdict = await box.verify("read x < in.txt; read y < a/b; [ $x$y = xy ]", mode="separate")
        assert verdict.parts[0].passed == 1.0


# Bugs


async def test_row_04_a_command_that_was_killed_does_nothing_more(box: Node) -> None:
    await box.backend.spawn(SMALL_S, "job", "until [ -e go ]; do sleep 0.05; done; touch P", 60.0, 1000)
    assert (await box.backend.poll("s", "job")).running
    await box.backend.kill("s", "job")
    ended = await box.backend.poll("s", "job")
    assert not ended.running
    assert ended.result is not None
    assert (ended.result.exit_code, ended.result.killed_by) == (None, "kill")
    assert (await box.run("touch go; sleep 0.5; ls")).stdout == "go\n"


async def test_row_10_no_prompt_and_no_startup_file_is_read(tmp_path: Path) -> None:
    noise = "echo noise; PS1='% '; exit 3\n"
    names = (".bashrc", ".profile", ".bash_profile", ".shrc", ".zshrc")
    async with node(tmp_path / "node", SMALL) as box:
        await box.create(
            env={"PS1": "(base) $ ", "PROMPT_COMMAND": "echo prompt", "ENV": "/workspace/.shrc"},
            files=dict.fromkeys(names, noise),
        )
        done = await box.run("echo ok")
        assert (done.stdout, done.stderr, done.exit_code) == ("ok\n", "", 0)


def resident_kb(*, anew: bool = False) -> int:
    """Most memory that this process has had, since it was last asked to count ``anew``."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_row_14_two_gigabytes_of_output_stay_out_of_memory(box: Node) -> None:
    await box.run("true")
    before = resident_kb(anew=True)
    done = await box.run("head -c 2G /dev/zero; echo after", timeout_s=30.0)
    assert resident_kb() - before < 20 << 10
    assert (done.killed_by, done.stdout_truncated) == ("output", True)
    assert done.stdout_bytes >= 16 << 20
    assert "after" not in done.stdout


async def test_row_16_a_deadline_covers_every_phase(box: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the time before a command runs: what would start it does not answer."""
    monkeypatch.setattr("opengyre.sandbox.launcher.REPLY_BOUND_S", 0.5)
    launcher = box.backend._launcher._process
    assert launcher is not None
    launcher.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(15):
        with pytest.raises(ExecTimeout, match="did not answer"):
            await box.run("true")
    launcher.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    # And a standard input that is never closed: there is none.
    assert (await box.run("cat /dev/stdin; read line || echo closed", timeout_s=10.0)).stdout == "closed\n"


async def test_row_19_the_size_is_held(box: Node) -> None:
    done = await box.run(
        "head -c 8M /dev/zero > big; stat -c %s big; head -c 8M /dev/zero > /tmp/big; stat -c %s /tmp/big"
    )
    sizes = [int(size) for size in done.stdout.split()]
    assert len(sizes) == 2
    assert all(3 << 20 < size <= SMALL.workspace_mb << 20 for size in sizes)
    assert "No space left" in done.stderr
    with pytest.raises(SandboxError, match="No space left"):
        await box.manager.write("s", "more", b"x" * (1 << 20), 0o644)
    assert (await box.run("rm big && echo ok")).stdout == "ok\n"


async def test_row_25_a_timeout_is_no_success(box: Node) -> None:
    for command in ("sleep 9", "trap '' TERM INT HUP; while :; do sleep 1; done", "exec sleep 9", "(sleep 9); exit 0"):
        done = await box.run(command, timeout_s=0.3)
        assert (done.exit_code, done.timed_out, done.killed_by) == (None, True, "timeout"), command


async def test_row_26_an_exit_code_is_there_after_the_process(box: Node) -> None:
    await box.backend.spawn(SMALL_S, "job", "exit 9", 20.0, 1000)
    await eventually(lambda: not box.backend.execs("s")[1])
    for _ in range(2):
        ended = await box.backend.poll("s", "job")
        assert ended.result is not None
        assert ended.result.exit_code == 9
    with pytest.raises(InvalidRequest, match="none"):
        await box.backend.poll("s", "none")


async def test_row_28_a_background_command_is_found_again(tmp_path: Path) -> None:
    """By another service on the same folder: it runs on, and its output and its status are told."""
    first, second = Node(tmp_path / "node", SMALL), Node(tmp_path / "node", SMALL)
    await first.manager.start()
    await first.create()
    await first.backend.spawn(SMALL_S, "job", "mkfifo go; echo begun; read code < go; exit $code", 60.0, 1000)
    await eventually(lambda: _is_there(first, "go"))
    await first.manager.stop()
    await second.manager.start()
    try:
        assert (await second.backend.poll("s", "job")).running
        page = await second.backend.logs("s", "job", "stdout", 0, 100)
        assert (page.data, page.running) == (b"begun\n", True)
        await second.run("echo 23 > go")
        ended = await second.backend.poll("s", "job", 60.0)
        assert ended.result is not None
        assert (ended.result.exit_code, ended.result.stdout) == (23, "begun\n")
    finally:
        await second.close()
    assert second.left() == []


async def _is_there(box: Node, path: str) -> bool:
    return (await box.run(f"test -e {path}")).exit_code == 0


@pytest.mark.slow
async def test_row_31_whoever_starts_a_sandbox_may_die_at_any_moment(tmp_path: Path) -> None:
    """200 times, 0 to 30 ms into the making of one: nothing of it is left, whatever had been begun."""
    chosen = random.Random(31)
    async with node(tmp_path / "node", SMALL) as box:
        log = box.root / "launcher.log"
        for number in range(200):
            making = asyncio.ensure_future(box.create(f"a{number}"))
            await asyncio.sleep(chosen.random() * 0.03)
            launcher = box.backend._launcher._process
            if launcher is not None:
                launcher.kill()
            with contextlib.suppress(InfraError):
                await making
                await box.manager.destroy(f"a{number}")
        await eventually(lambda: box.left() == [], 60.0)
        await eventually(lambda: len(attached(log)) <= 1, 60.0)
        await box.create()
        assert (await box.run("echo ok")).stdout == "ok\n"


async def test_row_35_a_pause_does_not_move_deadlines(box: Node) -> None:
    """Stopped for a while and gone on: a command's deadline is where it was, and the time of day is right."""
    running = asyncio.ensure_future(box.run("sleep 0.2; date +%s; sleep 99", timeout_s=4.0))
    marker = box.backend.marker("s")
    await eventually(lambda: len([pid for pid, value in processes._marked() if value == marker]) >= 2)
    pids = [pid for pid, value in processes._marked() if value == marker]
    assert box.first() in pids
    for number, pause_s in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a sleep that was over meanwhile
                os.kill(pid, number)
        await asyncio.sleep(pause_s)
    done = await running
    assert done.timed_out
    assert 4.0 <= done.duration_s < 6.4
    assert int(done.stdout) == pytest.approx(time.time(), abs=10)
    assert (await box.run("echo ok")).stdout == "ok\n"


async def test_row_36_a_fork_needs_no_parent(box: Node) -> None:
    """Eight of a snapshot whose sandbox is gone, deletions and all, each with files of its own."""
    if not box.backend.capabilities().fork:
        pytest.skip("this node's backend cannot fork, and says so")
    await box.run("echo kept > kept; echo gone > gone; mkdir d; echo deep > d/e")
    await box.run("rm gone")
    await box.backend.snapshot(SMALL_S, "snap")
    await box.run("echo later > kept")
    await box.manager.destroy("s")
    specs = [Spec(sandbox=f"f{number}", workspace_mb=4, memory_mb=128, pids=32) for number in range(8)]
    try:
        await asyncio.gather(*(box.backend.fork("snap", spec) for spec in specs))
        for number, spec in enumerate(specs):
            done = await box.backend.exec(spec, "e", f"cat kept d/e; ls; echo {number} > mine; cat mine", 20.0, 1000)
            assert done.stdout == f"kept\ndeep\nd\nkept\n{number}\n"
    finally:
        for spec in specs:
            await box.backend.destroy(spec.sandbox)
        assert await box.backend.drop("snap")
    assert not await box.backend.drop("snap")


async def test_row_39_sixty_four_are_gone_soon(tmp_path: Path) -> None:
    async with node(tmp_path / "node", SMALL) as box:
        names = [f"n{number}" for number in range(64)]
        await asyncio.gather(*(box.create(name) for name in names))
        jobs = [asyncio.ensure_future(box.run("while :; do sleep 60; done", sandbox=name)) for name in names[:8]]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(59):
            await asyncio.gather(*(box.manager.destroy(name) for name in names))
        for job in jobs:
            with pytest.raises(SandboxError):
                await job
