"""A task's directory, read and checked as a whole: Harbor's layout, or Terminal-Bench 1's. Reads files.

Whatever the format, a task is an environment and steps; one that names no steps is one step without a name. Paths in
the environment are Harbor's: tests at ``/tests``, the reference solution at ``/solution``, what the tests leave in
``/logs/verifier``.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel

from opengyre.tasks import ignoring
from opengyre.tasks.config import Agent, Artifact, Config, Environment, Healthcheck, Step, Verifier, read_config
from opengyre.tasks.errors import TaskError
from opengyre.tasks.terminal_bench import read_bench_config

MAX_TEXT = 1 << 20
TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs/verifier"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")

Parser = Literal["rewards", "pytest"]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class TaskStep:
    """What an agent is asked for at once, and how that is judged."""

    name: str
    instruction: str
    tests: tuple[tuple[str, Path], ...]
    """Name below ``/tests`` -> file or folder here, later ones over earlier ones; empty: the verifier's environment has
    them."""
    test_command: str
    parser: Parser
    solution: tuple[tuple[str, Path], ...]
    """Name below ``/solution`` -> file or folder here; empty: there is no reference solution."""
    solve_command: str
    workdir: Path | None
    """A folder whose content goes to the working folder before the step; its ``setup.sh`` is run there."""
    agent: Agent
    verifier: Verifier
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    own: "VerifierEnvironment | None" = None
    """None: the tests run in the task's environment as the agent left it, or in a copy of it."""
    separate: bool = False
    """Asks for a clean sandbox."""
    artifacts: tuple[Artifact, ...] = ()
    """With an environment of the verifier's own."""


@dataclass(frozen=True)
class VerifierEnvironment:
    """Where the tests of a step run, if not in what the agent left."""

    said: Environment
    context: Path | None
    dockerfile: str | None
    """Text of it; None where an image is named."""


@dataclass(frozen=True)
class TaskDirectory:
    """A task as it lies on a disk."""

    path: Path
    format: Literal["harbor", "terminal-bench-1"]
    name: str
    config: Config
    steps: tuple[TaskStep, ...]
    context: Path | None
    """Build context of the environment."""
    dockerfile: str | None
    """Text of it; None where an image is named."""

    @property
    def identifier(self) -> str:
        """A name that is a token of the bus's subjects."""
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", self.name.rpartition("/")[2]).strip("-")
        return plain[:80] or "task"

    def entries_of_context(self) -> list[tuple[str, Path]]:
        """What may be copied into the environment: never tests or solutions."""
        if self.context is None:
            return []
        if self.format == "harbor":
            return [("", self.context)]
        hidden = {"tests", "run-tests.sh", "solution.sh", "solution.yaml", "task.yaml", "Dockerfile", *COMPOSE}
        return [(path.name, path) for path in sorted(self.context.iterdir()) if path.name not in hidden]


def read_task(path: Path) -> TaskDirectory:
    """The task in a directory; raises `TaskError`."""
    if not path.is_dir():
        raise TaskError(
            f"{path} is no directory; allowed is one with task.toml (Harbor) or task.yaml (Terminal-Bench 1)"
        )
    if (path / "task.toml").is_file():
        return _harbor(path)
    if (path / "task.yaml").is_file():
        return _terminal_bench(path)
    raise TaskError(f"{path} has neither task.toml (Harbor) nor task.yaml (Terminal-Bench 1); one of them is needed")


def _within(path: Path, task: Path) -> Path:
    """The path itself, or what a link leads to; a task is what is in its directory, and nothing beside it."""
    if path.resolve().is_relative_to(task.resolve()):
        return path.resolve() if path.is_symlink() else path
    raise TaskError(f"{path} leads to {path.resolve()}; allowed are links within the task")


def _text(path: Path, task: Path) -> str:
    try:
        path = _within(path, task)
        if path.exists() and not path.is_file():
            raise TaskError(f"{path} is no file; allowed is one with text")
        data = path.read_bytes()
        if len(data) > MAX_TEXT:
            raise TaskError(f"{path} has {len(data)} bytes; allowed are {MAX_TEXT}")
        return data.decode()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text") from error


def ignored(context: Path | None) -> ignoring.Rules:
    """What the build context's own file leaves out of it; raises `TaskError`."""
    for name in ignoring.NAMES if context is not None else ():
        assert context is not None
        if (context / name).is_file():
            return ignoring.rules(_text(context / name, context), str(context / name))
    return ()


def _harbor(path: Path) -> TaskDirectory:
    config = read_config(_text(path / "task.toml", path), str(path / "task.toml"))
    environment = config.environment
    _linux(path, "environment", environment)
    context = _within(path / "environment", path)
    text = None
    if environment.docker_image is None:
        text = _dockerfile(path, context, "environment")
    steps = tuple(_step(path, config, step) for step in config.steps or (None,))
    name = config.task.name if config.task is not None else path.resolve().name
    return TaskDirectory(
        path=path,
        format="harbor",
        name=name,
        config=config,
        steps=steps,
        context=context if context.is_dir() else None,
        dockerfile=text,
    )


def _linux(path: Path, where: str, environment: Environment) -> None:
    if environment.os != "linux":
        raise TaskError(f"{path / 'task.toml'}: {where}.os is {environment.os!r}; allowed here is 'linux'")


def _dockerfile(path: Path, context: Path, field: str) -> str:
    """Text of a folder's Dockerfile, which is there as no image is named."""
    if (context / "Dockerfile").is_file():
        return _text(context / "Dockerfile", path)
    compose = next((name for name in COMPOSE if (context / name).exists()), None)
    why = f"it has {compose}, of several containers, which is not run here" if compose else "there is none"
    raise TaskError(f"{path}: {context.name}/Dockerfile or {field}.docker_image is needed; {why}")


def _overlaid(whole: Model, own: Model | None) -> Model:
    """A table of the task with what a step's table sets over it."""
    if own is None:
        return whole
    return whole.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def _step(task: Path, config: Config, step: Step | None) -> TaskStep:
    name = step.name if step is not None else ""
    folder = _within(task / "steps" / name, task) if name else task
    said = step.verifier if step is not None else None
    verifier = _overlaid(config.verifier, said)
    if said is not None:
        verifier = verifier.model_copy(update={"env": {**config.verifier.env, **said.env}})
    separate = ((said.said if said is not None else None) or config.verifier.mode) == "separate"
    artifacts = (*config.artifacts, *(step.artifacts if step is not None else ()))
    own = _own(task, config, folder, verifier.environment, carries=bool(artifacts)) if separate else None
    solution = _within(folder / "solution", task)
    solvable = (solution / "solve.sh").is_file()
    workdir = _within(folder / "workdir", task)
    return TaskStep(
        name=name,
        instruction=_text(folder / "instruction.md", task),
        tests=_tests(task, folder, own),
        test_command=f"{TESTS}/test.sh",
        parser="rewards",
        solution=(("", solution),) if solvable else (),
        solve_command=f"bash {SOLUTION}/solve.sh",
        workdir=workdir if name and workdir.is_dir() else None,
        agent=_overlaid(config.agent, step.agent if step is not None else None),
        verifier=verifier,
        min_reward=step.min_reward if step is not None else None,
        healthcheck=step.healthcheck if step is not None else None,
        own=own,
        separate=separate,
        artifacts=artifacts if own is not None else (),
    )


def _tests(task: Path, folder: Path, own: VerifierEnvironment | None) -> tuple[tuple[str, Path], ...]:
    """The task's tests, then those of the step: its files take the place of the task's."""
    named = dict.fromkeys(_within(path / "tests", task) for path in (task, folder))
    folders = [path for path in named if path.is_dir()]
    if own is not None and own.context in folders:
        return ()  # they were what the environment is made from, and it has what it took of them
    if not any((path / "test.sh").is_file() for path in folders):
        if own is not None:
            return ()
        raise TaskError(f"{folder / 'tests' / 'test.sh'} is not there; the tests of a task begin with it")
    return tuple(("", path) for path in folders)


def _own(
    task: Path, config: Config, folder: Path, said: Environment | None, *, carries: bool
) -> VerifierEnvironment | None:
    """The environment of a separate verifier. None: a copy of what the agent left, where nothing else is said."""
    tests = _within((folder if (folder / "tests").is_dir() else task) / "tests", task)
    if said is not None:
        _linux(task, "verifier.environment", said)
        if said.docker_image is not None:
            return VerifierEnvironment(said=said, context=None, dockerfile=None)
        return VerifierEnvironment(
            said=said, context=tests, dockerfile=_dockerfile(task, tests, "verifier.environment")
        )
    if (tests / "Dockerfile").is_file():
        return VerifierEnvironment(said=config.environment, context=tests, dockerfile=_text(tests / "Dockerfile", task))
    if not carries:
        return None
    if config.environment.docker_image is not None:
        return VerifierEnvironment(said=config.environment, context=None, dockerfile=None)
    context = _within(task / "environment", task)
    return VerifierEnvironment(
        said=config.environment, context=context, dockerfile=_dockerfile(task, context, "environment")
    )


def _terminal_bench(path: Path) -> TaskDirectory:
    found = read_bench_config(_text(path / "task.yaml", path), str(path / "task.yaml"))
    for name in ("Dockerfile", "run-tests.sh"):
        if not (path / name).is_file():
            raise TaskError(f"{path / name} is not there; a task of Terminal-Bench 1 has it")
    tests = [("run-tests.sh", path / "run-tests.sh")]
    if (path / "tests").is_dir():
        tests.append(("", _within(path / "tests", path)))
    solution, solve = _bench_solution(path)
    step = TaskStep(
        name="",
        instruction=found.instruction,
        tests=tuple(tests),
        test_command=f"bash {TESTS}/run-tests.sh",
        parser="pytest",
        solution=solution,
        solve_command=solve,
        workdir=None,
        agent=Agent(timeout_sec=found.max_agent_timeout_sec),
        verifier=Verifier(timeout_sec=found.max_test_timeout_sec, env={"TEST_DIR": TESTS}),
    )
    return TaskDirectory(
        path=path,
        format="terminal-bench-1",
        name=path.resolve().name,
        config=Config(agent=step.agent, verifier=step.verifier),
        steps=(step,),
        context=path,
        dockerfile=_text(path / "Dockerfile", path),
    )


def _bench_solution(path: Path) -> tuple[tuple[tuple[str, Path], ...], str]:
    if (path / "solution.sh").is_file():
        return (("solution.sh", path / "solution.sh"),), f"bash {SOLUTION}/solution.sh"
    if not (path / "solution.yaml").is_file():
        return (), ""
    place = path / "solution.yaml"
    try:
        commands = yaml.safe_load(_text(place, path))
    except yaml.YAMLError as error:
        raise TaskError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(commands, list) or not all(
        isinstance(item, dict) and isinstance(item.get("command"), str) for item in commands
    ):
        raise TaskError(f"{place} is no list of commands; allowed are entries with the field command")
    return (("solution.yaml", place),), "\n".join(item["command"] for item in commands)
