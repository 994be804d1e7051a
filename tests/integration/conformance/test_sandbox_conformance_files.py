"""What every backend does alike with files, limits and evaluations; see `test_sandbox_conformance`."""

import asyncio
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from opengyre.sandbox.core import (
    InvalidRequest,
    OutputLimit,
)
from support.both_backends import Box, Node, checks, until

pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


# Files


async def test_row_20_files_of_all_sizes_come_back_whole(box: Box, tmp_path: Path):
    backend = box.node.backend
    for size in (0, 1, 128 << 10, 5 << 20):
        data = os.urandom(size)
        (tmp_path / "out").write_bytes(data)
        await backend.write_from(box.name, f"/workspace/sub/f{size}", tmp_path / "out", 0o640)
        await backend.read_to(box.name, f"/workspace/sub/f{size}", tmp_path / "in", 5 << 20)
        assert (tmp_path / "in").read_bytes() == data
        done = await box.run(f"sha256sum < sub/f{size}; stat -c '%a %u' sub/f{size}")
        assert done.stdout == f"{hashlib.sha256(data).hexdigest()}  -\n640 1000\n"
    await box.node.manager.write(box.name, "sub/f1", b"over", 0o644)
    assert await box.node.manager.read(box.name, "sub/f1", 100) == b"over"


async def test_abuse_no_path_leads_out(box: Box, tmp_path: Path):
    (tmp_path / "secret").write_text("s3cret")
    await box.run(f"ln -s {tmp_path}/secret link; ln -s / root; mkfifo fifo; ln -s /proc/1/environ env; mkdir dir")
    manager = box.node.manager
    for path in ("link", f"root{tmp_path}/secret", "fifo", "env", "dir", "../etc/shadow", "/proc/self/environ", "none"):
        with pytest.raises(InvalidRequest, match="path"):
            await manager.read(box.name, path, 1000)
    for path in ("link", "fifo", "dir", "root/etc/x", "/etc/x", "../x"):
        with pytest.raises(InvalidRequest, match="path"):
            await manager.write(box.name, path, b"x", 0o644)
    assert (tmp_path / "secret").read_text() == "s3cret"


async def test_a_file_over_the_limit_is_an_error_of_its_own(shared: Box):
    await shared.run("head -c 1001 /dev/zero > big")
    with pytest.raises(OutputLimit, match="limit of 1000"):
        await shared.node.manager.read("shared", "big", 1000)
    assert len(await shared.node.manager.read("shared", "big", 1001)) == 1001


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as made:
        for member, data in members:
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o750 if kind == tarfile.DIRTYPE else 0o640
    return made


async def test_directories_go_in_and_out_whole(box: Box, tmp_path: Path):
    backend = box.node.backend
    there = archive(
        tmp_path / "in.tar",
        (member("d", tarfile.DIRTYPE), b""),
        (member("d/é"), b"text" * 50_000),
        (member("d/link", tarfile.SYMTYPE, "é"), b""),
        (member("d/pipe", tarfile.FIFOTYPE), b""),
    )
    packed = await backend.put(box.name, "/workspace/new", there)
    assert (packed.entries, packed.skipped) == (3, 1)
    assert (
        await box.run("cd new/d; wc -c < link; stat -c %a,%U é | cut -d, -f1; ls")
    ).stdout == "200000\n640\nlink\né\n"
    got = await backend.get(box.name, "/workspace/new", tmp_path / "out.tar", 1 << 20)
    assert got.entries == 3
    with tarfile.open(tmp_path / "out.tar") as back:
        found = {one.name.removeprefix("./"): one for one in back.getmembers()}
        assert set(found) == {"d", "d/é", "d/link"}
        stream = back.extractfile(found["d/é"])
        assert stream is not None
        assert stream.read() == b"text" * 50_000
        assert found["d/link"].linkname == "é"
    with pytest.raises(OutputLimit):
        await backend.get(box.name, "/workspace/new", tmp_path / "small.tar", 1000)


@pytest.mark.parametrize(
    "bad",
    [
        [(member("../out"), b"x")],
        [(member("/tmp/out"), b"x")],
        [(member("a/../../out"), b"x")],
        [(member("l", tarfile.SYMTYPE, "/tmp"), b""), (member("l/out"), b"x")],
        [(member("h", tarfile.LNKTYPE, "../out"), b"")],
    ],
    ids=["dots", "absolute", "dots within", "through a link", "hard link"],
)
async def test_abuse_an_archive_that_leads_out_is_refused(shared: Box, tmp_path: Path, bad: list):
    there = archive(tmp_path / "bad.tar", *bad)
    with pytest.raises(InvalidRequest):
        await shared.node.backend.put("shared", "/workspace/deep/er", there)
    assert (await shared.run("ls /tmp/out /workspace/out /workspace/deep/out")).stdout == ""


async def test_what_is_no_archive_is_refused(shared: Box, tmp_path: Path):
    (tmp_path / "bad.tar").write_bytes(b"no archive" * 1000)
    with pytest.raises(InvalidRequest, match="archive"):
        await shared.node.backend.put("shared", "/workspace/x", tmp_path / "bad.tar")


# Limits and isolation


async def test_the_root_is_read_only_and_commands_have_no_rights(shared: Box):
    done = await shared.run(
        "touch /usr/x /etc/x /x; grep -E '^(CapEff|CapPrm|CapInh|CapAmb|NoNewPrivs)' /proc/self/status"
    )
    assert done.stderr.count("Read-only file system") + done.stderr.count("Permission denied") == 3
    values = dict(line.split(":\t") for line in done.stdout.splitlines())
    assert values.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in values.values()} == {0}
    for command in ("mount -t tmpfs none /tmp", "mknod /tmp/null c 1 3", "chroot / true", "kill -9 1 && ! kill -0 1"):
        assert (await shared.run(command)).exit_code not in (0, None), command


async def test_the_network_is_none(shared: Box):
    done = await shared.run("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; wc -l < /proc/net/route")
    assert done.stdout == "lo\n1\n"
    assert "127.0.0.1" in (await shared.run("grep localhost /etc/hosts")).stdout


async def test_trap_04_a_full_folder_is_an_error_and_spares_the_sandbox(box: Box):
    done = await box.run("for d in /tmp /logs /workspace; do cat /dev/zero > $d/a; cat /dev/zero > $d/b; done; ls")
    assert "No space left" in done.stderr or "too large" in done.stderr.lower()
    sizes = await box.run("du -sm /workspace /tmp | cut -f1")
    assert all(int(size) <= 16 for size in sizes.stdout.split())
    assert (await box.run("rm /tmp/? /logs/? /workspace/? && echo ok")).stdout == "ok\n"


async def test_trap_09_what_the_kernel_ends_for_memory_is_said_and_the_sandbox_lives(node: Node):
    if not node.backend.capabilities().memory_limit:
        pytest.skip("this machine lets no memory cgroup be made")
    await node.create("small", memory_mb=32)
    box = Box(node, "small")
    done = await box.run("head -c 200m /dev/zero | tail -c 150m | wc -c; echo after")
    assert "157286400" not in done.stdout
    assert done.oom
    assert not (await box.run("echo ok")).oom
    await node.manager.destroy("small")


async def test_row_18_a_fork_bomb_is_bounded_and_others_answer(box: Box, shared: Box):
    bomb = asyncio.ensure_future(box.run("f() { f | f & }; f; f; while :; do f; done", timeout_s=1.5))
    await asyncio.sleep(0.5)
    assert (await shared.run("echo ok")).stdout == "ok\n"
    assert (await bomb).exit_code != 0
    await box.node.backend.quiet(box.name)
    assert (await box.run("echo ok")).stdout == "ok\n"


async def test_row_17_orphans_leave_no_zombies(box: Box):
    assert (await box.run("i=0; while [ $i -lt 200 ]; do (true & ); i=$((i+1)); done; echo ok")).stdout == "ok\n"

    async def none() -> bool:
        done = await box.run("cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -d' ' -f1 | sort | uniq -c")
        assert "S" in done.stdout
        return "Z" not in done.stdout

    await until(none)  # an init that is a program reaps when it comes to it


async def test_quiet_ends_everything_but_the_sandbox(box: Box):
    await box.run("sleep 51.5 & (setsid env -i /bin/sleep 52.5 &)")
    await box.node.backend.quiet(box.name)
    assert [await box.count(f"sleep {n}") for n in ("51.5", "52.5")] == [0, 0]


# Evaluation


async def test_row_03_leftovers_end_before_the_checks(box: Box):
    await box.run(
        "(while :; do echo x >> log; sleep 0.05; done) & "
        "(setsid env -i sh -c 'while :; do echo y >> /workspace/log; done') & "
        "until grep -q x log && grep -q y log; do sleep 0.05; done"
    )
    done = await box.node.manager.verify(checks("v", box.name, "shared", "cp log before; sleep 0.4; cmp log before"))
    assert (done.valid, done.passed) == (True, 1)


async def test_row_30_the_clean_sandbox_has_the_work_and_nothing_that_runs(box: Box):
    await box.run(
        "mkdir -p d /logs/verifier; echo work > d/f; chmod 750 d/f; ln -s d/f l; mkfifo p; "
        "echo 1 > /logs/verifier/reward.txt; echo evil > /tmp/.profile"
    )
    await box.run(
        "(while :; do echo x > /logs/verifier/reward.txt; echo x >> d/f; sleep 0.05; done) & "
        "until grep -q x d/f; do sleep 0.05; done"
    )
    request = checks(
        "w",
        box.name,
        "separate",
        "grep -q . d/f && test -x d/f && test -L l",
        "test ! -e p",
        "test ! -e /logs/verifier && test ! -e /tmp/.profile",
        "cp d/f /tmp/g; sleep 0.3; cmp d/f /tmp/g",
    )
    done = await box.node.manager.verify(request)
    assert (done.valid, done.passed, done.infra_error) == (True, 4, None)
    assert await box.node.manager.verify(request) == done
    assert [info.sandbox for info in box.node.manager.listing({}) if "." in info.sandbox] == []
