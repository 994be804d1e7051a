"""A task's directory as what travels: its environment, its tests, and the task that a user submits. Reads its files.

Tests and the reference solution never travel with the environment; the solution never travels at all.
"""

from collections.abc import Mapping

from opengyre.proto.task import Collect, TaskEnvironment, TaskSpec, TaskTests
from opengyre.proto.task_rules import MAX_TEXT, InvalidTaskError, validate_task
from opengyre.tasks.archives import pack, squeeze
from opengyre.tasks.config import resolve
from opengyre.tasks.directory import TaskDirectory, TaskStep
from opengyre.tasks.errors import TaskError


def environment_of(task: TaskDirectory, outside: Mapping[str, str]) -> TaskEnvironment:
    """``outside``: what ``${VAR}`` in its variables stands for. Raises `TaskError`."""
    said = task.config.environment
    user = task.steps[0].agent.user if task.config.agent.user is None else task.config.agent.user
    return TaskEnvironment(
        image=said.docker_image if task.dockerfile is None else None,
        dockerfile=task.dockerfile,
        context=squeeze(pack(task.entries_of_context())) if task.dockerfile is not None else b"",
        build_timeout_s=said.build_timeout_sec,
        env=resolve(f"{task.path}: environment.env", said.env, outside),
        workdir=said.workdir,
        user=None if user is None else str(user),
        cpus=said.cpus,
        memory_mb=said.memory_mb,
        storage_mb=said.storage_mb,
    )


def verifier_of(task: TaskDirectory, step: TaskStep, outside: Mapping[str, str]) -> TaskTests:
    """The verifier of one step; raises `TaskError`."""
    verifier = step.verifier
    whole = task.config.verifier
    env = {**whole.env, **verifier.env}
    for collect in verifier.collect:
        if collect.service != "main":
            raise TaskError(f"{task.path}: verifier.collect wants service {collect.service!r}; allowed is 'main'")
    user = verifier.user if verifier.user is not None else whole.user
    baseline = task.config.metadata.get("baseline_passed", 0)
    return TaskTests(
        archive=squeeze(pack(step.tests)),
        command=step.test_command,
        timeout_s=verifier.timeout_sec,
        env=resolve(f"{task.path}: verifier.env", env, outside),
        user=None if user is None else str(user),
        separate=verifier.mode == "separate",
        collect=tuple(
            Collect(
                command=item.command, timeout_s=item.timeout_sec, user=None if item.user is None else str(item.user)
            )
            for item in verifier.collect
        ),
        parser=step.parser,
        baseline=baseline if isinstance(baseline, int) and baseline >= 0 else 0,
    )


def spec_of(task: TaskDirectory, outside: Mapping[str, str]) -> TaskSpec:
    """The task as it is submitted; raises `TaskError` for one that a run cannot give to an agent as a whole."""
    step = task.steps[0]
    if len(task.steps) > 1:
        raise TaskError(f"{task.path} has {len(task.steps)} steps; allowed in a run is one")
    if task.config.verifier.environment is not None:
        raise TaskError(
            f"{task.path}: verifier.environment is set; allowed in a run is a verifier in the task's own environment, "
            "shared or separate"
        )
    instruction = step.instruction.strip()
    if len(instruction) > MAX_TEXT:
        raise TaskError(f"{task.path}: the instruction has {len(instruction)} characters; allowed are {MAX_TEXT}")
    labels = {"format": task.format, "name": task.name[:96]}
    for key in ("difficulty", "category"):
        value = task.config.metadata.get(key)
        if isinstance(value, str) and value:
            labels[key] = value[:96]
    spec = TaskSpec(
        task=task.identifier,
        instruction=instruction,
        environment=environment_of(task, outside),
        tests=verifier_of(task, step, outside),
        time_budget_s=step.agent.timeout_sec or task.config.agent.timeout_sec,
        labels=labels,
    )
    try:
        return validate_task(spec)
    except InvalidTaskError as error:
        raise TaskError(f"{task.path}: {error}") from error
