"""Tasks' own tests in the sandbox service's manager: who may say what the work is worth. Real sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from opengyre.proto.sandbox import (
    ExecRequest,
    ExecResult,
    PrepareRequest,
    PrepareResult,
    SandboxRef,
    SandboxSpec,
    VerifyRequest,
    VerifyResult,
)
from opengyre.proto.task import Artifact, Collect, Healthcheck, TaskEnvironment, TaskTests
from opengyre.sandbox import offline, stand_in
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import InfraError, InvalidRequest, Spec
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import OFFLINE
from opengyre.sandbox.manager import Manager
from opengyre.tasks.archives import pack, squeeze
from opengyre.tasks.convert import environment_of, verifier_of
from opengyre.tasks.directory import read_task
from support.foreign_tasks import REWARD, harbor, write
from support.sandboxes import on_images

pytestmark = on_images
PAYS = f"#!/bin/sh\n({REWARD}) > /logs/verifier/reward.txt\n"


class Box:
    """A node that makes tasks' environments, and a sandbox ``s`` of one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tools, _ = offline.make(offline.place(root))
        self.backend = Bubblewrap(root / "node", binds={OFFLINE: str(tools)})
        self.environments = Environments(self.backend, "n0", stand_in="host", offline=True)
        defaults = Spec(sandbox="", workspace_mb=16, memory_mb=192, pids=64)
        self.manager = Manager(self.backend, "n0", defaults, environments=self.environments)
        self.count = 0

    async def start(self) -> None:
        await self.manager.start()
        stand_in.ensure(self.backend.image_cache)

    async def create(self, name: str = "s", dockerfile: str = "FROM debian\nWORKDIR /app\n") -> SandboxRef:
        environment = TaskEnvironment(dockerfile=dockerfile, storage_mb=16)
        return await self.manager.create(SandboxSpec(sandbox=name, owner="test", environment=environment))

    async def run(self, command: str, name: str = "s") -> ExecResult:
        self.count += 1
        request = ExecRequest(sandbox=name, exec_id=f"e{self.count}", command=command, timeout_s=20.0)
        return await self.manager.exec(request)

    def tests(self, script: str = PAYS, **more: object) -> TaskTests:
        self.count += 1
        folder = write(self.root / f"tests{self.count}", {"test.sh": script})
        fields = {"archive": squeeze(pack([("", folder)])), "timeout_s": 20.0} | more
        return TaskTests(**fields)  # type: ignore[arg-type]  # fields by keyword, checked at run time

    async def verify(self, tests: TaskTests | None = None, mode: str = "shared") -> VerifyResult:
        self.count += 1
        request = VerifyRequest(sandbox="s", verify_id=f"v{self.count}", tests=tests or self.tests(), mode=mode)  # type: ignore[arg-type]  # one of the modes
        return await self.manager.verify(request)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    made = Box(tmp_path)
    await made.start()
    yield made
    for info in made.manager.listing({}):
        await made.manager.destroy(info.sandbox)
    assert not list((tmp_path / "node" / "sandboxes").iterdir())
    await made.environments.forget()
    await made.manager.stop()


@pytest.mark.parametrize("mode", ["shared", "separate", "live"])
async def test_the_work_is_worth_what_the_tests_say(box: Box, mode: str) -> None:
    ref = await box.create()
    assert ref.environment == "host root in place of debian, replayed 2 of 2 instructions"
    nothing = await box.verify(mode=mode)
    assert (nothing.valid, nothing.rewards, nothing.passed, nothing.total) == (True, {"reward": 0.0}, 0, 1)
    assert nothing.environment == ref.environment
    assert (await box.run("pwd; echo 42 > answer")).stdout == "/app\n"
    done = await box.verify(mode=mode)
    assert [(part.name, part.passed, part.weight) for part in done.parts] == [("reward", 1.0, 1.0)]
    assert done.progress is None


@pytest.mark.parametrize("mode", ["shared", "separate", "live"])
async def test_row_30_planted_and_overwritten_reward_files_say_nothing(box: Box, mode: str) -> None:
    await box.create()
    await box.run(
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' >"
        " /logs/verifier/reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 777 /tests"
    )
    await box.run(
        "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; cp /logs/verifier/reward.txt"
        " /logs/verifier/reward.json; done' >/dev/null 2>&1 &)"
    )
    await asyncio.sleep(0.1)
    said = await box.verify(mode=mode)
    assert (said.valid, said.rewards) == (True, {"reward": 0.0})


async def test_row_03_nothing_of_the_agent_runs_once_the_tests_do(box: Box) -> None:
    await box.create()
    await box.run(
        "(setsid sh -c 'while :; do date +%N >> /app/log; sleep 0.01; done' >/dev/null 2>&1 &);"
        " until [ -s /app/log ]; do sleep 0.05; done"
    )
    script = "#!/bin/sh\na=$(wc -c < /app/log); sleep 0.3; b=$(wc -c < /app/log)\n"
    script += "[ $a = $b ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    assert (await box.verify(box.tests(script))).rewards == {"reward": 1.0}


async def test_an_agent_that_is_not_root_cannot_touch_the_tests(box: Box) -> None:
    await box.create(dockerfile="FROM debian\nWORKDIR /app\nUSER agent\n")
    assert (await box.run("id -un")).stdout == "agent\n"
    script = "#!/bin/sh\nif echo x >> /tests/test.sh || rm -f /tests/test.sh; then echo 1; else echo 0; fi"
    said = await box.verify(box.tests(f"{script} > /logs/verifier/reward.txt 2>/dev/null\n", user="agent"))
    assert (said.valid, said.rewards) == (True, {"reward": 0.0})


BROKEN = [
    ("sleep 30", "the verifier ran into its timeout"),
    ("kill -9 $$", "the verifier was ended by SIGKILL"),
    ("yes > /dev/null & sleep 30", "the verifier ran into its timeout"),
    ("true", "the tests left no reward.json and no reward.txt"),
    (": > /logs/verifier/reward.txt", "reward.txt is empty"),
    ("echo Infinity > /logs/verifier/reward.txt", "allowed is one finite number"),
    ("echo -1 > /logs/verifier/reward.txt", "reward 'reward' is -1; allowed for a score is 0 to 1"),
    ("echo '{\"a\": [1]}' > /logs/verifier/reward.json", "a is [1]; allowed is a finite number"),
    ("ln -s /etc/passwd /logs/verifier/reward.txt", "the tests left no reward.json and no reward.txt"),
    ("mkfifo /logs/verifier/reward.txt", "the tests left no reward.json and no reward.txt"),
    ("rm -rf /logs/verifier", "could not be brought in or read"),
    (
        "python3 -c 'b=[]\nwhile True: b.append(bytearray(1<<20))'; echo 0 > /logs/verifier/reward.txt",
        "the verifier ran out of memory",
    ),
]


async def test_a_verifier_that_breaks_is_a_failed_evaluation_and_no_zero(box: Box) -> None:
    await box.create()
    for script, words in BROKEN:
        timeout_s = 3.0 if "timeout" in words else 60.0
        said = await box.verify(box.tests(f"#!/bin/sh\n{script}\n", timeout_s=timeout_s))
        assert (said.valid, said.parts) == (False, ()), script
        assert words in (said.infra_error or ""), said
        # And nothing is broken by it.
        assert (await box.verify()).rewards == {"reward": 0.0}, script


async def test_rewards_reports_and_weights_make_parts_and_progress(box: Box) -> None:
    await box.create()
    script = r"""#!/bin/sh
printf '{"correctness": 1, "style": 0.5}' > /logs/verifier/reward.json
echo 0 > /logs/verifier/reward.txt
printf '{"results": {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "failed"}]}}' \
  > /logs/verifier/ctrf.json
printf '<testsuite><testcase name="c"/><testcase name="d"><skipped/></testcase></testsuite>' > /logs/verifier/junit.xml
echo said
"""
    said = await box.verify(box.tests(script, baseline=1, weights={"correctness": 3.0}))
    assert [(part.name, part.passed, part.weight) for part in said.parts] == [
        ("correctness", 1.0, 0.75),
        ("style", 0.5, 0.25),
    ]
    assert (said.passed, said.total, said.baseline, said.progress) == (2, 3, 1, 0.5)
    assert [(test.name, test.outcome) for test in said.report] == [
        ("a", "passed"), ("b", "failed"), ("c", "passed"), ("d", "skipped"),
    ]  # fmt: skip
    assert said.output == "said\n"
    along = await box.verify(box.tests(script, baseline=1, score="progress"))
    assert [(part.name, part.passed) for part in along.parts] == [("progress", 0.5)]


async def test_what_a_task_collects_is_there_for_the_tests(box: Box) -> None:
    await box.create()
    await box.run("echo 42 > hidden")
    collect = (Collect(command="cp /app/hidden /app/answer"), Collect(command="exit 3"))
    for mode in ("live", "separate", "shared"):
        assert (await box.verify(box.tests(collect=collect), mode)).rewards == {"reward": 1.0}
        left = (await box.run("ls answer 2>/dev/null")).stdout
        assert bool(left) == (mode != "live")
        await box.run("rm -f answer")
    late = await box.verify(box.tests(collect=(Collect(command="sleep 9", timeout_s=0.3),)))
    assert "collecting ('sleep 9') ran into its timeout" in (late.infra_error or "")


async def test_a_separate_evaluation_leaves_the_agents_sandbox_as_it_was(box: Box) -> None:
    await box.create()
    await box.run("echo 42 > answer; rm -rf /srv; mkdir /srv; touch /srv/x")
    script = "#!/bin/sh\n[ -f /srv/x ] && rm /app/answer /srv/x && echo 1 > /logs/verifier/reward.txt\n"
    assert (await box.verify(box.tests(script), "separate")).rewards == {"reward": 1.0}
    assert (await box.run("cat answer; ls /srv; ls /tests /logs/verifier")).stdout == "42\nx\n/tests:\n"
    assert box.backend.snapshots() == []


async def test_an_environment_is_made_once_and_begun_with_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = []
    create = box.backend.create

    async def counted(spec: Spec, files: Mapping[str, str]) -> None:
        builders.append(spec.sandbox)
        await create(spec, files)

    monkeypatch.setattr(box.backend, "create", counted)
    dockerfile = "FROM debian\nWORKDIR /app\nRUN head -c 16 /dev/urandom | base64 > made\n"
    await asyncio.gather(*(box.create(name, dockerfile) for name in ("s", "t", "u")))
    made = [(await box.run("cat made; echo x >> made", name)).stdout for name in ("s", "t", "u")]
    assert len(set(made)) == 1
    assert len(box.backend.snapshots()) == 1
    await box.create("w", dockerfile)
    assert (await box.run("cat made", "w")).stdout == made[0]
    assert len(builders) == 1


async def test_a_failed_environment_leaves_nothing_and_names_its_line(box: Box) -> None:
    with pytest.raises(InvalidRequest, match=r"Dockerfile line 2 \(RUN 'false'\) failed, exit status 1"):
        await box.create(dockerfile="FROM debian\nRUN false\n")
    assert not list((box.root / "node" / "sandboxes").iterdir())
    assert box.backend.snapshots() == []
    await box.manager.create(SandboxSpec(sandbox="s", owner="test"))
    with pytest.raises(InvalidRequest, match="tests are for a sandbox with an environment"):
        await box.verify()


async def test_a_tasks_directory_travels_as_it_is(box: Box) -> None:
    task = read_task(harbor(box.root / "task"))
    environment = environment_of(task, {})
    await box.manager.create(SandboxSpec(sandbox="s", owner="test", environment=environment))
    assert (await box.verify(verifier_of(task, task.steps[0], {}))).rewards == {"reward": 0.0}
    await box.run("echo 42 > answer")
    assert (await box.verify(verifier_of(task, task.steps[0], {}))).rewards == {"reward": 1.0}
    # The solution never travels, and the tests come only when they are run.
    assert (await box.run("ls /solution 2>/dev/null")).stdout == ""


def apart(box: Box, dockerfile: str = "FROM debian\nWORKDIR /checker\nCOPY . /tests/\n", **more: object) -> TaskTests:
    """Tests with an environment of their own that pay for 42 in the artifact."""
    box.count += 1
    folder = write(box.root / f"own{box.count}", {"test.sh": PAYS, "Dockerfile": dockerfile})
    environment = TaskEnvironment(dockerfile=dockerfile, context=squeeze(pack([("", folder)])))
    fields = {"environment": environment, "artifacts": (Artifact(source="/app/answer"),), "timeout_s": 20.0} | more
    return TaskTests(**fields)  # type: ignore[arg-type]  # fields by keyword, checked at run time


@pytest.mark.parametrize("mode", ["shared", "separate", "live"])
async def test_tests_in_an_environment_of_their_own_see_what_is_carried(box: Box, mode: str) -> None:
    await box.create()
    assert (await box.verify(apart(box), mode)).rewards == {"reward": 0.0}
    await box.run("echo 42 > answer; (sleep 60 >/dev/null 2>&1 &)")
    said = await box.verify(apart(box), mode)
    assert (said.valid, said.rewards) == (True, {"reward": 1.0})
    assert said.environment == "host root in place of debian, replayed 3 of 3 instructions"
    assert [info.sandbox for info in box.manager.listing({})] == ["s"]
    there = await box.run(
        "cat answer; ls -d /checker /tests/test.sh 2>/dev/null; cat /proc/[0-9]*/comm | grep -c sleep"
    )
    # What holds the sandbox sleeps as well.
    assert there.stdout == f"42\n{1 + (mode == 'live')}\n"
    assert [name for name in box.backend.snapshots() if not name.startswith("env.")] == []


async def test_collected_artifacts_come_from_a_copy_where_the_agent_goes_on(box: Box) -> None:
    await box.create()
    await box.run("echo 42 > hidden")
    collect = (Collect(command="mkdir -p /logs/artifacts; cp hidden /logs/artifacts/answer"),)
    script = "#!/bin/sh\n[ $(cat /logs/artifacts/answer) = 42 ] && echo 1 > /logs/verifier/reward.txt\n"
    folder = write(box.root / "collected", {"test.sh": script})
    tests = apart(box, "FROM debian\n", collect=collect, archive=squeeze(pack([("", folder)])))
    assert (await box.verify(tests, "live")).rewards == {"reward": 1.0}
    assert (await box.run("ls /logs/artifacts 2>/dev/null")).stdout == ""
    assert (await box.verify(tests, "separate")).rewards == {"reward": 1.0}


async def test_an_artifact_places_nothing_where_it_does_not_belong(box: Box) -> None:
    await box.create()
    await box.run(
        "mkdir out; echo 42 > out/answer; ln -s /tests out/tests; ln -s ../../tests out/up; ln -s answer out/alias;"
        " mkfifo out/fifo; ln -s /etc/passwd gone; echo x > out/a.log; chmod 700 out/answer"
    )
    script = "#!/bin/sh\ncd /app/out && [ ! -e tests ] && [ ! -L up ] && [ ! -e fifo ] && [ ! -e a.log ] && "
    script += "[ $(cat alias) = 42 ] && [ -x answer ] && [ ! -e ../nothing ] && echo 1 > /logs/verifier/reward.txt\n"
    artifacts = (Artifact(source="/app/out", exclude=("*.log",)), Artifact(source="/app/nothing"))
    tests = apart(box, "FROM debian\n", archive=squeeze(pack([("", write(box.root / "t", {"test.sh": script}))])))
    said = await box.verify(msgspec.structs.replace(tests, artifacts=artifacts))
    assert said.rewards == {"reward": 1.0}, said


async def test_a_verifiers_environment_that_cannot_be_is_said_and_is_no_zero(box: Box) -> None:
    await box.create()
    said = await box.verify(apart(box, "FROM debian\n"))
    assert "the verifier's environment has no /tests/test.sh, and the task brings none" in (said.infra_error or "")
    with pytest.raises(InvalidRequest, match=r"Dockerfile line 2 \(RUN 'false'\) failed"):
        await box.verify(apart(box, "FROM debian\nRUN false\n"))
    sick = apart(box)
    assert sick.environment is not None
    check = Healthcheck(command="false", interval_s=0.01, retries=2)
    sick = msgspec.structs.replace(sick, environment=msgspec.structs.replace(sick.environment, healthcheck=check))
    said = await box.verify(sick)
    assert (said.valid, said.parts) == (False, ())
    assert "the health check 'false' failed to the end" in (said.infra_error or "")
    assert [info.sandbox for info in box.manager.listing({})] == ["s"]


async def test_a_health_check_is_waited_for_and_a_sandbox_without_health_is_not_there(box: Box) -> None:
    check = Healthcheck(command="[ -e up ] || { touch up; false; }", interval_s=0.01)
    environment = TaskEnvironment(dockerfile="FROM debian\nWORKDIR /app\n", healthcheck=check)
    await box.manager.create(SandboxSpec(sandbox="s", owner="test", environment=environment))
    assert (await box.run("ls")).stdout == "up\n"
    never = msgspec.structs.replace(environment, healthcheck=Healthcheck(command="false", retries=1))
    with pytest.raises(InfraError, match="the health check 'false' failed to the end"):
        await box.manager.create(SandboxSpec(sandbox="t", owner="test", environment=never))
    assert [info.sandbox for info in box.manager.listing({})] == ["s"]


async def test_a_step_is_prepared_once_and_its_fault_is_an_answer(box: Box) -> None:
    await box.create()
    files = squeeze(pack([("", write(box.root / "step", {"given": "g\n", "setup.sh": "cat given >> seen\n"}))]))
    request = PrepareRequest(sandbox="s", prepare_id="p", files=files, setup="bash ./setup.sh")
    first, again = await asyncio.gather(box.manager.prepare(request), box.manager.prepare(request))
    assert (first, again) == (PrepareResult(prepare_id="p"), PrepareResult(prepare_id="p"))
    assert await box.manager.prepare(request) == first
    assert (await box.run("pwd; cat seen")).stdout == "/app\ng\n"
    failed = await box.manager.prepare(PrepareRequest(sandbox="s", prepare_id="q", setup="echo no; exit 4"))
    assert failed.fault == "the setup of the step failed, exit status 4: no"
    assert (await box.verify()).valid


async def test_what_a_context_ignores_is_not_copied(box: Box) -> None:
    content = {".dockerignore": "*.log\nkeys\n!keys/public\n"}
    content |= {"a.log": "", "a.txt": "", "keys/secret": "", "keys/public": ""}
    context = squeeze(pack([("", write(box.root / "context", content))]))
    environment = TaskEnvironment(dockerfile="FROM debian\nWORKDIR /app\nCOPY . .\n", context=context)
    await box.manager.create(SandboxSpec(sandbox="s", owner="test", environment=environment))
    assert (await box.run("find . -type f | sort")).stdout == "./.dockerignore\n./a.txt\n./keys/public\n"
