"""What every backend does alike with the life of a sandbox; see `test_sandbox_conformance`."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.sandbox import RenewRequest
from opengyre.sandbox.core import (
    InfraError,
    InvalidRequest,
    Options,
    SandboxBusy,
    SandboxError,
    SandboxGone,
    Spec,
)
from opengyre.sandbox.lease import State
from support import both_backends
from support.both_backends import Box, Node, checks, until

pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


# Life


async def test_create_is_idempotent_also_at_once(node: Node):
    refs = await asyncio.gather(*(node.create("twin") for _ in range(4)))
    assert {ref.sandbox for ref in refs} == {"twin"}
    assert sum(info.sandbox == "twin" for info in node.manager.listing({})) == 1
    assert (await node.manager.destroy("twin")).existed
    assert not (await node.manager.destroy("twin")).existed
    await node.create("twin")
    assert (await Box(node, "twin").run("ls")).stdout == ""
    await node.manager.destroy("twin")


async def test_exec_runs_once_for_its_id_also_at_once(box: Box):
    command = "echo x >> count; sleep 0.2; wc -l < count"
    results = await asyncio.gather(*(box.run(command, exec_id="e") for _ in range(4)))
    assert {done.stdout for done in results} == {"1\n"}
    with pytest.raises(InvalidRequest, match="another command"):
        await box.run("echo other", exec_id="e")
    for other in (Options(stdin=b"x"), Options(env={"A": "b"}), Options(cwd="/tmp")):
        with pytest.raises(InvalidRequest, match="another command"):
            await box.node.backend.exec(box.spec, "e", command, 30.0, 16384, other)


async def test_row_04_a_cancelled_caller_finds_its_command_again(box: Box):
    command = "echo x >> count; sleep 0.4; cat count"
    first = asyncio.ensure_future(box.run(command, exec_id="e"))
    await asyncio.sleep(0.2)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    assert (await box.run(command, exec_id="e")).stdout == "x\n"


async def test_row_02_destroy_does_not_wait_for_a_busy_loop(node: Node):
    await node.create("busy")
    busy = asyncio.ensure_future(Box(node, "busy").run("while :; do :; done", timeout_s=300))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(60):
        assert (await node.manager.destroy("busy")).existed
    with pytest.raises(SandboxGone):
        await busy


async def test_row_24_a_dead_sandbox_is_gone_and_not_an_observation(node: Node):
    await node.create("dead")
    running = asyncio.ensure_future(Box(node, "dead").run("sleep 60"))
    await Box(node, "dead").sees("sleep 60")
    await node.break_("dead")
    with pytest.raises(SandboxGone):
        await running
    with pytest.raises(SandboxGone):
        await Box(node, "dead").run("echo ok")
    assert not await node.backend.alive("dead")
    await node.manager.destroy("dead")


async def test_row_29_a_renewal_never_shortens(box: Box):
    before = box.node.manager.stat(box.name).expires_in_s
    assert box.node.manager.renew(RenewRequest(sandbox=box.name, ttl_s=1)).expires_in_s > before - 1


async def test_row_22_a_lease_that_is_over_ends_a_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch):
    await node.create("short", ttl_s=60)
    box = Box(node, "short")
    assert (await box.run("sleep 91.5 & echo ok")).stdout == "ok\n"
    monkeypatch.setattr("opengyre.sandbox.manager._now", lambda: time.monotonic() + 61)
    with pytest.raises(SandboxGone, match="lease"):
        await box.run("echo ok")
    reaping = asyncio.ensure_future(node.manager.reap())

    async def gone() -> bool:
        return not node.backend.folder("short").exists() and not await node.backend.alive("short")

    await until(gone)
    reaping.cancel()
    await asyncio.wait([reaping])
    assert not any("short" in value for value in await node.left())


@pytest.mark.parametrize("files", [{"a": "", "a/b": "a file is no folder"}, {"x" * 300: "too long a name"}])
async def test_row_38_a_creation_that_fails_leaves_nothing(node: Node, files: dict[str, str]):
    before = sorted(await node.left())
    with pytest.raises(InvalidRequest, match="written"):
        await node.create("bad", files=files)
    assert sorted(await node.left()) == before


async def test_row_38_an_unknown_image_is_refused_by_name_and_leaves_nothing(node: Node):
    before = sorted(await node.left())
    spec = Spec(sandbox="bad", image="no-such-image:1")
    with pytest.raises(InvalidRequest, match="image"):
        await node.backend.create(spec, {})
    await node.backend.destroy("bad")
    assert sorted(await node.left()) == before


async def test_row_42_a_creation_that_is_cancelled_leaves_nothing(node: Node):
    before = sorted(await node.left())
    chance = random.Random(42)
    for _ in range(5):
        making = asyncio.ensure_future(node.create("c"))
        await asyncio.sleep(chance.uniform(0, 0.25))
        making.cancel()
        with suppress(asyncio.CancelledError):
            await making
            await node.manager.destroy("c")
        assert sorted(await node.left()) == before
    await node.create("c")
    assert (await Box(node, "c").run("echo ok")).stdout == "ok\n"
    await node.manager.destroy("c")


async def test_row_33_many_at_once_need_no_port_and_no_network(node: Node):
    names = [f"n{number}" for number in range(10)]
    await asyncio.gather(*(node.create(name) for name in names))
    results = await asyncio.gather(*(Box(node, name).run("cat /proc/net/tcp | wc -l") for name in names))
    assert {done.stdout for done in results} == {"1\n"}
    async with asyncio.timeout(9):  # row 39: nothing waits for a grace time, which is 10 s where there is one
        await asyncio.gather(*(node.manager.destroy(name) for name in names))


async def test_what_a_backend_cannot_do_is_refused_by_name(node: Node):
    can = node.backend.capabilities()
    asked: dict[str, dict[str, Any]] = {
        "network_allowlist": {"network": "allowlist", "allowed_hosts": ("example.org",)},
        "disk_limit": {"image": both_backends.IMAGE, "disk_mb": 64},
        "cpu_limit": {"cpus": 0.5},
        "root_directories": {"image": "/srv/root"},
        "users": {"user": "1234"},
    }
    refused = {name: fields for name, fields in asked.items() if not getattr(can, name)}
    assert refused, "no backend can do all of it"
    for name, fields in refused.items():
        with pytest.raises(InvalidRequest, match=name):
            await node.create("no", **fields)
    assert not node.backend.folder("no").exists()


async def test_row_36_a_snapshot_outlives_its_sandbox_and_is_forked(node: Node):
    if not node.backend.capabilities().snapshot:
        pytest.skip("this backend keeps no snapshots here")
    image = both_backends.IMAGE if node.kind == "docker" else None
    spec = Spec(sandbox="parent", image=image)
    await node.backend.create(spec, {"/workspace/keep": "kept", "/workspace/drop": "dropped"})
    await node.backend.spawn(spec, "ticks", "while :; do echo t >> ticks; sleep 0.05; done", 300, 1000)
    await node.backend.exec(spec, "e", "until [ -e ticks ]; do sleep 0.05; done; rm drop; echo more >> keep", 30, 1000)
    assert await node.backend.snapshot(spec, "snap") > 0
    assert node.backend.snapshots() == ["snap"]
    further = "n=$(wc -l < ticks); until [ $(wc -l < ticks) -gt $n ]; do sleep 0.05; done; echo goes on"
    after = await node.backend.exec(spec, "f", further, 30, 1000)
    assert after.stdout == "goes on\n"
    await node.backend.destroy("parent")
    forks = [Spec(sandbox=f"fork{n}", image=image) for n in range(8)]
    await asyncio.gather(*(node.backend.fork("snap", one) for one in forks))
    results = await asyncio.gather(*(node.backend.exec(one, "e", "cat keep; ls", 30, 1000) for one in forks))
    assert {done.stdout for done in results} == {"keptmore\nkeep\nticks\n"}
    await node.backend.exec(forks[0], "g", "echo other > keep; touch new", 30, 1000)
    await node.backend.restore(forks[0], "snap")
    assert (await node.backend.exec(forks[0], "h", "cat keep; ls", 30, 1000)).stdout == "keptmore\nkeep\nticks\n"
    for one in forks:
        await node.backend.destroy(one.sandbox)
    assert await node.backend.drop("snap")
    assert not await node.backend.drop("snap")
    with pytest.raises(InvalidRequest, match="snapshot"):
        await node.backend.fork("snap", Spec(sandbox="late"))
    assert node.backend.snapshots() == []


async def test_a_second_service_on_the_same_folder_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("opengyre.sandbox.owned.LOCK_BOUND_S", 0.2)
    other = both_backends.backend(node.kind, node.root)
    with pytest.raises(InfraError, match="another sandbox service uses"):
        await other.start()
    await other.stop()


HOST = """
import asyncio, sys
from pathlib import Path
from support import both_backends

async def main():
    node = both_backends.Node(sys.argv[1], Path(sys.argv[2]))
    await node.manager.start()
    await node.create("short", ttl_s=float(sys.argv[3]))
    for name in ("k0", "k1"):
        await node.create(name)
        spec = node.spec(name)
        await node.backend.spawn(spec, "job", "echo x >> count; sleep 1.5; cat count; exit 9", 30, 1000)
    print("ready", flush=True)
    await asyncio.gather(*(node.create(f"half{n}") for n in range(4)))
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", both_backends.BOTH)
async def test_row_23_28_a_killed_service_finds_what_lives_with_its_commands_and_leaks_nothing(
    kind: str, tmp_path: Path
):
    root = tmp_path / "node"
    tests = Path(__file__).parents[2]
    process = subprocess.Popen(  # noqa: ASYNC220 - it is killed, not waited for
        [sys.executable, "-c", HOST, kind, str(root), "6"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    async with both_backends.started(kind, root) as node:
        found = {info.sandbox for info in node.manager.listing({})}
        assert {"k0", "k1"} <= found
        for name in ("k0", "k1"):
            box = Box(node, name)
            again = await box.run("echo x >> count; sleep 1.5; cat count; exit 9", exec_id="job")
            assert (again.stdout, again.exit_code) == ("x\n", 9)
            assert (await box.run("wc -l < count")).stdout == "1\n"
        reaping = asyncio.ensure_future(node.manager.reap())

        async def gone() -> bool:
            return "short" not in {info.sandbox for info in node.manager.listing({})}

        await until(gone)
        reaping.cancel()
        await asyncio.wait([reaping])


@pytest.mark.parametrize("kind", both_backends.BOTH)
async def test_every_error_is_a_type_of_its_own(kind: str, tmp_path: Path):
    async with both_backends.started(kind, tmp_path / "node") as node:
        for unknown in (node.backend.alive("none"),):
            assert not await unknown
        with pytest.raises(SandboxGone):
            await node.backend.read("none", "/workspace/x", 10)
        with pytest.raises(SandboxGone):
            await node.backend.exec(Spec(sandbox="none"), "e", "true", 5, 10)
        await node.create("v")
        held = checks("v", "v", "shared", "until [ -e go ]; do sleep 0.05; done")
        verifying = asyncio.ensure_future(node.manager.verify(held))

        async def begun() -> bool:
            return node.manager._known["v"].state is State.VERIFYING

        await until(begun)
        with pytest.raises(SandboxBusy):
            await Box(node, "v").run("true")
        await node.backend.write("v", "/workspace/go", b"", 0o644)
        assert (await verifying).valid
        for name in ("SandboxGone", "SandboxBusy", "OutputLimit", "InfraError", "InvalidRequest"):
            kinds = [one for one in SandboxError.__subclasses__() if one.__name__ == name]
            assert len({one.kind for one in kinds}) == 1
