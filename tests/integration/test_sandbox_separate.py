"""Evaluations apart from the agent: what its sandbox holds is copied, what runs in it has no say. Real sandboxes."""

import asyncio
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxSpec, VerifyRequest, VerifyResult
from opengyre.proto.task import Check
from opengyre.sandbox import machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InvalidRequest, SandboxBusy, SandboxGone, Spec
from opengyre.sandbox.launch import copying
from opengyre.sandbox.launch.files import FileError
from opengyre.sandbox.manager import Manager
from support import eventually

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None,
        reason="needs bubblewrap and user namespaces",
    ),
]
DEFAULTS = Spec(sandbox="", workspace_mb=4, memory_mb=128, pids=32)


class Box:
    """One node and a sandbox ``s`` on it."""

    def __init__(self, root: Path) -> None:
        self.backend = Bubblewrap(root)
        self.manager = Manager(self.backend, "n0", DEFAULTS)
        self.count = 0

    async def start(self) -> None:
        await self.manager.start()
        await self.manager.create(SandboxSpec(sandbox="s", owner="test", labels={"run": "r"}, env={"LEVEL": "7"}))

    async def run(self, command: str) -> ExecResult:
        self.count += 1
        request = ExecRequest(sandbox="s", exec_id=f"e{self.count}", command=command, timeout_s=20.0)
        return await self.manager.exec(request)

    async def verify(
        self, *commands: str, mode: str = "separate", name: str = "v", timeout_s: float = 10.0
    ) -> VerifyResult:
        checks = tuple(Check(name=f"c{n}", command=text, weight=1.0) for n, text in enumerate(commands))
        request = VerifyRequest(sandbox="s", verify_id=name, checks=checks, timeout_s=timeout_s, mode=mode)  # type: ignore[arg-type]  # one of the modes
        return await self.manager.verify(request)

    def left(self) -> list[str]:
        """What there is of clean sandboxes, on the system itself."""
        groups = [name for name in self.backend._groups.names() if "." in name]
        folders = [path.name for path in (self.backend._root / "sandboxes").iterdir() if "." in path.name]
        running = [value for _, value in processes._marked() if value.startswith(self.backend.marker("s."))]
        return [*groups, *folders, *running, *(name for name in self.manager._known if "." in name)]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    made = Box(tmp_path / "node")
    await made.start()
    yield made
    for info in made.manager.listing({}):
        await made.manager.destroy(info.sandbox)
    await made.manager.stop()


def values(result: VerifyResult) -> list[float]:
    assert result.valid, result
    return [part.passed for part in result.parts]


async def test_the_kept_work_is_scored_in_a_sandbox_that_the_agent_never_was_in(box: Box) -> None:
    await box.run("echo amber > notes.txt; mkdir -p a/b; echo deep > a/b/c; touch /tmp/outside; echo x > /logs/reward")
    done = await box.verify(
        '[ "$(cat notes.txt)" = amber ]',
        '[ "$(cat /workspace/a/b/c)" = deep ]',
        "[ -e /tmp/outside ] || [ -e /logs/reward ]",
        '[ "$LEVEL" = 7 ]',
        "echo spoiled > notes.txt",
    )
    assert values(done) == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert (done.passed, done.total, done.isolated) == (4, 5, True)
    assert (await box.run("cat notes.txt")).stdout == "amber\n", "a check changes nothing of the work"
    assert box.left() == []


async def test_a_background_process_of_the_agent_has_no_say(box: Box) -> None:
    """It overwrites what is measured, all the time, until it is ended."""
    await box.run("(trap '' TERM HUP; while :; do echo forged > verdict; done) >/dev/null 2>&1 & sleep 0.1")
    done = await box.verify(
        'echo right > verdict; sleep 0.3; [ "$(cat verdict)" = right ]',
        "[ -z \"$(ls /proc | grep -x '[0-9]*' | xargs -I{} cat /proc/{}/cmdline 2>/dev/null | grep -a forged)\" ]",
    )
    assert values(done)[0] == 1.0
    assert (await box.run("rm verdict; sleep 0.2; ls")).stdout == "", "it was ended"


async def test_what_the_agent_planted_configures_no_tool_of_the_checks(box: Box) -> None:
    """A changed PATH, start-up files in its home, a user's module that Python would load: none reaches a check."""
    plant = """
    site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p bin "$site"
    for tool in grep test cat python3; do printf '#!/bin/sh\\nexit 0\\n' > bin/$tool; chmod +x bin/$tool; done
    export PATH=/workspace/bin:$PATH ENV=/workspace/.shrc
    echo 'exit 0' | tee .profile .bashrc .shrc > /dev/null
    echo 'import os; os._exit(0)' > "$site/usercustomize.py"
    """
    await box.run(plant)
    checks = ("grep -q solved answer.txt", "cat answer.txt", "python3 -c 'import sys; sys.exit(1)'", "[ $HOME = /tmp ]")
    assert values(await box.verify(*checks)) == [0.0, 0.0, 0.0, 1.0]
    shared = await box.verify(*checks, mode="shared", name="w")
    assert values(shared) == [0.0, 0.0, 1.0, 0.0], "in the agent's own sandbox it does: the planted module is real"


async def test_a_copy_holds_what_was_there(box: Box) -> None:
    make = """
    printf 'one\\n' > plain; chmod 640 plain; touch -d '2001-02-03 04:05:06 UTC' plain
    ln plain hard; ln -s plain soft; ln -s /nowhere/at/all broken; ln -s /workspace/dir way
    mkdir -p dir/closed; echo in > dir/closed/file; touch -d '2002-02-03 04:05:06 UTC' dir; chmod 000 dir/closed
    echo secret > shut; chmod 000 shut; echo x > 'a b\\nc'; printf '\\377' > "$(printf 'x\\377')"
    truncate -s 8M sparse; printf end | dd of=sparse bs=1 seek=5000000 conv=notrunc 2>/dev/null
    mkfifo pipe; dd if=/dev/urandom of=big bs=1024 count=3000 2>/dev/null
    ln big again; sha256sum big sparse > /tmp/sums
    """
    assert (await box.run(make)).exit_code == 0
    sums = (await box.run("cat /tmp/sums")).stdout
    look = "stat -c '%n %a %s %Y %h %F' plain hard soft broken dir dir/closed shut sparse; readlink broken way; ls -A"
    wanted = (await box.run(look)).stdout.replace("pipe\n", "")
    done = await box.verify(
        look,
        f"printf '%s' '{sums}' | sha256sum -c && [ $(stat -c %b sparse) -lt 100 ]",
        "chmod 700 shut dir/closed && [ \"$(cat shut dir/closed/file)\" = 'secret\nin' ]",
        "[ -p pipe ] || [ -e pipe ]",
        "find . ! -user agent | grep .",
    )
    assert done.parts[0].output == wanted
    assert values(done) == [1.0, 1.0, 1.0, 0.0, 0.0]


async def test_links_are_never_followed_by_a_copy(box: Box) -> None:
    """Neither to what the agent may not see, nor out of the workspace, nor in a circle."""
    await box.run(
        "ln -s /proc/1/environ env; ln -s / root; ln -s . self; ln -s /etc/passwd p; echo top > /tmp/t; ln -s /tmp/t t"
    )
    done = await box.verify(
        "[ \"$(readlink env root self p t | tr '\\n' ,)\" = '/proc/1/environ,/,.,/etc/passwd,/tmp/t,' ]", "cat t"
    )
    assert values(done) == [1.0, 0.0]


async def test_a_live_sandbox_goes_on_while_it_is_measured(box: Box) -> None:
    """Its background job runs on, its commands are taken meanwhile, and a file that grows is copied as it was."""
    await box.run(
        "(while :; do echo tick >> ticks; done) >/dev/null 2>&1 & echo half > work; "
        "until [ -s ticks ]; do sleep 0.05; done"
    )
    held = "until [ -e go ]; do sleep 0.05; done; echo spoiled > work"
    measuring = asyncio.ensure_future(
        box.verify('[ "$(cat work)" = half ]', held, mode="live", name="p0", timeout_s=60.0)
    )
    await eventually(lambda: "s.p0" in box.backend._live)
    size = int((await box.run("stat -c %s ticks")).stdout)
    assert not measuring.done(), "a command was taken while it was measured"
    with pytest.raises(SandboxBusy, match="being evaluated"):
        await box.verify("true", mode="live", name="other")
    await box.backend.write("s.p0", "/workspace/go", b"", 0o644)
    assert values(await measuring) == [1.0, 1.0]
    assert int((await box.run("stat -c %s ticks; echo whole > work")).stdout) > size, "the job was not ended"
    assert (await box.run("cat work")).stdout == "whole\n"
    assert values(await box.verify('[ "$(cat work)" = whole ]', mode="live", name="p1")) == [1.0]
    assert box.left() == []


async def test_a_repeated_evaluation_joins_or_is_answered_from_the_record(box: Box) -> None:
    first, second = await asyncio.gather(box.verify("date +%N"), box.verify("date +%N"))
    assert first == second
    await box.run("touch later")
    assert await box.verify("date +%N") == first


async def test_a_clean_sandbox_that_dies_is_a_failure_of_the_machine(box: Box) -> None:
    """Neither a zero nor the loss of the agent's sandbox; another evaluation is right."""
    await box.run("touch there")
    evaluating = asyncio.ensure_future(box.verify("sleep 20", timeout_s=20.0))
    await eventually(
        lambda: "s.v" in box.manager._known and box.backend.execs("s.v")[1] if "s.v" in box.backend._live else False
    )
    await box.manager._end("s.v")
    failed = await evaluating
    assert not failed.valid
    assert failed.infra_error
    assert await box.verify("sleep 20", timeout_s=20.0) == failed, "what happened under an id is recorded"
    assert values(await box.verify("[ -e there ]", name="v1")) == [1.0]
    assert box.left() == []


async def test_nothing_is_left_when_the_sandbox_is_destroyed_under_its_evaluation(box: Box) -> None:
    evaluating = asyncio.ensure_future(box.verify("sleep 20", timeout_s=20.0))
    await eventually(lambda: "s.v" in box.backend._live)
    await box.manager.destroy("s")
    with pytest.raises(SandboxGone):
        await evaluating
    assert box.left() == []


async def test_a_clean_sandbox_ends_with_its_lease(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opengyre.sandbox.evaluations.lasts_s", lambda _request: 0.5)
    reaping = asyncio.create_task(box.manager.reap())
    failed = await box.verify("sleep 20", timeout_s=20.0)
    assert not failed.valid
    assert failed.infra_error
    assert box.left() == []
    reaping.cancel()
    await asyncio.wait([reaping])


async def test_a_node_without_isolation_refuses_instead_of_imitating(tmp_path: Path) -> None:
    backend = Bubblewrap(tmp_path / "node", isolated=False)
    manager = Manager(backend, "n0", DEFAULTS)
    await manager.start()
    await manager.create(SandboxSpec(sandbox="s", owner="test"))
    checks = (Check(name="c", command="true", weight=1.0),)
    for mode in ("separate", "live"):
        with pytest.raises(InvalidRequest, match=f"mode is '{mode}'; allowed is 'shared'"):
            await manager.verify(VerifyRequest(sandbox="s", verify_id="v", checks=checks, mode=mode))
    assert (await manager.verify(VerifyRequest(sandbox="s", verify_id="v", checks=checks))).valid
    await manager.destroy("s")
    await manager.stop()


def copied(source: Path, target: Path, most: int = 1 << 20) -> None:
    """Through a buffer instead of a pipe, in this process."""
    stream = io.BytesIO()
    target.mkdir()
    try:
        copying.Reader(stream.write, most).take(str(source))
    except (OSError, FileError) as error:
        stream.write(copying.fault(error))
    stream.seek(0)
    here, mask = Path.cwd(), os.umask(0)
    os.chdir(target)
    try:
        copying.put(stream)
    finally:
        os.chdir(here)
        os.umask(mask)


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_a_workspace_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(copying, "MAX_ENTRIES", 3)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(2 if what == "bytes" else 4):
        (source / str(number)).write_bytes(b"x" * 600)
    with pytest.raises(FileError, match="holds more" if what == "bytes" else "more than 3 files") as caught:
        copied(source, tmp_path / "target", 1000 if what == "bytes" else 1 << 20)
    assert caught.value.kind == "output_limit"


def test_a_tree_that_changes_under_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that grows, one that shrinks, one that vanishes, a file and a folder whose places are taken by links."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    for folder in (source, outside, source / "folder"):
        folder.mkdir()
    (outside / "secret").write_text("secret")
    for name in ("grows", "shrinks", "vanishes", "turns", "folder/below"):
        (source / name).write_text("0123456789")
    real_stat, real_fstat = os.stat, os.fstat

    def swap(name: str, target: Path) -> None:
        path = source / name
        path.rename(tmp_path / f"old-{name}")
        path.symlink_to(target)

    acts = {b"vanishes": lambda: (source / "vanishes").unlink(), b"turns": lambda: swap("turns", outside / "secret")}
    acts[b"folder"] = lambda: swap("folder", outside)

    def stat(name: bytes, **more: object) -> os.stat_result:
        found = real_stat(name, **more)  # type: ignore[arg-type]  # passed on as given
        acts.pop(name, lambda: None)()
        return found

    def fstat(fd: int) -> os.stat_result:
        found = real_fstat(fd)
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        if name == "grows":
            with (source / "grows").open("a") as file:
                file.write("more")
        if name == "shrinks":
            os.truncate(source / "shrinks", 4)
        return found

    monkeypatch.setattr("opengyre.sandbox.launch.copying.os.stat", stat)
    monkeypatch.setattr("opengyre.sandbox.launch.copying.os.fstat", fstat)
    copied(source, tmp_path / "target")
    found = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    assert found == {"grows": b"0123456789", "shrinks": b"0123\0\0\0\0\0\0"}


def test_a_copy_that_breaks_off_is_none(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    stream = io.BytesIO()
    copying.Reader(stream.write, 1000).take(str(source))
    (tmp_path / "target").mkdir()
    here = Path.cwd()
    os.chdir(tmp_path / "target")
    try:
        with pytest.raises(FileError, match="ended before its end"):
            copying.put(io.BytesIO(stream.getvalue()[:-1]))
    finally:
        os.chdir(here)
