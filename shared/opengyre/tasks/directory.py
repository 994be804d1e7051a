"""A task's directory, read and checked as a whole: Harbor's layout, or Terminal-Bench 1's. Reads files.

Whatever the format, a task is an environment and steps; one that names no steps is one step without a name. Paths in
the environment are Harbor's: tests at ``/tests``, the reference solution at ``/solution``, what the tests leave in
``/logs/verifier``.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from opengyre.tasks.archives import pack
from opengyre.tasks.config import Agent, Config, Verifier, read_config
from opengyre.tasks.errors import TaskError
from opengyre.tasks.terminal_bench import read_bench_config

MAX_TEXT = 1 << 20
TESTS = "/tests"
SOLUTION = "/solution"
LOGS = "/logs/verifier"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")

Parser = Literal["rewards", "pytest"]


@dataclass(frozen=True)
class TaskStep:
    """What an agent is asked for at once, and how that is judged."""

    name: str
    instruction: str
    tests: tuple[tuple[str, Path], ...]
    """Name below ``/tests`` -> file or folder here."""
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

    def digest(self) -> str:
        """Identifies the environment: the same for the same Dockerfile and context, or image."""
        found = hashlib.sha256(repr((self.dockerfile, self.config.environment.docker_image)).encode())
        if self.dockerfile is not None and self.context is not None:
            found.update(pack(self.entries_of_context()))
        return found.hexdigest()[:32]

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


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > MAX_TEXT:
            raise TaskError(f"{path} has {len(data)} bytes; allowed are {MAX_TEXT}")
        return data.decode()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text") from error


def _harbor(path: Path) -> TaskDirectory:
    config = read_config(_text(path / "task.toml"), str(path / "task.toml"))
    environment = config.environment
    if environment.os != "linux":
        raise TaskError(f"{path / 'task.toml'}: environment.os is {environment.os!r}; allowed here is 'linux'")
    context = path / "environment"
    dockerfile = context / "Dockerfile"
    text = None
    if environment.docker_image is None:
        compose = next((name for name in COMPOSE if (context / name).exists()), None)
        if not dockerfile.is_file():
            why = f"it has {compose}, of several containers, which is not run here" if compose else "there is none"
            raise TaskError(f"{path}: environment/Dockerfile or environment.docker_image is needed; {why}")
        text = _text(dockerfile)
    if config.steps:
        steps = tuple(
            _step(path / "steps" / step.name, path, step.name, step.agent, step.verifier, step.min_reward)
            for step in config.steps
        )
    else:
        steps = (_step(path, path, "", config.agent, config.verifier, None),)
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


def _step(
    folder: Path, task: Path, name: str, agent: Agent, verifier: Verifier, least: float | dict[str, float] | None
) -> TaskStep:
    tests = folder / "tests"
    if not tests.is_dir():
        tests = task / "tests"
    if not (tests / "test.sh").is_file():
        raise TaskError(f"{tests / 'test.sh'} is not there; the tests of a task begin with it")
    solution = folder / "solution"
    solvable = (solution / "solve.sh").is_file()
    workdir = folder / "workdir"
    return TaskStep(
        name=name,
        instruction=_text(folder / "instruction.md"),
        tests=(("", tests),),
        test_command=f"{TESTS}/test.sh",
        parser="rewards",
        solution=(("", solution),) if solvable else (),
        solve_command=f"bash {SOLUTION}/solve.sh",
        workdir=workdir if name and workdir.is_dir() else None,
        agent=agent,
        verifier=verifier,
        min_reward=least,
    )


def _terminal_bench(path: Path) -> TaskDirectory:
    found = read_bench_config(_text(path / "task.yaml"), str(path / "task.yaml"))
    for name in ("Dockerfile", "run-tests.sh"):
        if not (path / name).is_file():
            raise TaskError(f"{path / name} is not there; a task of Terminal-Bench 1 has it")
    tests = [("run-tests.sh", path / "run-tests.sh")]
    if (path / "tests").is_dir():
        tests.append(("", path / "tests"))
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
        dockerfile=_text(path / "Dockerfile"),
    )


def _bench_solution(path: Path) -> tuple[tuple[tuple[str, Path], ...], str]:
    if (path / "solution.sh").is_file():
        return (("solution.sh", path / "solution.sh"),), f"bash {SOLUTION}/solution.sh"
    if not (path / "solution.yaml").is_file():
        return (), ""
    place = path / "solution.yaml"
    try:
        commands = yaml.safe_load(_text(place))
    except yaml.YAMLError as error:
        raise TaskError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(commands, list) or not all(
        isinstance(item, dict) and isinstance(item.get("command"), str) for item in commands
    ):
        raise TaskError(f"{place} is no list of commands; allowed are entries with the field command")
    return (("solution.yaml", place),), "\n".join(item["command"] for item in commands)
