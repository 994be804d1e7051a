"""What every backend does alike. Tests are named after the findings that they answer: `row_N` is a bug that others had,
`trap_N` one that was met while the backends were made.

The Docker part runs where an engine answers (``DOCKER_HOST``, or the usual socket) and has the image of
``TEST_SANDBOX_IMAGE``; docs/sandbox.md says how one is had, and shows a run.
"""

import asyncio
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from opengyre.proto.sandbox import RenewRequest, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox.core import (
    InfraError,
    InvalidRequest,
    OutputLimit,
    SandboxBusy,
    SandboxError,
    SandboxGone,
    Spec,
)
from support import both_backends
from support.both_backends import Box, Node, until

BOTH = [pytest.param(kind, marks=both_backends.needs[kind], id=kind) for kind in ("bubblewrap", "docker")]
pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BOTH)
async def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with both_backends.started(request.param, tmp_path_factory.mktemp("node") / "n") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(node: Node) -> Box:
    """A sandbox that tests share which leave nothing in it that another one minds."""
    await node.create("shared", files={"in/a.txt": "hello\n"})
    return Box(node, "shared")


@pytest_asyncio.fixture(loop_scope="module")
async def box(node: Node, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """A sandbox of the test's own."""
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    await node.create(name)
    yield Box(node, name)
    await node.manager.destroy(name)


# Commands


async def test_a_command_runs_in_its_workspace_with_its_files(shared: Box):
    done = await shared.run("pwd; cat in/a.txt; id -u; hostname; echo oops >&2; exit 3")
    assert (done.exit_code, done.stderr) == (3, "oops\n")
    assert done.stdout == "/workspace\nhello\n1000\nsandbox\n"
    assert (done.timed_out, done.killed_by, done.isolated, done.oom) == (False, None, True, False)


async def test_row_40_an_exit_status_is_never_lost(shared: Box):
    for _ in range(3):
        results = await asyncio.gather(*(shared.run("exit 42") for _ in range(8)))
        assert {done.exit_code for done in results} == {42}


async def test_row_01_timeout_kills_the_tree(shared: Box):
    began = time.monotonic()
    done = await shared.run("sh -c 'sleep 301.5; :' | cat", timeout_s=0.5)
    assert (done.timed_out, done.exit_code, done.killed_by) == (True, None, "timeout")
    assert time.monotonic() - began < 20
    assert await shared.count("sleep 301.5") == 0


async def test_trap_06_timeout_kills_what_left_its_session_parents_and_environment(shared: Box):
    other = asyncio.ensure_future(shared.run("sleep 2; echo unharmed"))
    await shared.sees("sleep 2 ")
    done = await shared.run("setsid sleep 61.5 & (setsid env -i /bin/sleep 62.5 &) ; sleep 63.5", timeout_s=0.7)
    assert done.timed_out
    assert [await shared.count(f"sleep {n}") for n in ("61.5", "62.5", "63.5")] == [0, 0, 0]
    assert (await other).stdout == "unharmed\n"


async def test_row_05_a_background_child_that_holds_stdout_holds_nobody(box: Box):
    began = time.monotonic()
    done = await box.run("sleep 31.5 & echo started")
    assert (done.stdout, done.exit_code) == ("started\n", 0)
    assert time.monotonic() - began < 10
    assert await box.count("sleep 31.5") == 1


async def test_row_06_all_output_is_there_when_a_background_child_goes_on(box: Box):
    done = await box.run("sleep 31.5 & head -c 200000 /dev/zero | tr '\\0' x", limit=300_000)
    assert (done.stdout_bytes, done.stdout_truncated, len(done.stdout)) == (200_000, False, 200_000)


async def test_row_08_partial_output_is_kept_on_timeout(shared: Box):
    done = await shared.run("echo a; echo b >&2; sleep 9", timeout_s=1)
    assert (done.stdout, done.stderr, done.timed_out) == ("a\n", "b\n", True)


async def test_row_08_silence_can_be_bounded_as_well(shared: Box):
    done = await shared.run_so("echo a; sleep 9", no_output_timeout_s=0.5)
    assert (done.stdout, done.killed_by, done.exit_code) == ("a\n", "no_output", None)


async def test_row_09_the_next_command_works_after_a_timeout(shared: Box):
    assert (await shared.run("sleep 9", timeout_s=0.2)).timed_out
    assert (await shared.run("echo ok")).stdout == "ok\n"


async def test_row_11_output_that_is_not_utf8_is_replaced(shared: Box):
    done = await shared.run("printf '\\377\\376\\0abc'")
    assert (done.stdout, done.stdout_bytes) == ("\ufffd\ufffd\0abc", 6)


async def test_row_12_wide_characters_stay_whole_over_chunks_and_cuts(shared: Box):
    await shared.run("i=0; while [ $i -lt 7000 ]; do printf '€€€€€€€€€€'; i=$((i+1)); done > /tmp/wide")
    whole = await shared.run("cat /tmp/wide", limit=300_000)
    assert whole.stdout == "€" * 70_000
    cut = await shared.run("cat /tmp/wide", limit=1000)
    assert "\ufffd" not in cut.stdout
    assert (cut.stdout_bytes, cut.stdout_truncated) == (210_000, True)
    assert set(cut.stdout.split("[")[0].strip()) == {"€"}


async def test_row_13_truncation_is_said_with_the_true_count(shared: Box):
    done = await shared.run("head -c 10001 /dev/zero | tr '\\0' x", limit=10_000)
    assert (done.stdout_truncated, done.stdout_bytes) == (True, 10_001)
    assert not (await shared.run("head -c 10000 /dev/zero | tr '\\0' x", limit=10_000)).stdout_truncated


async def test_row_14_a_flood_is_capped_counted_and_killed(box: Box):
    done = await box.run("yes; echo after", limit=1000)
    assert (done.killed_by, done.exit_code, done.stdout_truncated) == ("output", None, True)
    assert 16 << 20 <= done.stdout_bytes <= 17 << 20
    assert len(done.stdout) < 1100
    assert (await box.run("echo ok")).stdout == "ok\n"
    assert await box.count("yes") == 0


async def test_row_15_standard_input_is_empty(shared: Box):
    began = time.monotonic()
    assert (await shared.run("cat; echo done")).stdout == "done\n"
    assert time.monotonic() - began < 10


async def test_row_16_standard_input_that_is_given_ends(shared: Box):
    done = await shared.run_so("cat; echo done", stdin=b"\0\xffgiven\n", timeout_s=10)
    assert done.stdout == "\0\ufffdgiven\ndone\n"


@pytest.mark.parametrize("field", ["timeout_s", "limit"])
async def test_row_41_a_command_has_a_deadline_and_a_cap(shared: Box, field: str):
    for value in (-1, 10**9):
        bounds: dict[str, Any] = {field: value}
        with pytest.raises(InvalidRequest, match="allowed is"):
            await shared.run("true", **bounds)


async def test_row_10_no_prompt_and_no_profile_is_read(shared: Box):
    await shared.run("echo 'echo noise; PS1=x' | tee /workspace/.bashrc > /workspace/.profile")
    assert (await shared.run("echo ok")).stdout == "ok\n"
    assert (await shared.run("rm .bashrc .profile")).exit_code == 0


async def test_trap_10_a_long_command_is_no_argument(shared: Box):
    text = "x" * 200_000
    assert (await shared.run(f"printf %s '{text}' | wc -c")).stdout.strip() == "200000"


async def test_trap_01_the_environment_of_the_service_is_not_seen(shared: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_SERVICE", "hunter2-in-the-environment")
    done = await shared.run(
        "env; for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' <$f 2>/dev/null; done", limit=1 << 19
    )
    assert "PATH=" in done.stdout
    assert "hunter2" not in done.stdout
    assert not done.stdout_truncated


async def test_environment_folder_and_user_of_one_command(shared: Box):
    done = await shared.run_so("pwd; echo $A; id -u", cwd="/tmp", env={"A": "1"})
    assert done.stdout == "/tmp\n1\n1000\n"
    if shared.node.backend.capabilities().users:
        assert (await shared.run_so("id -u", user="1234")).stdout == "1234\n"


# Background commands


async def written(box: Box, size: int) -> bool:
    return (await box.node.backend.logs(box.name, "job", "stdout", 0, 100)).total >= size


async def test_row_26_a_background_command_is_polled_read_and_its_status_kept(box: Box):
    backend = box.node.backend
    await backend.spawn(box.spec, "job", "echo one; sleep 0.6; echo two; exit 7", 20, 1000)
    assert (await backend.poll(box.name, "job")).running
    await until(partial(written, box, 4))
    page = await backend.logs(box.name, "job", "stdout", 0, 100)
    assert (page.data, page.running) == (b"one\n", True)
    status = await backend.poll(box.name, "job", 10)
    assert status.result is not None
    assert (status.running, status.result.exit_code, status.result.stdout) == (False, 7, "one\ntwo\n")
    assert (await backend.logs(box.name, "job", "stdout", -4, 100)).data == b"two\n"
    assert (await box.run("echo one; sleep 0.6; echo two; exit 7", exec_id="job")).exit_code == 7
    with pytest.raises(InvalidRequest, match="none"):
        await backend.poll(box.name, "none")


async def test_row_27_a_background_command_is_killed_with_its_tree(box: Box):
    backend = box.node.backend
    await backend.spawn(box.spec, "job", "(setsid env -i /bin/sleep 41.5 &) ; sleep 42.5", 60, 1000)
    await box.sees("sleep 41.5")
    await backend.kill(box.name, "job")
    status = await backend.poll(box.name, "job", 10)
    assert status.result is not None
    assert (status.result.exit_code, status.result.killed_by, status.result.timed_out) == (None, "kill", False)
    assert [await box.count(f"sleep {n}") for n in ("41.5", "42.5")] == [0, 0]
    await backend.kill(box.name, "job")


async def test_a_signal_reaches_a_background_command(box: Box):
    backend = box.node.backend
    await backend.spawn(
        box.spec, "job", "trap 'echo heard; exit 5' TERM; echo up; while :; do sleep 0.05; done", 60, 1000
    )
    await until(partial(written, box, 3))
    await backend.kill(box.name, "job", "TERM")
    status = await backend.poll(box.name, "job", 10)
    assert status.result is not None
    assert (status.result.stdout, status.result.exit_code) == ("up\nheard\n", 5)


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
    began = time.monotonic()
    assert (await shared.run("echo ok")).stdout == "ok\n"
    assert time.monotonic() - began < 10
    assert (await bomb).exit_code != 0
    await box.node.backend.quiet(box.name)
    assert (await box.run("echo ok")).stdout == "ok\n"


async def test_row_17_orphans_leave_no_zombies(box: Box):
    assert (await box.run("i=0; while [ $i -lt 200 ]; do (true & ); i=$((i+1)); done; echo ok")).stdout == "ok\n"
    done = await box.run("cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -d' ' -f1 | sort | uniq -c")
    assert "S" in done.stdout
    assert "Z" not in done.stdout


async def test_quiet_ends_everything_but_the_sandbox(box: Box):
    await box.run("sleep 51.5 & (setsid env -i /bin/sleep 52.5 &)")
    await box.node.backend.quiet(box.name)
    assert [await box.count(f"sleep {n}") for n in ("51.5", "52.5")] == [0, 0]


# Evaluation


def checks(name: str, sandbox: str, mode: str, *commands: str) -> VerifyRequest:
    made = tuple(Check(name=f"c{n}", command=text, weight=1.0) for n, text in enumerate(commands))
    return VerifyRequest(sandbox=sandbox, verify_id=name, checks=made, mode=mode)  # type: ignore[arg-type]  # one of the modes


async def test_row_03_leftovers_end_before_the_checks(box: Box):
    await box.run(
        "(while :; do echo x >> log; sleep 0.05; done) & "
        "(setsid env -i sh -c 'while :; do echo y >> /workspace/log; done') & sleep 0.2"
    )
    done = await box.node.manager.verify(checks("v", box.name, "shared", "cp log before; sleep 0.4; cmp log before"))
    assert (done.valid, done.passed) == (True, 1)


async def test_row_30_the_clean_sandbox_has_the_work_and_nothing_that_runs(box: Box):
    await box.run(
        "mkdir -p d /logs/verifier; echo work > d/f; chmod 750 d/f; ln -s d/f l; mkfifo p; "
        "echo 1 > /logs/verifier/reward.txt; echo evil > /tmp/.profile"
    )
    await box.run("(while :; do echo x > /logs/verifier/reward.txt; echo x > d/f; sleep 0.05; done) & sleep 0.2")
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
    results = await asyncio.gather(
        *(box.run("echo x >> count; sleep 0.2; wc -l < count", exec_id="e") for _ in range(4))
    )
    assert {done.stdout for done in results} == {"1\n"}
    with pytest.raises(InvalidRequest, match="another command"):
        await box.run("echo other", exec_id="e")


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
    began = time.monotonic()
    assert (await node.manager.destroy("busy")).existed
    assert time.monotonic() - began < 5
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
    began = time.monotonic()
    await asyncio.gather(*(node.manager.destroy(name) for name in names))
    assert time.monotonic() - began < 10  # row 39: nothing waits for a grace time


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
    assert "network_allowlist" in refused
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
    await node.backend.spawn(spec, "ticks", "while :; do echo t >> ticks; sleep 0.05; done", 60, 1000)
    await node.backend.exec(spec, "e", "rm drop; echo more >> keep", 10, 1000)
    assert await node.backend.snapshot(spec, "snap") > 0
    assert node.backend.snapshots() == ["snap"]
    after = await node.backend.exec(
        spec, "f", "n=$(wc -l < ticks); sleep 0.3; [ $(wc -l < ticks) -gt $n ] && echo goes on", 10, 1000
    )
    assert after.stdout == "goes on\n"
    await node.backend.destroy("parent")
    forks = [Spec(sandbox=f"fork{n}", image=image) for n in range(8)]
    await asyncio.gather(*(node.backend.fork("snap", one) for one in forks))
    results = await asyncio.gather(*(node.backend.exec(one, "e", "cat keep; ls", 10, 1000) for one in forks))
    assert {done.stdout for done in results} == {"keptmore\nkeep\nticks\n"}
    await node.backend.exec(forks[0], "g", "echo other > keep; touch new", 10, 1000)
    await node.backend.restore(forks[0], "snap")
    assert (await node.backend.exec(forks[0], "h", "cat keep; ls", 10, 1000)).stdout == "keptmore\nkeep\nticks\n"
    for one in forks:
        await node.backend.destroy(one.sandbox)
    assert await node.backend.drop("snap")
    assert not await node.backend.drop("snap")
    with pytest.raises(InvalidRequest, match="snapshot"):
        await node.backend.fork("snap", Spec(sandbox="late"))
    assert node.backend.snapshots() == []


async def test_a_second_service_on_the_same_folder_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch):
    module = f"opengyre.sandbox.{node.kind}"
    monkeypatch.setattr(f"{module}.LOCK_BOUND_S", 0.2)
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


@pytest.mark.parametrize("kind", BOTH)
async def test_row_23_28_a_killed_service_finds_what_lives_with_its_commands_and_leaks_nothing(
    kind: str, tmp_path: Path
):
    root = tmp_path / "node"
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(  # noqa: ASYNC220 - it is killed, not waited for
        [sys.executable, "-c", HOST, kind, str(root), "2.5"],
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


@pytest.mark.parametrize("kind", BOTH)
async def test_every_error_is_a_type_of_its_own(kind: str, tmp_path: Path):
    async with both_backends.started(kind, tmp_path / "node") as node:
        for unknown in (node.backend.alive("none"),):
            assert not await unknown
        with pytest.raises(SandboxGone):
            await node.backend.read("none", "/workspace/x", 10)
        with pytest.raises(SandboxGone):
            await node.backend.exec(Spec(sandbox="none"), "e", "true", 5, 10)
        await node.create("v")
        verifying = asyncio.ensure_future(node.manager.verify(checks("v", "v", "shared", "sleep 0.5")))
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxBusy):
            await Box(node, "v").run("true")
        await verifying
        for name in ("SandboxGone", "SandboxBusy", "OutputLimit", "InfraError", "InvalidRequest"):
            kinds = [one for one in SandboxError.__subclasses__() if one.__name__ == name]
            assert len({one.kind for one in kinds}) == 1
