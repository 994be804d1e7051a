"""Directories and large files in and out of real sandboxes; what there is without isolation."""

import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.sandbox import machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InvalidRequest, Options, OutputLimit, Spec
from support.archives import member, tar_of
from support.sandboxes import Shell

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Bubblewrap]:
    backend = Bubblewrap(tmp_path / "node")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.destroy("s")
        await backend.stop()


async def test_directories_travel_as_archives(node: Bubblewrap, tmp_path: Path) -> None:
    spec = Spec(sandbox="s", workspace_mb=32)
    await node.create(spec, {})
    sh = Shell(node, spec)
    source, target = tmp_path / "in.tar", tmp_path / "out.tar"
    source.write_bytes(
        tar_of(
            (member("d", tarfile.DIRTYPE, mode=0o755), b""),
            (member("d/run.sh", mode=0o755), b"echo ran"),
            (member("d/link", tarfile.SYMTYPE, "run.sh"), b""),
            (member("fifo", tarfile.FIFOTYPE), b""),
            (member("device", tarfile.CHRTYPE), b""),
        )
    )
    packed = await node.put("s", "/workspace/new", source)
    assert (packed.entries, packed.skipped) == (3, 2)
    assert await sh("cd new; ./d/link; ls; stat -c %U d/run.sh") == "ran\nd\nagent\n"
    await sh(
        "cd new; mkfifo f; ln d/run.sh hard; head -c 3000000 /dev/zero >zeros; printf '\\303' >\"$(printf 'odd\\377')\""
    )
    packed = await node.get("s", "/workspace/new", target, 8 << 20)
    assert packed.skipped == 1
    with tarfile.open(target) as tar:
        found = {one.name: one for one in tar}
    assert found["hard"].islnk() or found["d/run.sh"].islnk()
    assert found["zeros"].size == 3_000_000
    assert found["d/link"].linkname == "run.sh"
    with pytest.raises(OutputLimit, match="more than 1000000 bytes"):
        await node.get("s", "/workspace/new", target, 1_000_000)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await node.get("s", "/workspace/none", target, 1_000_000)


@pytest.mark.parametrize(
    "bad",
    [
        [(member("../out"), b"x")],
        [(member("/etc/out"), b"x")],
        [(member("l", tarfile.SYMTYPE, "/tmp"), b""), (member("l/out"), b"x")],
        [(member("l", tarfile.SYMTYPE, "../../tmp"), b"")],
        [(member("l", tarfile.LNKTYPE, "../../etc/passwd"), b"")],
    ],
    ids=["parent", "absolute", "absolute link", "link out", "hard link out"],
)
async def test_abuse_archives_write_nowhere_else(node: Bubblewrap, tmp_path: Path, bad: list) -> None:
    spec = Spec(sandbox="s")
    await node.create(spec, {})
    (tmp_path / "bad.tar").write_bytes(tar_of(*bad))
    with pytest.raises(InvalidRequest, match=r"would write outside|absolute name"):
        await node.put("s", "/workspace/in", tmp_path / "bad.tar")
    assert await Shell(node, spec)("ls /workspace /tmp /etc | grep -wx out") == "[1]"
    (tmp_path / "bad.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(InvalidRequest, match="cannot be read as a plain tar archive"):
        await node.put("s", "/workspace/in", tmp_path / "bad.tar")


async def test_large_files_travel_by_files(node: Bubblewrap, tmp_path: Path) -> None:
    spec = Spec(sandbox="s", workspace_mb=64)
    await node.create(spec, {})
    (tmp_path / "in").write_bytes(os.urandom(20 << 20))
    await node.write_from("s", "/workspace/large", tmp_path / "in", 0o600)
    await node.read_to("s", "/workspace/large", tmp_path / "out", 64 << 20)
    assert (tmp_path / "in").read_bytes() == (tmp_path / "out").read_bytes()


async def test_without_isolation_files_and_background_commands_work_and_the_rest_is_refused(tmp_path: Path) -> None:
    backend = Bubblewrap(tmp_path / "node", isolated=False)
    await backend.start()
    spec = Spec(sandbox="s")
    try:
        await backend.create(spec, {})
        can = backend.capabilities()
        assert (can.background, can.fork, can.images, can.users, can.disk_limit) == (True, False, False, False, False)
        source, target = tmp_path / "in.tar", tmp_path / "out.tar"
        source.write_bytes(tar_of((member("d/a"), b"1")))
        assert (await backend.put("s", "/workspace/in", source)).entries == 1
        await backend.spawn(spec, "job", "cat in/d/a; sleep 314 & sleep 315", 60.0, 100)
        while (await backend.logs("s", "job", "stdout", 0, 10)).data != b"1":
            assert (await backend.poll("s", "job", 0.02)).running
        await backend.kill("s", "job")
        done = (await backend.poll("s", "job")).result
        assert done is not None
        assert done.killed_by == "kill"
        assert not [value for _, value in processes._marked() if value == backend.marker("s")]
        assert (await backend.get("s", "/workspace", target, 1 << 20)).entries == 3
        with pytest.raises(InvalidRequest, match="needs the capability 'snapshot'"):
            await backend.snapshot(spec, "x")
        with pytest.raises(InvalidRequest, match="needs the capability 'users'"):
            await backend.exec(spec, "u", "id", 5.0, 100, Options(user="root"))
        with pytest.raises(InvalidRequest, match="needs the capability 'images'"):
            await backend.create(Spec(sandbox="i", image="a"), {})
    finally:
        await backend.destroy("s")
        await backend.stop()
