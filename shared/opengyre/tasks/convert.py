"""A task's directory as what travels: its environment, its tests, and the task that a user submits. Reads its files.

Tests and the reference solution never travel with the environment; the solution never travels at all.
"""

from collections.abc import Mapping

from opengyre.proto import task as wire
from opengyre.proto.task import Collect, TaskEnvironment, TaskSpec, TaskTests
from opengyre.proto.task_rules import MAX_TEXT, InvalidTaskError, validate_task
from opengyre.tasks.archives import pack, squeeze
from opengyre.tasks.config import Artifact, Environment, Healthcheck, Networked, resolve
from opengyre.tasks.directory import TaskDirectory, TaskStep, ignored
from opengyre.tasks.errors import TaskError


def environment_of(task: TaskDirectory, outside: Mapping[str, str]) -> TaskEnvironment:
    """``outside``: what ``${VAR}`` in its variables stands for. Raises `TaskError`."""
    user = task.steps[0].agent.user
    if any(step.agent.user != user for step in task.steps):
        raise TaskError(f"{task.path}: steps have different agent.user; allowed is one for all of them")
    context = b""
    if task.dockerfile is not None:
        context = squeeze(pack(task.entries_of_context(), ignored=ignored(task.context)))
    return _environment(
        task, "environment", task.config.environment, task.dockerfile, context, user=user, outside=outside,
        network=_network(task),
    )  # fmt: skip


def _network(task: TaskDirectory) -> Networked:
    """What the agent may reach: as its own table says, else as the environment's; one for all steps."""
    said = [step.agent if step.agent.network_mode is not None else task.config.environment for step in task.steps]
    modes = {(one.network_mode, one.allowed_hosts) for one in said}
    if len(modes) > 1:
        raise TaskError(f"{task.path}: steps have different agent.network_mode; allowed is one for all of them")
    return said[0]


def _environment(
    task: TaskDirectory,
    where: str,
    said: Environment,
    dockerfile: str | None,
    context: bytes,
    *,
    user: str | None,
    outside: Mapping[str, str],
    network: Networked | None = None,
) -> TaskEnvironment:
    network = network or said
    return TaskEnvironment(
        image=said.docker_image if dockerfile is None else None,
        dockerfile=dockerfile,
        context=context,
        build_timeout_s=said.build_timeout_sec,
        env=resolve(f"{task.path}: {where}.env", said.env, outside),
        workdir=said.workdir,
        user=user,
        cpus=said.cpus,
        memory_mb=said.memory_mb,
        storage_mb=said.storage_mb,
        healthcheck=healthcheck_of(said.healthcheck),
        network="allowlist" if network.network_mode == "allowlist" else "none",
        allowed_hosts=network.allowed_hosts or (),
    )


def healthcheck_of(said: Healthcheck | None) -> wire.Healthcheck | None:
    """As it travels."""
    if said is None:
        return None
    return wire.Healthcheck(
        command=said.command,
        interval_s=said.interval_sec,
        timeout_s=said.timeout_sec,
        start_period_s=said.start_period_sec,
        start_interval_s=said.start_interval_sec,
        retries=said.retries,
    )


def _artifact(task: TaskDirectory, artifact: Artifact) -> wire.Artifact:
    if artifact.service not in (None, "main"):
        raise TaskError(f"{task.path}: artifacts want service {artifact.service!r}; allowed is 'main'")
    return wire.Artifact(source=artifact.source, exclude=artifact.exclude)


def _own_environment(task: TaskDirectory, step: TaskStep, outside: Mapping[str, str]) -> TaskEnvironment | None:
    """The environment of a step's tests, where they have one."""
    own = step.own
    if own is None:
        return None
    context = b""
    if own.dockerfile is not None and own.context is not None:
        context = squeeze(pack([("", own.context)], ignored=ignored(own.context)))
    return _environment(task, "verifier.environment", own.said, own.dockerfile, context, user=None, outside=outside)


def verifier_of(task: TaskDirectory, step: TaskStep, outside: Mapping[str, str]) -> TaskTests:
    """The verifier of one step; raises `TaskError`."""
    verifier = step.verifier
    for collect in verifier.collect:
        if collect.service != "main":
            raise TaskError(f"{task.path}: verifier.collect wants service {collect.service!r}; allowed is 'main'")
    baseline = task.config.metadata.get("baseline_passed", 0)
    return TaskTests(
        archive=squeeze(pack(step.tests)) if step.tests else b"",
        command=step.test_command,
        timeout_s=verifier.timeout_sec,
        env=resolve(f"{task.path}: verifier.env", verifier.env, outside),
        user=verifier.user,
        separate=step.separate,
        environment=_own_environment(task, step, outside),
        artifacts=tuple(_artifact(task, artifact) for artifact in step.artifacts),
        collect=tuple(
            Collect(command=item.command, timeout_s=item.timeout_sec, user=item.user) for item in verifier.collect
        ),
        parser=step.parser,
        baseline=baseline if isinstance(baseline, int) and baseline >= 0 else 0,
    )


def _instruction(task: TaskDirectory, step: TaskStep) -> str:
    instruction = step.instruction.strip()
    if len(instruction) > MAX_TEXT:
        raise TaskError(f"{task.path}: the instruction has {len(instruction)} characters; allowed are {MAX_TEXT}")
    return instruction


def step_of(task: TaskDirectory, step: TaskStep, outside: Mapping[str, str]) -> wire.TaskStep:
    """One step as it travels; raises `TaskError`."""
    workdir = step.workdir
    return wire.TaskStep(
        name=step.name,
        instruction=_instruction(task, step),
        tests=verifier_of(task, step, outside),
        files=squeeze(pack([("", workdir)])) if workdir is not None else b"",
        setup="bash ./setup.sh" if workdir is not None and (workdir / "setup.sh").is_file() else None,
        healthcheck=healthcheck_of(step.healthcheck),
        time_budget_s=step.agent.timeout_sec,
        min_reward=step.min_reward,
    )


def unused(task: TaskDirectory) -> list[str]:
    """Fields that the task sets and nothing here reads."""
    config = task.config
    names = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir")
    found = [f"environment.{name}" for name in names if getattr(config.environment, name)]
    if config.environment.network_mode == "public":
        found.append("environment.network_mode = 'public' (it has no network; 'allowlist' reaches named hosts)")
    for step in task.steps:
        if step.own is None and step.verifier.network_mode is not None:
            found.append("verifier.network_mode (its tests reach what the agent does)")
            break
    said = [*config.artifacts, *(artifact for step in config.steps for artifact in step.artifacts)]
    carried = {artifact.source for step in task.steps for artifact in step.artifacts}
    if any(artifact.source not in carried for artifact in said):
        found.append("artifacts of a verifier that sees all that the agent left")
    if any(artifact.destination is not None for artifact in said):
        found.append("artifacts.destination")
    return found


def spec_of(task: TaskDirectory, outside: Mapping[str, str]) -> TaskSpec:
    """The task as it is submitted; raises `TaskError`."""
    labels = {"format": task.format, "name": task.name[:96]}
    for key in ("difficulty", "category"):
        value = task.config.metadata.get(key)
        if isinstance(value, str) and value:
            labels[key] = value[:96]
    first, several = task.steps[0], bool(task.config.steps)
    spec = TaskSpec(
        task=task.identifier,
        instruction=_instruction(task, first),
        environment=environment_of(task, outside),
        tests=None if several else verifier_of(task, first, outside),
        steps=tuple(step_of(task, step, outside) for step in task.steps) if several else (),
        reward=task.config.multi_step_reward_strategy or "mean",
        time_budget_s=task.config.agent.timeout_sec,
        labels=labels,
    )
    try:
        return validate_task(spec)
    except InvalidTaskError as error:
        raise TaskError(f"{task.path}: {error}") from error
