"""Running a task's program of tests in a sandbox, as Harbor does: clean the folder of its results, bring the tests in,
run them, read what they left. Before that, making it ready for a step; and the reference solution, for those who check
tasks.

Whoever calls has ended the agent's processes, or has made a sandbox in which none ever ran. The tests belong to root
where the sandbox has other users, so that who is not root can only read them.

Awaits: one command at a time, each bounded by its timeout; archives in and out, bounded by the backend.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opengyre.proto.sandbox import ExecResult, VerifyResult
from opengyre.proto.task import Healthcheck, TaskTests
from opengyre.sandbox import health
from opengyre.sandbox.core import Backend, ExecTimeout, InfraError, InvalidRequest, Options, OutputLimit, Spec
from opengyre.sandbox.verdict import interrupted, of_tests
from opengyre.tasks import shims
from opengyre.tasks.archives import contents, unsqueeze
from opengyre.tasks.directory import LOGS, TESTS
from opengyre.tasks.errors import TaskError

OFFLINE = "/opt/gyre"
"""Where the offline stand-ins are in a sandbox: its folder `shims.FOLDER`, and beside it ``tools``."""
STEP_S = 60.0
"""Bound of what is ours: making folders, looking."""
OUTPUT = 1 << 20
LEFT_LIMIT = 64 << 20
SETUP_S = 600.0
"""Bound of a step's own setup."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Execute = Callable[[str, str, float, int, Options], Awaitable[ExecResult]]
"""Run a command: its id, its text, its timeout in seconds, most bytes of its output, how."""


@dataclass(frozen=True)
class Inside:
    """A sandbox as one who brings tests in sees it."""

    backend: Backend
    spec: Spec
    execute: Execute
    prefix: str
    """Of the ids of its commands, unique to what is done."""
    offline: bool = False
    """Tests run with the offline stand-ins first on PATH."""

    @property
    def root(self) -> str | None:
        """Who makes what the agent may not change."""
        return "root" if self.backend.capabilities().users else None

    async def run(self, name: str, command: str, timeout_s: float, options: Options) -> ExecResult:
        return await self.execute(f"{self.prefix}.{name}", command, timeout_s, OUTPUT, options)

    async def must(self, name: str, command: str, user: str | None = None) -> None:
        """Run one of our own commands; raises `InfraError` where it fails."""
        done = await self.run(name, command, STEP_S, Options(cwd="/", user=user, env={"PATH": PATH}))
        if done.exit_code != 0:
            why = interrupted("it", done) or (done.stderr or done.stdout).strip()[-300:]
            raise InfraError(f"{command[:120]!r} failed in sandbox {self.spec.sandbox!r}: {why}")

    async def put(self, path: str, archive: bytes, user: str | None) -> None:
        """Unpack a plain tar archive."""
        with tempfile.NamedTemporaryFile(prefix="gyre-put-", suffix=".tar") as file:
            await asyncio.to_thread(Path(file.name).write_bytes, archive)
            await self.backend.put(self.spec.sandbox, path, Path(file.name), user)

    async def get(self, path: str, limit: int) -> bytes:
        """A folder as a plain tar archive."""
        with tempfile.NamedTemporaryFile(prefix="gyre-get-", suffix=".tar") as file:
            await self.backend.get(self.spec.sandbox, path, Path(file.name), limit)
            return await asyncio.to_thread(Path(file.name).read_bytes)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Of a program of the task: with the stand-ins first on PATH, where they are wanted."""
        if not self.offline:
            return dict(env)
        path = env.get("PATH") or self.spec.env.get("PATH") or PATH
        found = [f"{OFFLINE}/{shims.SITE_FOLDER}", env.get("PYTHONPATH") or self.spec.env.get("PYTHONPATH") or ""]
        return {
            **env,
            "PATH": f"{OFFLINE}/{shims.FOLDER}:{path}",
            "GYRE_TOOLS": f"{OFFLINE}/tools",
            "PYTHONPATH": ":".join(filter(None, found)),
        }

    async def solve(self, archive: bytes, command: str, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Bring the reference solution in and run it."""
        await self.put("/solution", archive, None)
        return await self.run("solve", command, timeout_s, Options(env=self.environment(env)))


async def healthy(check: Healthcheck, inside: Inside) -> None:
    """Wait until the check succeeds; raises `InfraError` where it does not."""
    loop = asyncio.get_running_loop()
    begin, failures = loop.time(), 0
    for number in itertools.count():
        options = Options(env=inside.environment({}))
        done = await inside.run(f"health{number}", check.command, check.timeout_s, options)
        if done.exit_code == 0:
            return
        again = health.failed(check, loop.time() - begin, failures)
        if again is None:
            why = interrupted("it", done) or f"it ended with exit status {done.exit_code}"
            said = (done.stdout + done.stderr).strip()[-300:]
            raise InfraError(f"the health check {check.command[:80]!r} failed to the end, at last as {why}: {said}")
        failures = again.failures
        await asyncio.sleep(again.pause_s)


async def prepare(files: bytes, setup: str | None, check: Healthcheck | None, inside: Inside) -> None:
    """Make a sandbox ready for a step: its files (a plain archive) in the folder where commands start, its setup there,
    its health check. Raises `InvalidRequest` where the setup fails, `InfraError` where the machine does."""
    if files:
        where = await inside.run("where", "pwd", STEP_S, Options())
        await inside.put(where.stdout.rstrip("\n") or "/", files, inside.root)
    if setup is not None:
        done = await inside.run("setup", setup, SETUP_S, Options(env=inside.environment({})))
        if done.exit_code != 0:
            why = interrupted("it", done) or f"exit status {done.exit_code}"
            said = (done.stdout + done.stderr).strip()[-300:]
            raise InvalidRequest(f"the setup of the step failed, {why}: {said}")
    if check is not None:
        await healthy(check, inside)


async def collect(tests: TaskTests, inside: Inside) -> str | None:
    """Run the task's own commands in the agent's sandbox before its tests; why that failed, or None.

    A command that fails by its exit status says so to the tests by what is missing; one that is late or killed is a
    failed evaluation.
    """
    for number, item in enumerate(tests.collect):
        options = Options(user=item.user, env=inside.environment(tests.env))
        done = await inside.run(f"collect{number}", item.command, item.timeout_s, options)
        error = interrupted(f"collecting ({item.command[:80]!r})", done)
        if error is not None:
            return error
    return None


async def run_tests(tests: TaskTests, verify_id: str, inside: Inside) -> VerifyResult:
    """The verdict of a task's tests; a failure of the machine is an answer as well."""
    isolated = inside.backend.isolated
    try:
        there = tests.environment is not None and await _brought(tests, inside)
        quoted = LOGS if there else f"{LOGS} {TESTS}"
        await inside.must("clear", f"rm -rf -- {quoted} && mkdir -p -- {LOGS} && chmod 0777 {LOGS}", inside.root)
        if not there:
            await inside.put(TESTS, unsqueeze(tests.archive), inside.root)
        await inside.must("ready", f"chmod +x {TESTS}/*.sh 2>/dev/null; true", inside.root)
        options = Options(env=inside.environment(tests.env), user=tests.user or inside.root)
        ran = await inside.run("tests", f"{{ {tests.command}\n}} 2>&1", tests.timeout_s, options)
        files = contents(await inside.get(LOGS, LEFT_LIMIT))
    except (TaskError, InfraError, ExecTimeout, OutputLimit) as error:
        return _failed(tests, verify_id, f"the tests could not be run: {error}", isolated=isolated)
    except InvalidRequest as error:
        # What the sandbox refuses here is what the agent made of its folders, or a user that is not there.
        return _failed(tests, verify_id, f"the tests could not be brought in or read: {error}", isolated=isolated)
    return of_tests(tests, verify_id, ran, files, isolated=isolated)


async def _brought(tests: TaskTests, inside: Inside) -> bool:
    """Whether a verifier's own environment has its tests already; raises `InvalidRequest` where there are none."""
    there = (await inside.run("look", f"[ -f {TESTS}/test.sh ]", STEP_S, Options(cwd="/"))).exit_code == 0
    if not there and not tests.archive:
        raise InvalidRequest(f"the verifier's environment has no {TESTS}/test.sh, and the task brings none")
    return there


def _failed(tests: TaskTests, verify_id: str, why: str, *, isolated: bool) -> VerifyResult:
    return VerifyResult(
        verify_id=verify_id, parts=(), passed=0, total=0, valid=False, infra_error=why, isolated=isolated,
        baseline=tests.baseline,
    )  # fmt: skip
