"""A task in a fresh sandbox: its steps one after another, with or without the reference solution.

Awaits: the sandbox; every step is bounded by the task's own timeouts.
"""

import secrets
from collections.abc import Mapping

import msgspec

from opengyre.proto.sandbox import VerifyResult
from opengyre.proto.task import TaskEnvironment, TaskTests
from opengyre.sandbox.apart import carry, own
from opengyre.sandbox.core import SandboxError, Spec
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import Inside, collect, prepare, run_tests
from opengyre.sandbox.verdict import interrupted
from opengyre.tasks.archives import pack, unsqueeze
from opengyre.tasks.config import resolve
from opengyre.tasks.convert import environment_of, step_of, unused
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
    verifier: str = ""
    """Where the tests' own environment comes from; empty where they have none."""

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
    """Both could be evaluated, the solution earns 1 on every reward, more than nothing on some, and the task can be
    submitted."""
    remarks: tuple[str, ...]


def judged(
    task: TaskDirectory, sentence: str, nothing: Outcome, reference: Outcome | None, refused: str | None = None
) -> Facts:
    """The verdict on a task. ``refused``: why it cannot be submitted, if so. Pure."""
    remarks = []
    if refused is not None and refused != nothing.error:
        remarks.append(f"it cannot be submitted: {refused}")
    if nothing.error is not None:
        remarks.append(f"with nothing done it could not be evaluated: {nothing.error}")
    elif earned := {name: value for name, value in nothing.rewards.items() if value > 0}:
        remarks.append("doing nothing earns " + ", ".join(f"{name}={value:g}" for name, value in earned.items()))
    if nothing.error is None and reference is None:
        remarks.append("there is no reference solution")
    if reference is not None and reference.error is not None:
        remarks.append(f"with the solution it could not be evaluated: {reference.error}")
    if nothing.verifier:
        remarks.append(f"environment of the tests: {nothing.verifier}")
    if not_used := unused(task):
        remarks.append(f"not used here: {', '.join(not_used)}")
    good = False
    if nothing.error is None and reference is not None and reference.error is None:
        # Of several steps each has rewards of its own, which a mean over all of them would mix.
        each = reference.steps or (reference.rewards,)
        short = {name: value for rewards in each for name, value in rewards.items() if value < 1}
        gained = any(value > nothing.rewards.get(name, 0.0) for name, value in reference.rewards.items())
        if short:
            remarks.append("the solution earns only " + ", ".join(f"{name}={value:g}" for name, value in short.items()))
        elif not gained:
            remarks.append("the solution earns no more than doing nothing")
        good = gained and not short and refused is None
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
        last = await _step(task, step, environments, inside, outside, solve=solve)
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
    task: TaskDirectory,
    step: TaskStep,
    environments: Environments,
    inside: Inside,
    outside: Mapping[str, str],
    *,
    solve: bool,
) -> Outcome:
    said = step_of(task, step, outside)
    await prepare(unsqueeze(said.files) if said.files else b"", said.setup, said.healthcheck, inside)
    if solve:
        env = resolve(f"{task.path}: solution.env", task.config.solution.env, outside)
        bound = step.agent.timeout_sec or SOLVE_S
        ran = await inside.solve(pack(step.solution), step.solve_command, env, bound)
        error = interrupted("the solution", ran)
        if error is not None:
            return Outcome(error=error, output=(ran.stdout + ran.stderr)[-2000:])
    await inside.backend.quiet(inside.spec.sandbox)
    error = await collect(said.tests, inside)
    if error is not None:
        return Outcome(error=error)
    if said.tests.environment is None:
        verdict = await run_tests(said.tests, inside.prefix, inside)
    else:
        verdict = await _apart(said.tests, said.tests.environment, environments, inside)
    return Outcome(
        rewards=dict(verdict.rewards),
        passed=verdict.passed,
        total=verdict.total,
        error=verdict.infra_error,
        output=verdict.output,
        verifier=verdict.environment,
    )


async def _apart(
    tests: TaskTests, environment: TaskEnvironment, environments: Environments, inside: Inside
) -> VerifyResult:
    """The verdict of tests that have an environment of their own."""
    defaults = Spec(sandbox="", memory_mb=MEMORY_MB, workspace_mb=WORKSPACE_MB)
    name = f"{inside.spec.sandbox}-{inside.prefix}-own"
    spec, made = own(environments, defaults, name, environment)
    try:
        await environments.create(spec, environment, made, {})
        judged = environments.inside(spec, inside.prefix)
        await carry(tests.artifacts, inside, judged)
        return msgspec.structs.replace(await run_tests(tests, inside.prefix, judged), environment=made.sentence)
    finally:
        await environments.backend.destroy(spec.sandbox)
