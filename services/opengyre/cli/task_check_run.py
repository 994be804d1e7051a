"""A task in a fresh sandbox: its steps one after another, with or without the reference solution.

Awaits: the sandbox; every step is bounded by the task's own timeouts.
"""

import secrets
import shlex
from collections.abc import Mapping

import msgspec

from opengyre.sandbox.core import InfraError, Options, SandboxError, Spec
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import Inside, collect, run_tests
from opengyre.sandbox.verdict import interrupted
from opengyre.tasks.archives import pack
from opengyre.tasks.config import resolve
from opengyre.tasks.convert import environment_of, verifier_of
from opengyre.tasks.directory import TaskDirectory, TaskStep
from opengyre.tasks.errors import TaskError
from opengyre.tasks.rewards import enough, over_steps

SOLVE_S = 600.0
"""For a solution whose task sets the agent no time."""
MEMORY_MB = 1024
WORKSPACE_MB = 256


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests said."""

    rewards: dict[str, float] = {}
    passed: int = 0
    total: int = 0
    error: str | None = None
    """Why it could not be evaluated; then the numbers mean nothing."""
    output: str = ""
    steps: tuple[dict[str, float], ...] = ()
    """Rewards of each step that was run."""

    def text(self) -> str:
        """One cell of a table."""
        if self.error is not None:
            return "failed"
        return " ".join(f"{name}={value:g}" for name, value in self.rewards.items())


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a task after its check."""

    task: str
    path: str
    format: str
    schema_version: str
    environment: str
    nothing: Outcome
    reference: Outcome | None
    """None: it has no solution, or the tests could not be run with nothing done."""
    baseline: int
    """Tests that pass with nothing done."""
    ok: bool
    """Both could be evaluated, and the solution earns 1 on every reward, more than nothing on some."""
    remarks: tuple[str, ...]


def judged(task: TaskDirectory, sentence: str, nothing: Outcome, reference: Outcome | None) -> Facts:
    """The verdict on a task. Pure."""
    remarks = []
    if nothing.error is not None:
        remarks.append(f"with nothing done it could not be evaluated: {nothing.error}")
    elif earned := {name: value for name, value in nothing.rewards.items() if value > 0}:
        remarks.append("doing nothing earns " + ", ".join(f"{name}={value:g}" for name, value in earned.items()))
    if nothing.error is None and reference is None:
        remarks.append("there is no reference solution")
    if reference is not None and reference.error is not None:
        remarks.append(f"with the solution it could not be evaluated: {reference.error}")
    good = False
    if nothing.error is None and reference is not None and reference.error is None:
        short = {name: value for name, value in reference.rewards.items() if value < 1}
        gained = any(value > nothing.rewards.get(name, 0.0) for name, value in reference.rewards.items())
        if short:
            remarks.append("the solution earns only " + ", ".join(f"{name}={value:g}" for name, value in short.items()))
        elif not gained:
            remarks.append("the solution earns no more than doing nothing")
        good = gained and not short
    return Facts(
        task=task.name,
        path=str(task.path),
        format=task.format,
        schema_version=task.config.schema_version if task.format == "harbor" else "",
        environment=sentence,
        nothing=nothing,
        reference=reference,
        baseline=nothing.passed if nothing.total else 0,
        ok=good,
        remarks=tuple(remarks),
    )


async def run_task(
    task: TaskDirectory, environments: Environments, outside: Mapping[str, str], *, solve: bool
) -> tuple[Outcome, str]:
    """The outcome, and the sentence about the environment (empty where there is none)."""
    sentence = ""
    spec = Spec(sandbox=f"check-{secrets.token_hex(6)}", memory_mb=MEMORY_MB, workspace_mb=WORKSPACE_MB)
    try:
        environment = environment_of(task, outside)
        spec, made = environments.specify(spec, environment)
        sentence = made.sentence
        try:
            await environments.create(spec, environment, made, {})
            return await _steps(task, environments, spec, outside, solve=solve), sentence
        finally:
            await environments.backend.destroy(spec.sandbox)
    except (TaskError, SandboxError) as error:
        return Outcome(error=str(error)), sentence


async def _steps(
    task: TaskDirectory, environments: Environments, spec: Spec, outside: Mapping[str, str], *, solve: bool
) -> Outcome:
    done: list[dict[str, float]] = []
    last = Outcome()
    for number, step in enumerate(task.steps):
        inside = environments.inside(spec, f"step{number}")
        last = await _step(task, step, inside, outside, solve=solve)
        if last.error is not None:
            where = f"step {step.name}: " if step.name else ""
            return msgspec.structs.replace(last, error=f"{where}{last.error}", steps=tuple(done))
        done.append(last.rewards)
        if not enough(last.rewards, step.min_reward):
            break
    if len(task.steps) == 1:
        return last
    rewards = over_steps(done, task.config.multi_step_reward_strategy or "mean", len(task.steps))
    return msgspec.structs.replace(last, rewards=rewards, steps=tuple(done))


async def _step(
    task: TaskDirectory, step: TaskStep, inside: Inside, outside: Mapping[str, str], *, solve: bool
) -> Outcome:
    if step.workdir is not None:
        await _prepare(step, inside)
    if solve:
        env = resolve(f"{task.path}: solution.env", task.config.solution.env, outside)
        bound = step.agent.timeout_sec or task.config.agent.timeout_sec or SOLVE_S
        ran = await inside.solve(pack(step.solution), step.solve_command, env, bound)
        error = interrupted("the solution", ran)
        if error is not None:
            return Outcome(error=error, output=(ran.stdout + ran.stderr)[-2000:])
    await inside.backend.quiet(inside.spec.sandbox)
    tests = verifier_of(task, step, outside)
    error = await collect(tests, inside)
    if error is not None:
        return Outcome(error=error)
    said = await run_tests(tests, inside.prefix, inside)
    return Outcome(
        rewards=dict(said.rewards), passed=said.passed, total=said.total, error=said.infra_error, output=said.output
    )


async def _prepare(step: TaskStep, inside: Inside) -> None:
    """Bring a step's files into the working folder, and run its ``setup.sh`` there."""
    assert step.workdir is not None
    folder = inside.spec.workdir or "/"
    await inside.put(folder, pack([("", step.workdir)]), inside.root)
    if (step.workdir / "setup.sh").is_file():
        command = f"bash {shlex.quote(folder.rstrip('/') + '/setup.sh')}"
        done = await inside.run("setup", command, SOLVE_S, Options(env=inside.environment({})))
        if done.exit_code != 0:
            raise InfraError(f"setup.sh of step {step.name} failed: {(done.stdout + done.stderr).strip()[-300:]}")
