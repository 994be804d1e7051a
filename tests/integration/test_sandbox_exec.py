"""Real sandboxes: what commands may and may not do, and what their callers are told. Named after the findings."""

import asyncio
import hashlib
import os
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxSpec, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox import machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.commands import SPOOL_MB
from opengyre.sandbox.core import InvalidRequest, OutputLimit, SandboxError, SandboxGone, Spec
from opengyre.sandbox.lease import State
from opengyre.sandbox.manager import Manager
from support import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]
DEFAULTS = Spec(sandbox="", workspace_mb=16, memory_mb=256, pids=64)


class Box:
    """One node and a sandbox ``s`` on it."""

    def __init__(self, manager: Manager, backend: Bubblewrap) -> None:
        self.manager = manager
        self.backend = backend
        self.count = 0

    async def run(self, command: str, timeout_s: float = 20.0, limit: int = 16384, sandbox: str = "s") -> ExecResult:
        self.count += 1
        request = ExecRequest(
            sandbox=sandbox, exec_id=f"e{self.count}", command=command, timeout_s=timeout_s, output_limit=limit
        )
        return await self.manager.exec(request)

    async def verify(self, *commands: str, timeout_s: float = 10.0, name: str = "v"):
        checks = tuple(Check(name=f"c{n}", command=text, weight=1.0) for n, text in enumerate(commands))
        return await self.manager.verify(VerifyRequest(sandbox="s", verify_id=name, checks=checks, timeout_s=timeout_s))


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def execs_of(backend: Bubblewrap, sandbox: str) -> Path:
    return backend._home(sandbox, backend._live[sandbox]) / "execs"


def marked(backend: Bubblewrap) -> list[str]:
    key = backend.marker("")
    return [value for _, value in processes._marked() if value.startswith(key)]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    backend = Bubblewrap(tmp_path / "node")
    manager = Manager(backend, "n0", DEFAULTS)
    await manager.start()
    try:
        await manager.create(SandboxSpec(sandbox="s", owner="test", files={"in/a.txt": "hello\n"}))
        yield Box(manager, backend)
    finally:
        for info in manager.listing({}):
            await manager.destroy(info.sandbox)
        groups = backend._groups
        await manager.stop()
    assert marked(backend) == []
    assert not any(top.own.exists() for top in groups._tops)
    assert list((tmp_path / "node" / "sandboxes").iterdir()) == []
    assert str(tmp_path).encode() not in content("/proc/self/mountinfo")


async def test_a_command_runs_in_its_workspace_with_its_files(box: Box):
    done = await box.run("pwd; cat in/a.txt; echo oops >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "/workspace\nhello\n", "oops\n")
    assert (done.timed_out, done.killed_by, done.isolated) == (False, None, True)
    assert (await box.run("id -u; whoami; hostname")).stdout == "1000\nagent\nsandbox\n"


# Section 4.3


async def test_trap_01_clearenv_does_not_hide_service_environment(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_SERVICE", "hunter2-in-the-environment")
    done = await box.run(
        "env; for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' <$f 2>/dev/null; done; cat /proc/1/environ"
    )
    assert "PATH=" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    first = box.backend._live["s"].pid
    assert b"hunter2" not in content(f"/proc/{first}/environ")
    launcher = box.backend._launcher._process
    assert launcher is not None
    assert content(f"/proc/{launcher.pid}/environ") == b"GYRE_EXEC=launcher\0"


async def test_trap_03_exec_has_no_capabilities(box: Box):
    done = await box.run("grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    values = dict(line.split(":\t") for line in done.stdout.splitlines())
    assert {int(value, 16) for name, value in values.items() if name.startswith("Cap")} == {0}
    assert values["NoNewPrivs"] == "1"


MUST_FAIL = (
    "mount -t tmpfs none /tmp",
    "umount /workspace",
    "mknod /tmp/null c 1 3",
    "unshare -U true",
    "unshare -m true",
    "chroot / true",
    "touch /usr/bin/x",
    "touch /etc/x",
    "touch /x",
    "echo 1 > /proc/sys/kernel/hostname",
    "echo b > /proc/sysrq-trigger",
    "hostname other",
    "kill -9 1 && ! kill -0 1",
    "cat /proc/1/environ",
    "ls /root/.. && ls /home || ls /root/.ssh",
    "nsenter -t 1 -m true",
)


async def test_abuse_that_must_fail(box: Box):
    for command in MUST_FAIL:
        done = await box.run(command)
        assert done.exit_code not in (0, None), (command, done)
        assert (await box.run("echo ok")).stdout == "ok\n", command


async def test_abuse_a_set_user_id_program_gives_nothing(box: Box):
    done = await box.run("[ -u /usr/bin/mount ] && cp /usr/bin/mount m; grep CapEff /proc/self/status")
    assert "CapEff:\t0000000000000000" in done.stdout


async def test_abuse_no_host_files_processes_or_sockets_are_seen(box: Box, tmp_path: Path):
    (tmp_path / "secret").write_text("s3cret")
    done = await box.run(
        f"cat {tmp_path}/secret /proc/1/root{tmp_path}/secret; ls /proc | grep -c '^[0-9]'; ls /run /root"
    )
    assert "s3cret" not in done.stdout
    assert int(done.stdout.split()[0]) <= 6


async def test_abuse_the_spool_is_not_reachable_by_the_path_that_proc_shows(box: Box):
    done = await box.run("p=$(readlink /proc/$$/fd/2); cat $(dirname $p)/claim || ls $(dirname $p) || echo closed")
    assert done.stdout == "closed\n"


async def test_abuse_kill_everything_leaves_the_sandbox(box: Box):
    await box.run("kill -9 -1")
    assert (await box.run("echo ok")).stdout == "ok\n"


async def test_abuse_network_is_none_but_loopback_works(box: Box):
    done = await box.run("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '; cat /proc/net/route | wc -l")
    assert done.stdout == "lo\n1\n"
    script = (
        "import socket\n"
        "s=socket.create_server(('localhost',0)); c=socket.create_connection(s.getsockname()); print('up')\n"
        "try: socket.create_connection(('192.0.2.1',80),1)\nexcept OSError as e: print('none')\n"
    )
    if (await box.run("test -x /usr/bin/python3")).exit_code == 0:
        assert (await box.run(f'/usr/bin/python3 -c "{script}"')).stdout == "up\nnone\n"


async def test_trap_04_filling_tmpfs_is_an_error_and_spares_the_sandbox(box: Box):
    done = await box.run(
        "for d in /tmp /logs /dev/shm /workspace; do cat /dev/zero > $d/fill; done; ls -l /workspace/fill"
    )
    assert "No space left" in done.stderr or "too large" in done.stderr.lower()
    assert (await box.run("rm /tmp/fill /logs/fill /dev/shm/fill /workspace/fill && echo ok")).stdout == "ok\n"


async def test_trap_04_memory_hog_dies_and_the_sandbox_lives(box: Box):
    if not box.backend._groups.memory:
        pytest.skip("no memory cgroup can be made here")
    await box.manager.create(SandboxSpec(sandbox="m", owner="test", memory_mb=32))
    # In one process, and by many small ones together.
    done = await box.run("head -c 200m /dev/zero | tail -c 150m | wc -c; echo after", sandbox="m")
    assert "157286400" not in done.stdout
    many = "for i in 1 2 3 4 5 6 7 8; do (head -c 12m /dev/zero | tail -c 12m >/dev/null) & done; wait; echo after"
    await box.run(many, sandbox="m")
    assert (await box.run("echo ok", sandbox="m")).stdout == "ok\n"


async def test_bug_18_fork_bomb_is_bounded_and_others_answer(box: Box):
    await box.manager.create(SandboxSpec(sandbox="other", owner="test"))
    bomb = asyncio.ensure_future(box.run("f() { f | f & }; f; f; while :; do f; done", timeout_s=1.5))
    await asyncio.sleep(0.5)
    assert (await box.run("echo ok", sandbox="other")).stdout == "ok\n"
    assert len([value for value in marked(box.backend) if value.endswith(".s")]) <= DEFAULTS.pids + 4
    assert not bomb.done() or bomb.result().exit_code != 0
    await bomb
    await box.manager.verify(
        VerifyRequest(sandbox="s", verify_id="v", checks=(Check(name="c", command="true", weight=1.0),))
    )
    assert (await box.run("echo ok")).stdout == "ok\n"
    await eventually(lambda: len([value for value in marked(box.backend) if value.endswith(".s")]) == 1)


async def test_trap_05_background_child_holding_stdout_does_not_hold_the_exec(box: Box):
    done = await box.run("sleep 300 & echo started")
    assert (done.stdout, done.exit_code) == ("started\n", 0)

    async def sleeps() -> bool:
        return "sleep 300 " in (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout

    await eventually(sleeps)


async def test_bug_06_all_output_is_there_when_a_background_child_goes_on(box: Box):
    done = await box.run("sleep 30 & head -c 200000 /dev/zero | tr '\\0' x", limit=300_000)
    assert (done.stdout_bytes, done.stdout_truncated, len(done.stdout)) == (200_000, False, 200_000)


async def test_trap_06_timeout_kills_a_child_that_left_its_session(box: Box):
    done = await box.run("setsid sleep 61 & (setsid env -i /bin/sleep 62 &) ; yes > /dev/null", timeout_s=0.5)
    assert (done.exit_code, done.timed_out, done.killed_by) == (None, True, "timeout")
    await eventually(
        lambda: marked(box.backend) == [box.backend.marker("s")]
    )  # its monitor ends just after it answered
    first = box.backend._live["s"].pid
    await eventually(lambda: content(f"/proc/{first}/task/{first}/children") == b"")


async def test_trap_10_a_long_command_is_no_argument(box: Box):
    text = "x" * 200_000
    done = await box.run(f"printf %s '{text}' | wc -c")
    assert done.stdout.strip() == "200000"
    assert (await box.run("é" * 70_000 + "() { :; }; echo ok")).exit_code in (0, 2)


async def test_trap_11_flood_is_capped_counted_and_killed(box: Box):
    done = await box.run("yes; echo after", limit=1000)
    assert (done.killed_by, done.exit_code) == ("output", None)
    assert done.stdout_truncated
    assert 16 << 20 <= done.stdout_bytes <= 17 << 20
    assert len(done.stdout) < 1100
    assert (await box.run("echo ok")).stdout == "ok\n"
    for _ in range(4):  # their full outputs are kept up to a bound together, the oldest go first
        assert (await box.run("yes")).killed_by == "output"
    kept = list((execs_of(box.backend, "s").parent / "spools").glob("e*.stdout"))
    assert 1 <= len(kept) < 5
    assert "e1.stdout" not in [p.name for p in kept]
    assert sum(p.stat().st_size for p in kept) <= SPOOL_MB << 20
    page = await box.backend.logs("s", "e1", "stdout", 0, 4096)
    assert (page.complete, page.written, page.running) == (False, done.stdout_bytes, False)
    assert page.data == done.stdout.encode()


async def test_trap_13_localhost_has_a_name(box: Box):
    assert "127.0.0.1 localhost" in (await box.run("cat /etc/hosts")).stdout


async def test_trap_14_limits_stay_below_the_inherited_ones(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend = Bubblewrap(tmp_path / "node")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        manager = Manager(backend, "n0", DEFAULTS)
        await manager.start()
        await manager.create(SandboxSpec(sandbox="s", owner="test"))
        assert (await Box(manager, backend).run("echo ok")).stdout == "ok\n"
        await manager.destroy("s")
        await manager.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_trap_15_orphans_leave_no_zombies(box: Box):
    # Zombies count as processes, so that enough of them would stop all further ones.
    assert (await box.run("i=0; while [ $i -lt 200 ]; do (true & ); i=$((i+1)); done; echo ok")).stdout == "ok\n"
    done = await box.run("cat /proc/[0-9]*/stat 2>/dev/null | cut -d' ' -f3 | sort | uniq -c")
    assert "S" in done.stdout
    assert "Z" not in done.stdout


# Section 7


async def test_bug_01_timeout_kills_tree(box: Box):
    began = time.monotonic()
    done = await box.run("sh -c 'sleep 300; :' | cat", timeout_s=0.5)
    assert done.timed_out
    assert time.monotonic() - began < 100
    assert "300" not in (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


async def test_bug_02_destroy_does_not_wait_for_a_busy_loop(box: Box):
    await box.manager.create(SandboxSpec(sandbox="busy", owner="test"))
    busy = asyncio.ensure_future(box.run("while :; do :; done", timeout_s=300, sandbox="busy"))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    assert (await box.manager.destroy("busy")).existed
    assert time.monotonic() - began < 60
    with pytest.raises(SandboxGone):
        await busy
    assert not (await box.manager.destroy("busy")).existed


async def test_bug_03_leftovers_end_before_the_checks(box: Box):
    await box.run(
        "(while :; do echo x >> log; sleep 0.05; done) & "
        "(setsid env -i sh -c 'while :; do echo y >> /workspace/log; done') & "
        "until grep -q x log && grep -q y log; do sleep 0.05; done"
    )
    done = await box.verify("cp log before; sleep 0.4; cmp log before")
    assert (done.valid, done.passed) == (True, 1)


async def test_bug_08_partial_output_is_kept_on_timeout(box: Box):
    done = await box.run("echo a; echo b >&2; sleep 99", timeout_s=3)
    assert (done.stdout, done.stderr, done.timed_out) == ("a\n", "b\n", True)


async def test_bug_09_the_next_command_works_after_a_timeout(box: Box):
    assert (await box.run("sleep 9", timeout_s=0.2)).timed_out
    assert (await box.run("echo ok")).stdout == "ok\n"


async def test_bug_11_output_that_is_not_utf8_is_replaced(box: Box):
    done = await box.run("printf '\\377\\376\\0abc'")
    assert done.stdout == "\ufffd\ufffd\0abc"
    assert done.stdout_bytes == 6


async def test_bug_12_wide_characters_stay_whole(box: Box):
    done = await box.run("i=0; while [ $i -lt 1000 ]; do printf '€€€€€€€€€€'; i=$((i+1)); done", limit=100_000)
    assert done.stdout == "€" * 10_000


async def test_bug_13_truncation_is_said_with_the_true_count(box: Box):
    done = await box.run("head -c 10001 /dev/zero | tr '\\0' x", limit=10_000)
    assert (done.stdout_truncated, done.stdout_bytes) == (True, 10_001)
    assert not (await box.run("head -c 10000 /dev/zero | tr '\\0' x", limit=10_000)).stdout_truncated


async def test_bug_15_standard_input_is_empty(box: Box):
    assert (await box.run("cat; echo done")).stdout == "done\n"


async def test_bug_20_files_of_all_sizes_come_back_whole(box: Box):
    for size in (0, 1, 128 << 10, 3 << 20):
        data = os.urandom(size)
        await box.manager.write("s", f"sub/f{size}", data, 0o640)
        assert await box.manager.read("s", f"/workspace/sub/f{size}", 4 << 20) == data
        done = await box.run(f"sha256sum < sub/f{size}; stat -c '%a %U' sub/f{size}")
        assert done.stdout == f"{hashlib.sha256(data).hexdigest()}  -\n640 agent\n"


async def test_abuse_no_path_leads_out(box: Box, tmp_path: Path):
    (tmp_path / "secret").write_text("s3cret")
    await box.run(f"ln -s {tmp_path}/secret link; ln -s / root; mkfifo fifo; ln -s /proc/1/environ env")
    for path in ("link", f"root{tmp_path}/secret", "fifo", "env", "../etc/shadow", "/proc/self/environ", "none"):
        with pytest.raises(SandboxError, match="path"):
            await box.manager.read("s", path, 1000)
    for path in ("link", "fifo", "root/etc/x", "/etc/x"):
        with pytest.raises(InvalidRequest, match="path"):
            await box.manager.write("s", path, b"x", 0o644)
    assert (tmp_path / "secret").read_text() == "s3cret"


async def test_a_file_over_the_limit_is_an_error_of_its_own(box: Box):
    await box.run("head -c 1001 /dev/zero > big")
    with pytest.raises(OutputLimit, match="limit of 1000"):
        await box.manager.read("s", "big", 1000)
    assert len(await box.manager.read("s", "big", 1001)) == 1001


async def test_bug_24_a_dead_sandbox_is_gone_and_not_an_observation(box: Box):
    await box.manager.create(SandboxSpec(sandbox="dead", owner="test"))
    running = asyncio.ensure_future(box.run("sleep 60", sandbox="dead"))
    await asyncio.sleep(0.2)
    record = box.backend._live["dead"]
    processes.kill(record.pid, record.started)
    with pytest.raises(SandboxGone):
        await running
    with pytest.raises(SandboxGone):
        await box.run("echo ok", sandbox="dead")


async def test_bug_27_a_server_child_is_gone_after_the_timeout(box: Box):
    if (await box.run("test -x /usr/bin/python3")).exit_code != 0:
        pytest.skip("the machine has no /usr/bin/python3")
    done = await box.run("/usr/bin/python3 -m http.server 8099 & sleep 0.8; wait", timeout_s=1.0)
    assert done.timed_out
    assert (await box.run("grep -c ':1FA3' /proc/net/tcp")).stdout == "0\n"


async def test_bug_30_planted_files_score_nothing(box: Box):
    await box.run("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > reward.json")
    done = await box.verify("test -f wanted", "true")
    assert [part.passed for part in done.parts] == [0.0, 1.0]


async def test_bug_33_many_at_once_need_no_port(box: Box):
    names = [f"n{number}" for number in range(24)]
    await asyncio.gather(*(box.manager.create(SandboxSpec(sandbox=name, owner="test")) for name in names))
    results = await asyncio.gather(*(box.run("echo $$; id -u", sandbox=name) for name in names))
    assert {done.exit_code for done in results} == {0}
    slots = {record.slot for record in box.backend._live.values()}
    assert len(slots) == len(box.backend._live) or os.geteuid() != 0
    async with asyncio.timeout(60):
        await asyncio.gather(*(box.manager.destroy(name) for name in names))


async def test_bug_40_an_exit_status_is_never_lost(box: Box):
    for _ in range(5):
        results = await asyncio.gather(*(box.run("exit 42") for _ in range(10)))
        assert {done.exit_code for done in results} == {42}


# Verification


async def test_verify_scores_each_check_and_answers_again_the_same(box: Box):
    done = await box.verify("echo one; test -f in/a.txt", "echo no >&2; false", "echo x >> count")
    assert [(part.name, part.passed) for part in done.parts] == [("c0", 1.0), ("c1", 0.0), ("c2", 1.0)]
    assert (done.passed, done.total, done.valid, done.infra_error) == (2, 3, True, None)
    assert done.parts[1].output == "no\n"
    again = await box.verify("echo one; test -f in/a.txt", "echo no >&2; false", "echo x >> count")
    assert again == done
    assert (await box.run("wc -l < count")).stdout == "1\n"


@pytest.mark.parametrize("bad", ["sleep 30", "kill -9 $$", "yes"])
async def test_a_check_that_does_not_end_is_an_infra_error_and_not_a_zero(box: Box, bad: str):
    done = await box.verify("true", bad, "true", timeout_s=3.0)
    assert not done.valid
    assert "'c1'" in (done.infra_error or "")


async def test_a_verification_holds_off_other_commands(box: Box):
    held = "until [ -e go ]; do sleep 0.05; done"
    verifying = asyncio.ensure_future(box.verify(held))
    await eventually(lambda: box.manager._known["s"].state is State.VERIFYING)
    with pytest.raises(SandboxError, match="verifying"):
        await box.run("echo ok")
    again = asyncio.ensure_future(box.verify(held))
    await box.backend.write("s", "/workspace/go", b"", 0o644)
    assert await again == await verifying
