"""A recipe: a TOML file that says what run is to be made of which tasks. Every fault is one sentence.

[run]                      # the fields of a run: run, model, updates, seed
run = "shell"
model = "runs/cache/warmstart"
updates = 64
[run.dispatch]             # phi, mu, batch_groups, group_size, min_members
phi = 0.5
[tasks]
path = "tasks/"            # a file or a directory of tasks, or:
generator = "shelltasks"   # generated ones: count, seed, split
count = 600
[evaluation]               # may be left out: tasks, as in [tasks], that are never trained
generator = "shelltasks"
count = 24
every = 8                  # updates between two evaluations; the first policy and the last are evaluated in any case
[hardware]                 # what `--dry-run` assumes: gpus, cell_gpus, gpu, ...; without it this machine
gpus = 8
"""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from opengyre.cli.task_files import TaskFileError, known, load_tasks
from opengyre.cli.wrong import wrong_type
from opengyre.proto.ids import BadIdentifierError, check_run
from opengyre.proto.run import (
    Branching,
    Dispatch,
    Elastic,
    Harness,
    InvalidRunError,
    Optimization,
    RunSpec,
    Sampling,
    Scoring,
    Serving,
    Shot,
    validate,
)
from opengyre.proto.task import TaskSpec
from opengyre.shelltasks.tasks import generate
from opengyre.sizing.hardware import Hardware

S = TypeVar("S", "TaskSource", "EvaluationSource")

MAX_COUNT = 1_000_000
PARTS = {
    "dispatch": Dispatch,
    "harness": Harness,
    "optimization": Optimization,
    "sampling": Sampling,
    "scoring": Scoring,
    "elastic": Elastic,
    "serving": Serving,
}


class TaskSource(msgspec.Struct, frozen=True, kw_only=True):
    """The table `[tasks]`."""

    path: str | None = None
    """Relative to the recipe."""
    generator: Literal["shelltasks"] | None = None
    count: int = 100
    seed: int = 0
    split: Literal["train", "eval"] = "train"


class EvaluationSource(TaskSource, frozen=True, kw_only=True):
    """The table `[evaluation]`."""

    count: int = 24
    split: Literal["train", "eval"] = "eval"
    every: int | None = None
    """Updates between two evaluations; None: only the first policy and the last are evaluated."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe amounts to."""

    run: RunSpec
    tasks: tuple[TaskSpec, ...]
    evaluation: tuple[TaskSpec, ...] = ()
    """The held-out tasks, once for each version that they evaluate."""
    hardware: Hardware | None = None
    """What a dry run assumes. None: this machine."""

    @property
    def evaluated_versions(self) -> tuple[int, ...]:
        return tuple(sorted({task.from_version for task in self.evaluation}))

    @property
    def groups(self) -> int:
        """Groups to train that the tasks make."""
        return sum(task.repeat for task in self.tasks if task.purpose == "train")

    @property
    def groups_needed(self) -> int | None:
        """Groups that the run's updates take; None where it goes on while there are tasks."""
        return None if self.run.updates is None else self.run.updates * self.run.dispatch.batch_groups

    @property
    def own_turns(self) -> dict[int, int]:
        """`max_turns` of tasks that say it and differ from the run's harness -> how many tasks."""
        own = Counter(task.max_turns for task in (*self.tasks, *self.evaluation) if task.max_turns is not None)
        return {turns: own[turns] for turns in sorted(own) if turns != self.run.harness.max_turns}

    @property
    def predicted_staleness(self) -> float:
        """E[d] = phi + (mu - 1) / 2."""
        return self.run.dispatch.phi + (self.run.dispatch.mu - 1) / 2


def read_recipe(path: Path, *, dry: bool = False) -> Plan:
    """Read and check a recipe; raises `TaskFileError`. `dry`: the policy may be missing where `hardware.config` says
    its shape."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TaskFileError(f"recipe {path} does not exist") from error
    except OSError as error:
        raise TaskFileError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskFileError(f"recipe {path} is not valid TOML: {error}") from error
    for key in document:
        if key not in ("run", "tasks", "evaluation", "hardware", "workload"):  # the last is the simulator's
            meant = f"; did you mean run.{key}?" if key in PARTS else ""
            allowed = "; allowed: run, tasks, evaluation, hardware, workload"
            raise TaskFileError(f"{path}: unknown table {key}{meant or allowed}")
    hardware = _hardware(path, document["hardware"]) if "hardware" in document else None
    run = _run(path, document.get("run"), not (dry and hardware is not None and hardware.config is not None))
    tasks, evaluation = _tasks(path, document.get("tasks")), _evaluation(path, document.get("evaluation"), run)
    return Plan(run=run, tasks=tasks, evaluation=evaluation, hardware=hardware)


def _hardware(path: Path, table: Any) -> Hardware:
    if not isinstance(table, dict):
        raise TaskFileError(f"{path}: hardware must be a table")
    known(str(path), "hardware.", table, Hardware)
    try:
        return msgspec.convert(table, Hardware)
    except msgspec.ValidationError as error:
        raise TaskFileError(f"{path}: {wrong_type(error, table, Hardware, 'hardware.')}") from error


def _run(path: Path, table: Any, needed: bool) -> RunSpec:
    """`needed`: the policy's directory has to be there."""
    if not isinstance(table, dict):
        raise TaskFileError(f"{path}: the table [run] is missing; it names at least run and model")
    known(str(path), "run.", table, RunSpec)
    if "state" in table:
        raise TaskFileError(f"{path}: run.state is not for a recipe; a new run is active")
    for name, kind in PARTS.items():
        if isinstance(table.get(name), dict):
            known(str(path), f"run.{name}.", table[name], kind)
    harness = table.get("harness")
    shots = harness.get("shots") if isinstance(harness, dict) else None
    branching = harness.get("branching") if isinstance(harness, dict) else None
    if isinstance(branching, dict):
        known(str(path), "run.harness.branching.", branching, Branching)
    for number, shot in enumerate(shots if isinstance(shots, list) else ()):
        if isinstance(shot, dict):
            known(str(path), f"run.harness.shots[{number}].", shot, Shot)
    try:
        spec = validate(msgspec.convert(table, RunSpec))
        check_run(spec.run)
    except msgspec.ValidationError as error:
        raise TaskFileError(f"{path}: {wrong_type(error, table, RunSpec, 'run.')}") from error
    except (InvalidRunError, BadIdentifierError) as error:  # each begins with the field
        raise TaskFileError(f"{path}: run.{error}") from error
    if Path(spec.model).is_absolute():
        return spec  # it may be on the trainer's machine only
    model = path.parent / spec.model
    if not model.is_dir() and needed:
        raise TaskFileError(f"{path}: run.model is {spec.model!r} and {model} is no directory; it holds a policy")
    return msgspec.structs.replace(spec, model=str(model.resolve()))


def _tasks(path: Path, table: Any) -> tuple[TaskSpec, ...]:
    if not isinstance(table, dict):
        raise TaskFileError(f"{path}: the table [tasks] is missing; it names a path or a generator")
    return _made(path, "tasks", _source(path, "tasks", table, TaskSource))


def _source(path: Path, name: str, table: dict[str, Any], kind: type[S]) -> S:
    known(str(path), f"{name}.", table, kind)
    if "generator" in table and table["generator"] != "shelltasks":
        raise TaskFileError(f"{path}: {name}.generator is {table['generator']!r}; allowed is 'shelltasks'")
    try:
        source = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise TaskFileError(f"{path}: {wrong_type(error, table, kind, f'{name}.')}") from error
    if (source.path is None) == (source.generator is None):
        raise TaskFileError(f"{path}: [{name}] names either path or generator, and one of them only")
    return source


def _made(path: Path, name: str, source: TaskSource) -> tuple[TaskSpec, ...]:
    if source.path is not None:
        return tuple(load_tasks(path.parent / source.path))
    if not 1 <= source.count <= MAX_COUNT:
        raise TaskFileError(f"{path}: {name}.count is {source.count}; allowed are values from 1 to {MAX_COUNT}")
    return tuple(generate(source.split, index, source.seed) for index in range(source.count))


def _evaluation(path: Path, table: Any, run: RunSpec) -> tuple[TaskSpec, ...]:
    if table is None:
        return ()
    if not isinstance(table, dict):
        raise TaskFileError(f"{path}: evaluation is no table; it names a path or a generator")
    source = _source(path, "evaluation", table, EvaluationSource)
    if run.updates is None:
        raise TaskFileError(
            f"{path}: run.updates is not set; [evaluation] needs it, since it evaluates the last policy"
        )
    every = run.updates if source.every is None else source.every
    if not 1 <= every <= run.updates:
        raise TaskFileError(f"{path}: evaluation.every is {every}; allowed are values from 1 to {run.updates}")
    made = _made(path, "evaluation", source)
    versions = sorted({*range(0, run.updates, every), run.updates})
    if len(made) * len(versions) > MAX_COUNT:
        raise TaskFileError(
            f"{path}: [evaluation] makes {len(made)} tasks of each of {len(versions)} versions; allowed are {MAX_COUNT}"
        )
    return tuple(evaluating(task, version) for version in versions for task in made)


def evaluating(task: TaskSpec, version: int) -> TaskSpec:
    """The task, to evaluate this version: the same one has another name for each."""
    return msgspec.structs.replace(task, task=f"{task.task}-v{version:06d}", purpose="evaluate", from_version=version)
