"""Images, snapshots and forks of real sandboxes; background commands."""

import asyncio
import os
import signal
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from opengyre.sandbox import disks, images, machine
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InvalidRequest, Options, SandboxBusy, Spec
from opengyre.sandbox.launch import tree
from opengyre.sandbox.records import Processes
from support import eventually
from support.rootfs import needs_root, rootfs
from support.sandboxes import Shell

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rootfs(tmp_path_factory.mktemp("roots") / "small")


both_ways = pytest.mark.parametrize("node", ["disk", "memory"], indirect=True)


@pytest.fixture
async def node(
    tmp_path: Path, root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bubblewrap]:
    """A node that holds what is written to roots on its disk; ``memory``: one of a machine that cannot."""
    wanted = getattr(request, "param", "any")
    if wanted == "memory":
        monkeypatch.setattr(disks, "without_tools", lambda: "none is wanted")
    backend = Bubblewrap(tmp_path / "node", image_roots=[root.parent])
    await backend.start()
    if wanted == "disk" and backend._no_disks is not None:
        await backend.stop()
        pytest.skip(backend._no_disks)
    try:
        yield backend
    finally:
        for name in list(backend._live):
            await backend.destroy(name)
        for name in backend.snapshots():
            await backend.drop(name)
        assert list((tmp_path / "node" / "layers").iterdir()) == []
        await backend.stop()
        assert str(tmp_path) not in content("/proc/mounts")
        await eventually(no_loop_below(tmp_path))


def no_loop_below(folder: Path) -> Callable[[], Awaitable[bool]]:
    """A device goes with the mounts of its sandbox, which the kernel clears up after the end of its processes."""

    async def gone() -> bool:
        found = []
        for device in Path("/sys/block").glob("loop*/loop/backing_file"):  # noqa: ASYNC240 - state of the system
            with suppress(OSError):
                found.append(device.read_text())
        return not any(str(folder) in text for text in found)

    return gone


def content(path: str) -> str:
    return Path(path).read_text()


@needs_root
@both_ways
async def test_an_image_is_a_root_to_write_to(node: Bubblewrap, root: Path) -> None:
    spec = Spec(sandbox="i", image=str(root), disk_mb=8)
    await node.create(spec, {"/workspace/a": "hello"})
    sh = Shell(node, spec)
    assert await sh("id -u; cat /etc/base /workspace/a; echo $HOME") == "0\nof the image\nhello/root\n"
    assert (
        await sh("echo new >/etc/base; rm -r /var/kept /var/gone; mkdir /opt; chown 1234 /opt; cat /etc/base")
        == "new\n"
    )
    assert (root / "etc/base").read_text() == "of the image\n"
    assert (root / "var/kept/one").exists()
    assert await sh("id -u; touch /opt/mine; stat -c %u /opt/mine; echo $HOME $USER", user="worker") == (
        "1234\n1234\n/home/worker worker\n"
    )
    assert "Permission denied" in await sh("ls /dev/.layer")
    assert "denied" in await sh("mount -t tmpfs none /mnt || mount -t tmpfs none /var")
    assert "not permitted" in await sh("mknod /var/null c 1 3")
    assert "No space left" in await sh("dd if=/dev/zero of=/big bs=1M count=20")


@needs_root
@both_ways
@pytest.mark.parametrize("disk_mb", [8, 64])
async def test_row_19_a_disk_limit_is_enforced(node: Bubblewrap, root: Path, disk_mb: int) -> None:
    spec = Spec(sandbox="i", image=str(root), disk_mb=disk_mb, memory_mb=256)
    await node.create(spec, {})
    sh = Shell(node, spec)
    said = await sh(f"dd if=/dev/zero of=/big bs=1M count={2 * disk_mb} || stat -c %s /big")
    assert "No space left on device" in said
    assert int(said.split()[0]) <= disk_mb << 20
    assert await sh("rm /big; echo ok >/small; cat /small") == "ok\n"


@needs_root
@both_ways
async def test_row_19_a_disk_that_is_filled_at_full_speed_ends_no_process(node: Bubblewrap, root: Path) -> None:
    """What is on its way to the disk is charged to the sandbox's memory: a tenth of what is written has to do."""
    if node._no_disks is not None:  # then it is in memory, and said to be
        assert any("disk_mb of more than memory_mb" in sentence for sentence in node.unenforced())
        return
    assert not any("disk_mb" in sentence for sentence in node.unenforced())
    spec = Spec(sandbox="i", image=str(root), disk_mb=512, memory_mb=64)
    await node.create(spec, {})
    said = await Shell(node, spec)("dd if=/dev/zero of=/big bs=1M count=1024 || stat -c %s /big")
    assert "No space left on device" in said, said
    assert "Killed" not in said


@needs_root
@both_ways
async def test_row_34_a_disk_is_given_back_when_its_sandbox_is_destroyed(node: Bubblewrap, root: Path) -> None:
    """Also one that was removed while it was written to, and one whose snapshot stays."""
    for number in range(3):
        spec = Spec(sandbox="i", image=str(root), disk_mb=40)
        await node.create(spec, {})
        await node.spawn(spec, f"fill{number}", "dd if=/dev/zero of=/big bs=1M count=80; sleep 60", 60.0, 1000)
        if number == 1:
            await node.snapshot(spec, "kept")
        await node.destroy("i")
        await eventually(no_loop_below(node.folder("i").parent))
        assert list(node.folder("i").parent.iterdir()) == []


@needs_root
async def test_a_disk_that_cannot_be_mounted_is_none(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine has is not what it lets a service do: the start tries it, and says why."""

    def broken(template: Path, size_mb: int) -> None:
        template.write_bytes(bytes(size_mb << 20))

    monkeypatch.setattr(disks, "without_tools", lambda: None)
    monkeypatch.setattr(disks, "_make", broken)
    node = Bubblewrap(tmp_path / "node", image_roots=[root.parent])
    await node.start()
    try:
        assert ["mount ext4: Invalid argument" in sentence for sentence in node.unenforced()] == [True]
        spec = Spec(sandbox="i", image=str(root), disk_mb=64)
        await node.create(spec, {})
        assert await Shell(node, spec)("echo ok >/small; cat /small") == "ok\n"
        await node.destroy("i")
    finally:
        await node.stop()


@needs_root
@both_ways
async def test_row_36_fork_from_a_snapshot_whose_parent_is_gone(node: Bubblewrap, root: Path) -> None:
    spec = Spec(sandbox="p", image=str(root), disk_mb=32)
    await node.create(spec, {"/workspace/a": "1"})
    sh = Shell(node, spec)
    await sh("rm -r /var/kept /var/gone; mkdir /var/kept; echo 2 >/var/kept/two; chown 1234:1234 /var/kept/two")
    assert await node.snapshot(spec, "s1") > 0
    assert await node.snapshot(spec, "s1") > 0
    await sh("echo later >/workspace/a")
    await node.destroy("p")
    specs = [Spec(sandbox=f"f{n}", image=str(root), disk_mb=32) for n in range(8)]
    async with asyncio.TaskGroup() as tasks:
        for one in specs:
            tasks.create_task(node.fork("s1", one))
    for one in specs:
        said = await Shell(node, one)(
            "cat /workspace/a; ls /var/kept /var; stat -c %u:%g /var/kept/two; echo x >/workspace/a"
        )
        assert said == "1/var:\nkept\n\n/var/kept:\ntwo\n1234:1234\n"
    # A snapshot of a fork stands on the first one, which may be dropped.
    await node.snapshot(specs[0], "s2")
    assert await node.drop("s1")
    assert not await node.drop("s1")
    for one in specs:
        await node.destroy(one.sandbox)
    await node.fork("s2", specs[0])
    assert await Shell(node, specs[0])("cat /workspace/a /var/kept/two; ls /var") == "x\n2\nkept\n"
    with pytest.raises(InvalidRequest, match="snapshot is 's1'"):
        await node.fork("s1", specs[1])
    await node.destroy(specs[1].sandbox)


@needs_root
async def test_images_are_named_and_the_cache_is_bounded(node: Bubblewrap, root: Path, tmp_path: Path) -> None:
    spec = Spec(sandbox="i", image="nothing")
    with pytest.raises(
        InvalidRequest, match="image is 'nothing'; allowed are those in the cache of this node: none yet"
    ):
        await node.create(spec, {})
    with pytest.raises(InvalidRequest, match="allowed is a folder below"):
        await node.create(Spec(sandbox="i", image="/etc"), {})
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, ".")
    about = images.Image(size=0, env={"FROM_IMAGE": "yes"}, workdir="/var", user="worker")
    size = node.image_cache.add_archive("small", archive, about).size
    spec = Spec(sandbox="i", image="small", disk_mb=8)
    await node.create(spec, {})
    assert await Shell(node, spec)("id -u; echo $FROM_IMAGE; ls") == "1234\nyes\ngone\nkept\n"
    with pytest.raises(SandboxBusy, match="image 'small' is in use"):
        node.image_cache.remove("small")
    bounded = images.Images(tmp_path / "cache", int(2.5 * size))
    for name in ("a", "b"):
        bounded.add_archive(name, archive, about)
    assert bounded.get("a") is not None
    bounded.add_archive("c", archive, about)
    assert bounded.names() == ["a", "c"]
    with pytest.raises(InvalidRequest, match="allowed are"):
        images.Images(tmp_path / "tiny", 1000).add_archive("a", archive, about)


async def test_a_snapshot_without_an_image_holds_the_writable_folders(node: Bubblewrap) -> None:
    spec = Spec(sandbox="p")
    await node.create(spec, {"/workspace/a": "1", "/workspace/b": "2"})
    sh = Shell(node, spec)
    await sh(
        "rm b; echo t >/tmp/t; (while :; do echo tick >>/workspace/ticks; sleep 0.05; done) >/dev/null 2>&1 & "
        "until [ -s ticks ]; do sleep 0.05; done"
    )
    await node.snapshot(spec, "s")
    await sh("echo changed >a; touch new")
    further = "n=$(grep -c . ticks); until [ $(grep -c . ticks) -gt $n ]; do sleep 0.05; done; echo goes on"
    assert await sh(further) == "goes on\n"
    other = Spec(sandbox="f")
    await node.fork("s", other)
    assert (await Shell(node, other)("ls; cat a /tmp/t")).split() == ["a", "ticks", "1t"]
    await node.restore(spec, "s")
    assert (await sh("ls; cat a /tmp/t")).split() == ["a", "ticks", "1t"]
    assert node.execs("p")[0] == sh.count, "commands of before stay recorded"


async def test_row_26_row_28_background_commands_outlive_the_service(tmp_path: Path) -> None:
    backend = Bubblewrap(tmp_path / "node")
    await backend.start()
    spec = Spec(sandbox="s")
    try:
        await backend.create(spec, {})
        await backend.spawn(
            spec,
            "job",
            "echo begun; cat; while [ ! -e go ]; do sleep 0.05; done; exit 7",
            60.0,
            100,
            Options(stdin=b"given\n"),
        )
        await backend.spawn(spec, "quick", "printf '\\377abc'; exit 3", 60.0, 100)
        assert (await backend.poll("s", "quick", 60.0)).result.exit_code == 3  # type: ignore[union-attr] - it ended
        assert (await backend.poll("s", "job")).running
    finally:
        await backend.stop()
    again = Bubblewrap(tmp_path / "node")
    assert await again.start() == ["s"]
    try:
        assert (await again.poll("s", "job")).running
        while (await again.logs("s", "job", "stdout", 0, 100)).data != b"begun\ngiven\n":
            assert (await again.poll("s", "job", 0.02)).running
        await again.write("s", "/workspace/go", b"", 0o644)
        done = await again.poll("s", "job", 60.0)
        assert done.result is not None
        assert (done.running, done.result.exit_code, done.result.stdout) == (False, 7, "begun\ngiven\n")
        page = await again.logs("s", "quick", "stdout", -3, 100)
        assert (page.data, page.offset, page.total, page.running) == (b"abc", 1, 4, False)
        with pytest.raises(InvalidRequest, match="exec_id is 'other'"):
            await again.poll("s", "other")
    finally:
        await again.destroy("s")
        await again.stop()


async def test_a_background_command_is_killed_with_all_that_it_started(node: Bubblewrap) -> None:
    spec = Spec(sandbox="s")
    await node.create(spec, {})
    sh = Shell(node, spec)
    await node.spawn(spec, "tree", "setsid sleep 311 & sleep 312", 60.0, 100)
    await node.spawn(spec, "polite", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done", 300.0, 100)
    await node.spawn(spec, "left", "sleep 313 & exit 0", 60.0, 100)
    assert (await node.poll("s", "left", 60.0)).result is not None

    async def all_run() -> bool:
        up = (await node.logs("s", "polite", "stdout", 0, 10)).data == b"up\n"  # so it has its trap
        seen = await sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        return up and "sleep 311" in seen and "sleep 313" in seen

    await eventually(all_run)
    await node.kill("s", "tree")
    killed = (await node.poll("s", "tree")).result
    assert killed is not None
    assert (killed.killed_by, killed.exit_code) == ("kill", None)
    await node.kill("s", "polite", "TERM")
    polite = (await node.poll("s", "polite", 60.0)).result
    assert polite is not None
    assert (polite.killed_by, polite.exit_code, polite.stdout) == (None, 5, "up\nbye\n")
    assert "sleep 313" in await sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    await node.kill("s", "left")
    await node.kill("s", "left")
    assert "sleep 31" not in await sh("cat /proc/*/cmdline | tr '\\0' ' ' | sed 's/cat.*//'")


async def test_what_a_command_left_is_killed_also_where_that_had_only_just_ended(node: Bubblewrap) -> None:
    """Its monitor saw the end before it heard of the kill: what the command had started ran on."""
    spec = Spec(sandbox="s")
    await node.create(spec, {})
    sh = Shell(node, spec)
    await node.spawn(spec, "job", "sleep 314 & until [ -e go ]; do sleep 0.02; done", 300.0, 100)

    async def runs() -> bool:
        return "sleep 314" in await sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    await eventually(runs)
    monitor = node._claim("s", node._record("s"), "job").pid
    os.kill(monitor, signal.SIGSTOP)
    try:
        [leader] = content(f"/proc/{monitor}/task/{monitor}/children").split()
        await sh("touch go")

        async def ended() -> bool:
            return not tree.runs(int(leader))

        await eventually(ended)
        killing = asyncio.ensure_future(node.kill("s", "job"))
        await asyncio.sleep(0)
    finally:
        os.kill(monitor, signal.SIGCONT)
    await killing
    assert not await runs()


async def test_row_08_a_command_without_output_is_killed(node: Bubblewrap) -> None:
    spec = Spec(sandbox="s")
    await node.create(spec, {})
    done = await node.exec(spec, "a", "echo a; sleep 60", 50.0, 100, Options(no_output_timeout_s=2.0))
    assert (done.killed_by, done.exit_code, done.stdout, done.timed_out) == ("no_output", None, "a\n", False)
    done = await node.exec(
        spec, "b", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done", 50.0, 100, Options(no_output_timeout_s=2.0)
    )
    assert (done.killed_by, done.exit_code) == (None, 0)


async def test_commands_have_a_folder_an_environment_and_a_user(node: Bubblewrap) -> None:
    spec = Spec(sandbox="s", env={"A": "1", "B": "1"})
    await node.create(spec, {"/workspace/deep/x": ""})
    sh = Shell(node, spec)
    assert await sh("pwd; echo $A$B; ls", cwd="deep", env={"B": "2"}) == "/workspace/deep\n12\nx\n"
    with pytest.raises(InvalidRequest, match="cwd is '/workspace/none'"):
        await sh("pwd", cwd="none")
    with pytest.raises(InvalidRequest, match="user is 'nobody-here'"):
        await sh("id", user="nobody-here")
    assert await sh("id -un; echo $HOME", user="nobody") == "nobody\n/nonexistent\n"
    assert await sh("cat", stdin=b"\xffraw") == "\ufffdraw"


@needs_root
async def test_images_survive_a_crash_of_the_service_with_what_was_written(tmp_path: Path, root: Path) -> None:
    spec = Spec(sandbox="s", image=str(root), disk_mb=32)
    first = Bubblewrap(tmp_path / "node", image_roots=[root.parent])
    await first.start()
    await first.create(spec, {})
    await Shell(first, spec)("echo written >/kept; rm /var/gone")
    await first.snapshot(spec, "kept")
    await first.stop()
    again = Bubblewrap(tmp_path / "node", image_roots=[root.parent])
    assert await again.start() == ["s"]
    try:
        shell = Shell(again, spec)
        shell.count = 1
        assert await shell("cat /kept; ls /var") == "written\nkept\n"
        assert again.snapshots() == ["kept"]
        other = Spec(sandbox="f", image=str(root), disk_mb=32)
        await again.fork("kept", other)
        assert await Shell(again, other)("cat /kept; ls /var; echo other >/kept") == "written\nkept\n"
        await again.restore(other, "kept")
        other_shell = Shell(again, other)
        other_shell.count = 1
        assert await other_shell("cat /kept") == "written\n"
    finally:
        for name in ("s", "f"):
            await again.destroy(name)
        await again.drop("kept")
        await again.stop()


@needs_root
async def test_layers_become_one_image_without_what_they_removed(node: Bubblewrap, root: Path) -> None:
    spec = Spec(sandbox="s", image=str(root), disk_mb=32)
    await node.create(spec, {})
    shell = Shell(node, spec)
    await shell("rm /var/gone; rm -r /var/kept; mkdir /var/kept; echo 2 >/var/kept/two; ln -s two /var/kept/link")
    await shell("rm -r /root; echo file >/root; chown 1234:77 /var/kept/two; chmod 4711 /var/kept/two")
    await node.snapshot(spec, "s")
    layers = [Path(path) for path in (root, *(tmp for tmp in (node._root / "layers").iterdir() if tmp.is_dir()))]
    node.image_cache.add_layers("flat", layers, images.Image(size=0))
    flat = Spec(sandbox="f", image="flat", disk_mb=8)
    await node.fork("s", Spec(sandbox="g", image=str(root), disk_mb=32))
    await node.create(flat, {})
    look = "ls /var /var/kept; cat /root /var/kept/link; stat -c '%u %g %a' /var/kept/two; cat /etc/base"
    said = await Shell(node, flat)(look)
    assert "gone" not in said
    assert "one" not in said.split()
    assert "1234 77 4711" in said
    assert said == await Shell(node, Spec(sandbox="g", image=str(root)))(look)


@needs_root
@pytest.mark.parametrize("with_image", [True, False])
async def test_a_snapshot_that_is_being_taken_is_not_removed_as_unused(
    node: Bubblewrap, root: Path, with_image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dropped another one meanwhile, as each evaluation of a copy does, removed its files: it failed, or held a
    part of them only.
    """
    spec = Spec(sandbox="p", image=str(root) if with_image else None)
    await node.create(spec, {"/workspace/a": "1"})
    await node.snapshot(spec, "other")
    ask = node._launcher.request

    async def request(op: str, **fields: Any) -> dict[str, Any] | None:
        made = await ask(op, **fields)
        if op == "snapshot":
            assert await node.drop("other")
        return made

    monkeypatch.setattr(node._launcher, "request", request)
    assert await node.snapshot(spec, "s") > 0
    fork = Spec(sandbox="f", image=spec.image)
    await node.fork("s", fork)
    assert await Shell(node, fork)("cat /workspace/a") == "1"


def test_a_sandbox_that_becomes_ready_while_its_layers_are_looked_at_has_them_in_use(tmp_path: Path) -> None:
    """The look is made in a thread, beside what makes sandboxes."""
    backend = Bubblewrap(tmp_path / "node")
    record = Processes(boot="b", token="t", slot=None, isolated=True, layers=("l",))

    class Table(dict[str, Processes]):
        def values(self) -> Any:
            found = list(super().values())
            if backend._making:  # it becomes ready right after the first look at either table
                backend._live["s"] = backend._making.pop("s")
            return found

    backend._making, backend._live = Table(s=record), Table()
    assert record in backend._records()
