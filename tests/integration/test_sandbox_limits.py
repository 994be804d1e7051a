"""Limits of sandboxes with an image, whose commands may be root there: what holds for all their users together."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxSpec, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox import machine
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InvalidRequest, Options, Spec
from opengyre.sandbox.node import Node
from support.rootfs import needs_root, rootfs

pytestmark = [
    pytest.mark.sandbox,
    needs_root,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]
DEFAULTS = Spec(sandbox="", workspace_mb=16, memory_mb=128, pids=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rootfs(tmp_path_factory.mktemp("roots") / "small")


@pytest.fixture
async def node(tmp_path: Path, root: Path) -> AsyncIterator[Node]:
    made = Node(Bubblewrap(tmp_path / "node", image_roots=[root.parent]), "n0", DEFAULTS)
    await made.start()
    try:
        yield made
    finally:
        for info in made.listing({}):
            await made.destroy(info.sandbox)
        await made.stop()


async def run(node: Node, exec_id: str, command: str, **more: Any) -> ExecResult:
    return await node.exec(ExecRequest(sandbox="s", exec_id=exec_id, command=command, **more))


async def test_row_18_root_of_a_sandbox_cannot_bomb_it_by_many_users(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root), pids=16))
    # Each user has a limit of its own; the sandbox has one for all of them.
    for user in range(4):
        command = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 300 & done; exit 0"
        await run(node, f"u{user}", command, user=str(2000 + user))
    done = await run(node, "count", "n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo $n")
    assert done.exit_code is not None
    node_spec = node._known["s"].spec
    await node._backend.quiet("s")
    after = await node._backend.exec(node_spec, "after", "for p in /proc/[0-9]*; do echo $p; done", 10.0, 1000)
    counted = int(done.stdout or 99)
    assert counted <= 16 + 8
    assert len(after.stdout.split()) == 2, "quiet ends what any user runs"


async def test_the_kernels_end_of_a_command_is_told(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root), memory_mb=32))
    # The shell goes on; only its child was taken.
    done = await run(node, "a", "dd if=/dev/zero of=/dev/null bs=200M count=1; echo went on")
    assert done.oom
    assert "went on" in done.stdout
    assert not (await run(node, "b", "echo ok")).oom


async def test_a_share_of_a_processor_is_enforced(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root), cpus=0.1))
    done = await run(node, "a", "while :; do :; done", timeout_s=2.0)
    assert done.timed_out
    folders = [top.own / "s" for top in node._backend._groups._tops]  # type: ignore[attr-defined]  # bubblewrap's own
    lines = "".join((folder / "cpu.stat").read_text() for folder in folders if (folder / "cpu.stat").exists())
    throttled = [int(line.split()[1]) for line in lines.splitlines() if line.startswith("nr_throttled")]
    assert sum(throttled) >= 3


async def test_a_file_may_be_larger_than_an_output(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root)))
    done = await run(node, "a", "dd if=/dev/zero of=/big bs=1M count=60; stat -c %s /big")
    assert done.stdout == f"{60 << 20}\n", done.stderr


async def test_an_evaluation_apart_has_the_whole_root(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root), disk_mb=32))
    await run(node, "a", "rm /var/gone; echo 5 >/opt-file; chown 1234 /opt-file; sleep 300 &")
    checks = tuple(
        Check(name=f"c{n}", command=command, weight=1.0)
        for n, command in enumerate(("test ! -e /var/gone", "test $(stat -c %u /opt-file) = 1234", "touch /of-a-check"))
    )
    request = VerifyRequest(sandbox="s", verify_id="v", checks=checks, mode="separate")
    verdict = await node.verify(request)
    assert (verdict.valid, verdict.passed) == (True, 3)
    assert (await run(node, "b", "test ! -e /of-a-check")).exit_code == 0
    assert node._backend.snapshots() == []


async def test_users_and_folders_that_are_not_there_are_refused(node: Node, root: Path) -> None:
    await node.create(SandboxSpec(sandbox="s", owner="o", image=str(root), workdir="/var", user="worker"))
    assert (await run(node, "a", "id -u; pwd")).stdout == "1234\n/var\n"
    for number, (fields, words) in enumerate(
        (({"user": "stranger"}, "user is 'stranger'"), ({"user": "70000"}, "65534"), ({"cwd": "/none"}, "cwd is"))
    ):
        with pytest.raises(InvalidRequest, match=words):
            await run(node, f"r{number}", "true", **fields)
    spec = node._known["s"].spec
    # The file that names the users is the sandbox's own: whatever it is, nobody waits for it.
    await run(node, "b", "rm /etc/passwd; mkfifo /etc/passwd", user="0")
    done = await node._backend.exec(spec, "c", "id -u", 60.0, 100, Options(user="1234"))
    assert done.stdout == "1234\n"
