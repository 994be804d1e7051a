"""What is Docker's own: its engine's habits, images whose commands are root's, and what is left over on it."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import aiodocker
import msgspec
import pytest
from aiodocker.containers import DockerContainer
from aiodocker.execs import Exec

from opengyre.proto.sandbox import ExecRequest, ExecResult, InfoRequest, NodeInfo, SandboxRef, SandboxSpec
from opengyre.proto.sandbox_trees import ForkRequest, ForkResult, SnapshotInfo, SnapshotRequest
from opengyre.sandbox import docker_config, docker_host, docker_spool
from opengyre.sandbox.clear import clear
from opengyre.sandbox.core import CannotIsolateError, InfraError, InvalidRequest, Options, SandboxGone, Spec
from opengyre.sandbox.docker import Docker
from opengyre.sandbox.docker_execs import Commands
from opengyre.sandbox.launch import tree
from opengyre.sandbox.records import load, save
from opengyre.shared.bus import Bus, call
from opengyre.shared.settings import SandboxSettings
from support import both_backends
from support.both_backends import Box, Node, started

pytestmark = [pytest.mark.sandbox, both_backends.needs["docker"]]


def backend_of(node: Node) -> Docker:
    assert isinstance(node.backend, Docker)
    return node.backend


async def test_a_socket_where_no_engine_answers_is_named(tmp_path: Path):
    backend = Docker(tmp_path / "node", socket=tmp_path / "none.sock", image="x")
    with pytest.raises(CannotIsolateError, match=r"no Docker engine answers at .*none\.sock"):
        await backend.start()
    await backend.stop()


async def test_a_node_whose_image_is_not_there_is_told_so(tmp_path: Path):
    backend = Docker(tmp_path / "node", socket=both_backends.SOCKET, image="no-such-image:1")
    with pytest.raises(
        CannotIsolateError, match=r"'no-such-image:1', which the engine has not; allowed: .*docker_image"
    ):
        await backend.start()
    await backend.stop()


async def test_trap_07_more_than_100_commands_leave_room_for_other_calls(tmp_path: Path):
    async with started("docker", tmp_path / "node") as node:
        await node.create("s", pids=1024, memory_mb=512)
        box = Box(node, "s")
        running = [asyncio.ensure_future(box.run("sleep 71.5", timeout_s=60)) for _ in range(104)]

        container = backend_of(node)._live["s"].container

        async def all_run() -> bool:
            return len(docker_host.pids(container)) > 300

        await both_backends.until(all_run, 50)
        async with asyncio.timeout(10):
            assert await backend_of(node)._engine.state(container) is not None
            assert (await box.run("echo ok")).stdout == "ok\n"
        await node.backend.quiet("s")
        assert {done.exit_code for done in await asyncio.gather(*running)} == {137}


async def test_a_signal_waits_until_the_engine_names_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine under load named it after the command had begun to write, and the signal was lost without a word."""
    async with started("docker", tmp_path / "node") as node:
        await node.create("s")
        box = Box(node, "s")
        await node.backend.spawn(box.spec, "job", "trap 'exit 5' TERM; while :; do sleep 0.05; done", 60, 1000)
        asked: list[int] = []
        look = Commands._leader

        async def late(commands: Commands, known: Exec) -> int:
            asked.append(await look(commands, known))
            return asked[-1] if len(asked) > 3 else 0

        monkeypatch.setattr(Commands, "_leader", late)
        await node.backend.kill("s", "job", "TERM")
        assert len(asked) > 3
        # The shell may have been about to set its trap.
        status = await node.backend.poll("s", "job", 10)
        assert status.result is not None
        assert status.result.exit_code in (5, 143)


@pytest.mark.parametrize("step", ["show", "_first_files", "_folders"])
async def test_row_38_a_creation_that_fails_at_any_step_is_undone(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    async with started("docker", tmp_path / "node") as node:

        async def broken(*_: object) -> None:
            raise aiodocker.DockerError(500, "a fault of the engine")

        owner = DockerContainer if step == "show" else node.backend
        monkeypatch.setattr(owner, step, broken)
        with pytest.raises((InfraError, aiodocker.DockerError), match="a fault of the engine"):
            await node.create("bad", image=both_backends.IMAGE)
        monkeypatch.undo()
        assert await node.left() == []


async def test_row_23_what_nobody_knows_is_swept_and_what_lives_is_not(tmp_path: Path):
    root = tmp_path / "node"
    first = Docker(root, socket=both_backends.SOCKET, image=both_backends.IMAGE)
    await first.start()
    for name in ("lives", "half", "lost"):
        await first.create(Spec(sandbox=name), {})
    unknown = first._live["lost"].container
    (first.folder("lost") / "docker.json").unlink()
    half = first.folder("half") / "docker.json"
    half.write_text(half.read_text().replace('"ready":true', '"ready":false'))
    await first.stop()
    second = Docker(root, socket=both_backends.SOCKET, image=both_backends.IMAGE)
    assert await second.start() == ["lives"]
    assert await second._engine.state(unknown) is None
    assert [path.name for path in (root / "sandboxes").iterdir()] == ["lives"]
    done = await second.exec(Spec(sandbox="lives"), "e", "echo ok", 10, 100)
    assert done.stdout == "ok\n"
    await second.destroy("lives")
    await second.stop()


async def test_what_was_ended_has_left_room_for_other_processes(tmp_path: Path):
    """Of a fork bomb, init had only begun to wait for the processes: the next command could not start any."""
    async with started("docker", tmp_path / "node") as node:
        await node.create("s")
        await node.backend.spawn(node.spec("s"), "e", "sleep 93.5 & sleep 94.5 & wait", 300.0, 1000)
        made = backend_of(node)._live["s"]

        async def run() -> bool:
            lines = await asyncio.to_thread(_lines_of, made.container)
            return "sleep 93.5" in lines and "sleep 94.5" in lines

        await both_backends.until(run)
        ended = docker_host.pids(made.container) - docker_host._holders(made.first)
        os.kill(made.first, signal.SIGSTOP)
        try:
            quieting = asyncio.ensure_future(node.backend.quiet("s"))

            async def none_runs() -> bool:
                return not any(tree.runs(pid) for pid in ended)

            await both_backends.until(none_runs)
            await asyncio.wait([quieting], timeout=0.3)
            assert not quieting.done()
        finally:
            os.kill(made.first, signal.SIGCONT)
        await quieting


async def test_row_26_a_status_that_the_engine_has_forgotten_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with started("docker", tmp_path / "node") as node:
        await node.create("s")

        async def forgotten(*_: object, **__: object) -> None:
            return None

        monkeypatch.setattr(backend_of(node)._engine, "exit_code", forgotten)
        assert (await Box(node, "s").run("exit 42")).exit_code == 42


def _lines_of(container: str) -> str:
    """Command lines of a container's processes, as this machine has them."""
    found = ""
    for pid in docker_host.pids(container):
        with suppress(OSError):
            found += Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") + "\n"
    return found


async def test_a_deadline_that_passed_while_there_was_no_service_is_applied_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is of the clock that the machine's processes share, and what is left of the tree goes with it."""
    first = Docker(tmp_path / "node", socket=both_backends.SOCKET, image=both_backends.IMAGE)
    await first.start()
    spec = Spec(sandbox="s")
    await first.create(spec, {})
    # However long the machine takes to come to the stop: the first one is not to apply the deadline.
    monkeypatch.setattr(docker_spool, "overdue", lambda *_: None)
    await first.spawn(spec, "late", "echo before; setsid sleep 91.5 & sleep 92.5; echo after", 1.0, 1000)
    await first.spawn(spec, "early", "sleep 2; echo whole", 60.0, 1000)

    async def runs() -> bool:
        return "sleep 92.5" in await asyncio.to_thread(_lines_of, first._live["s"].container)

    await both_backends.until(runs)  # the engine may only be about to start it
    await first.stop()  # as a kill does: nobody looks at commands any more
    monkeypatch.undo()
    await asyncio.sleep(1.5)
    assert await runs(), "it runs on"
    second = Docker(tmp_path / "node", socket=both_backends.SOCKET, image=both_backends.IMAGE)
    began = asyncio.get_running_loop().time()
    assert await second.start() == ["s"]
    try:
        async with asyncio.timeout(15):
            done = (await second.poll("s", "late", 10.0)).result
        assert done is not None
        assert (done.killed_by, done.timed_out, done.stdout) == ("timeout", True, "before\n")
        assert asyncio.get_running_loop().time() - began < 12
        after = await asyncio.to_thread(_lines_of, second._live["s"].container)
        assert "sleep 9" not in after
        early = (await second.poll("s", "early", 30.0)).result
        assert early is not None
        assert early.stdout == "whole\n", "one with time left goes on"
    finally:
        await second.destroy("s")
        await second.stop()


async def test_a_command_that_the_engine_was_never_told_to_start_has_all_its_time_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The service ended between making an exec and starting it, and came back after the command's timeout."""
    first = Docker(tmp_path / "node", socket=both_backends.SOCKET, image=both_backends.IMAGE)
    await first.start()
    spec = Spec(sandbox="s")
    await first.create(spec, {})
    made = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        made.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(first._commands, "_run", never)
    asking = asyncio.ensure_future(first.spawn(spec, "e", "echo x >> count; sleep 0.2; cat count", 60.0, 1000))
    await made.wait()
    await asking
    await first.stop()
    record = first._place("s").home / "execs" / "e" / "begun.json"
    begun = load(record, docker_spool.Begun)
    assert begun is not None
    save(record, msgspec.structs.replace(begun, began=begun.began - 100.0))
    second = Docker(tmp_path / "node", socket=both_backends.SOCKET, image=both_backends.IMAGE)
    await second.start()
    try:
        done = (await second.poll("s", "e", 20.0)).result
        assert done is not None
        assert (done.killed_by, done.stdout) == (None, "x\n")
    finally:
        await second.destroy("s")
        await second.stop()


async def test_an_image_has_its_own_user_and_a_root_that_can_be_written_to(tmp_path: Path):
    async with started("docker", tmp_path / "node") as node:
        backend = node.backend
        spec = Spec(sandbox="s", image=both_backends.IMAGE, cpus=0.5, workdir="/opt")
        await backend.create(spec, {"/workspace/a": "x"})
        done = await backend.exec(
            spec, "e", "pwd; id -u; touch /root/x /usr/x && chown 1234 /root/x; ls /workspace", 10, 1000
        )
        assert (done.stdout, done.stderr) == ("/opt\n0\na\n", "")
        for command in (
            "mount -t tmpfs none /mnt",
            "mknod /tmp/n c 1 3",
            "ls /sys/fs/cgroup/x",
            "kill -9 1; kill -0 1 && false",
        ):
            assert (await backend.exec(spec, f"m{hash(command)}", command, 10, 1000)).exit_code != 0, command
        # A root of the image may plant what it likes where commands write: nothing is read through a link.
        await backend.exec(
            spec, "plant", "rm $D/stdout; ln -s /etc/shadow $D/stdout", 10, 1000, Options(env={"D": "/.gyre/plant"})
        )
        assert (await backend.logs("s", "plant", "stdout", 0, 1000)).data == b""
        with pytest.raises(InvalidRequest, match="user"):
            await backend.exec(spec, "nobody", "true", 10, 100, Options(user="no-such-user"))
        with pytest.raises(InvalidRequest, match="cwd"):
            await backend.exec(spec, "nowhere", "true", 10, 100, Options(cwd="/no/such/folder"))
        await backend.destroy("s")


async def test_a_port_of_a_sandbox_is_reached_from_the_node_only(tmp_path: Path):
    async with started("docker", tmp_path / "node") as node:
        await node.create("s")
        box = Box(node, "s")
        if (await box.run("test -x /usr/bin/python3")).exit_code != 0:
            pytest.skip("the image has no python3, which is the client here")
        listener = await node.backend.listen("s", 8123)
        listener.setblocking(False)
        try:
            text = "import socket; c = socket.create_connection(('127.0.0.1', 8123)); print(c.recv(9).decode())"
            asking = asyncio.ensure_future(box.run(f'/usr/bin/python3 -c "{text}"'))
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(20):
                connection, _ = await loop.sock_accept(listener)
            with connection:
                await loop.sock_sendall(connection, b"hello")
            assert (await asking).stdout == "hello\n"
        finally:
            listener.close()


async def test_a_command_of_a_removed_sandbox_leaves_no_record(tmp_path: Path):
    async with started("docker", tmp_path / "node") as node:
        await node.create("s")
        running = asyncio.ensure_future(Box(node, "s").run("sleep 81.5"))
        await Box(node, "s").sees("sleep 81.5")
        await node.manager.destroy("s")
        with pytest.raises(SandboxGone):
            await running
        assert not node.backend.folder("s").exists()
        assert list((node.root / "trash").iterdir()) == []
        label = f'{{"label": ["{docker_config.SANDBOX_LABEL}=s", "{docker_config.KEY_LABEL}={node.backend._key}"]}}'
        assert await backend_of(node)._engine.docker.containers.list(all=1, filters=label) == []


async def test_the_service_offers_the_engine_over_the_bus_and_finds_its_sandboxes_again(
    bus: Bus, nats_server, tmp_path: Path
):
    environment = {
        **os.environ,
        "GYRE_BUS__URL": nats_server.url,
        "GYRE_STATE_DIR": str(tmp_path / "state"),
        "GYRE_SANDBOX__NODE": "n8",
        "GYRE_SANDBOX__BACKEND": "docker",
        "GYRE_SANDBOX__DOCKER_SOCKET": str(both_backends.SOCKET),
        "GYRE_SANDBOX__DOCKER_IMAGE": both_backends.IMAGE,
    }
    log = (tmp_path / "log").open("ab")

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "opengyre.sandbox"]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def ask(verb: str, request: msgspec.Struct, reply: type, target: str = "n8"):
        return await call(bus, "sandbox", target, verb, request, reply, timeout_s=6, patience_s=60)

    process = start()
    try:
        spec = SandboxSpec(sandbox="s", owner="test", image=both_backends.IMAGE)
        ref = await ask("create", spec, SandboxRef, "any")
        assert (ref.node, ref.isolated) == ("n8", True)
        info = await ask("info", InfoRequest(), NodeInfo)
        assert (info.capabilities.backend, both_backends.IMAGE in info.images) == ("docker", True)
        request = ExecRequest(sandbox="s", exec_id="e", command="echo x >> count; sleep 3; cat count")
        running = asyncio.ensure_future(ask("exec", request, ExecResult))
        await asyncio.sleep(1)
        process.kill()
        process.wait(10)
        process = start()
        assert (await running).stdout == "x\n"
        await ask("snapshot", SnapshotRequest(sandbox="s", snapshot="snap"), SnapshotInfo)
        fork = ForkRequest(snapshot="snap", sandboxes=("f0", "f1"), owner="test")
        assert [one.sandbox for one in (await ask("fork", fork, ForkResult)).sandboxes] == ["f0", "f1"]
        done = await ask("exec", ExecRequest(sandbox="f1", exec_id="e", command="cat count"), ExecResult)
        assert done.stdout == "x\n"
    finally:
        process.terminate()
        process.wait(30)
        log.close()
        settings = SandboxSettings(docker_socket=str(both_backends.SOCKET), docker_image=both_backends.IMAGE)
        ended = await clear(tmp_path / "state", settings)
    assert sorted(ended) == ["f0", "f1", "s"]
