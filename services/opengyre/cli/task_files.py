"""Tasks in files: a .toml or .json file of one task, a .json list, a .jsonl, or a directory of these. Or directories
that are tasks of others: Harbor's, Terminal-Bench 1's.

Every fault is one sentence that names the file, the line where there are lines, and the field.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cli.stack import StackError
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.task_rules import InvalidTaskError, validate_task

SUFFIXES = (".toml", ".json", ".jsonl")
BATCH_TASKS = 500
BATCH_BYTES = 2 << 20


class TaskFileError(StackError):
    """A file that holds no valid tasks; one sentence."""


def load_tasks(path: Path) -> list[TaskSpec]:
    """Every task below `path`, in the order of file names and lines; raises `TaskFileError`."""
    files = _files(path)
    tasks: list[TaskSpec] = []
    places: dict[str, str] = {}
    for file in files:
        for place, spec in _tasks(file):
            if spec.task in places:
                raise TaskFileError(f"{place}: task {spec.task!r} is in {places[spec.task]} already")
            places[spec.task] = place
            tasks.append(spec)
    if not tasks:
        raise TaskFileError(f"{path} holds no tasks")
    return tasks


def _tasks(file: Path) -> Iterator[tuple[str, TaskSpec]]:
    """What is in a file, or the task that a directory is."""
    if not file.is_dir():
        yield from ((place, _task(place, document)) for place, document in _documents(file))
        return
    # Not at the top: what reads tasks of others is an extra.
    try:
        from opengyre.tasks.convert import spec_of
        from opengyre.tasks.directory import read_task
        from opengyre.tasks.errors import TaskError
    except ModuleNotFoundError as error:
        raise TaskFileError(f"{file} needs {error.name}, which is missing: pip install 'opengyre[tasks]'") from error
    try:
        yield str(file), spec_of(read_task(file), os.environ)
    except TaskError as error:
        raise TaskFileError(str(error)) from error


def is_directory_of_others(path: Path) -> bool:
    """Whether a directory is a task of Harbor or of Terminal-Bench 1. A ``task.toml`` alone may be one of ours."""
    parts = ("instruction.md", "environment", "tests", "steps")
    harbor = (path / "task.toml").is_file() and any((path / name).exists() for name in parts)
    return harbor or (path / "task.yaml").is_file()


def batches(tasks: list[TaskSpec]) -> Iterator[list[TaskSpec]]:
    """Cut into batches of at most `BATCH_TASKS` tasks and about `BATCH_BYTES` of JSON, in order."""
    batch: list[TaskSpec] = []
    size = 0
    for task in tasks:
        length = len(msgspec.json.encode(task))
        if batch and (len(batch) == BATCH_TASKS or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(task)
        size += length
    if batch:
        yield batch


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(_below(path))
        if not found:
            raise TaskFileError(
                f"directory {path} holds no tasks; allowed are {', '.join(SUFFIXES)} files, and directories of Harbor "
                "or Terminal-Bench 1"
            )
        return found
    if not path.exists():
        raise TaskFileError(f"{path} does not exist")
    if path.suffix not in SUFFIXES:
        raise TaskFileError(f"{path} is no task file; allowed are {', '.join(SUFFIXES)} or a directory of these")
    return [path]


def _below(path: Path) -> Iterator[Path]:
    """Files of tasks, and directories that are tasks, whose own files are none."""
    if is_directory_of_others(path):
        yield path
        return
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            yield from _below(child)
        elif child.suffix in SUFFIXES and child.is_file():
            yield child


def _documents(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            yield str(file), tomllib.loads(text)
            return
        if file.suffix == ".json":
            document = json.loads(text)
            if isinstance(document, list):
                yield from ((f"{file}: entry {number}", entry) for number, entry in enumerate(document))
            else:
                yield str(file), document
            return
    except OSError as error:
        raise TaskFileError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{file} is not UTF-8 text") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TaskFileError(f"{file} is not valid {file.suffix[1:].upper()}: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{file}: line {number}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TaskFileError(f"{file}: line {number} is not valid JSON: {error}") from error


def _task(place: str, document: Any) -> TaskSpec:
    if not isinstance(document, dict):
        raise TaskFileError(f"{place}: a task is an object with the fields {', '.join(TaskSpec.__struct_fields__)}")
    known(place, "", document, TaskSpec)
    for number, check in enumerate(document.get("checks") or ()):
        if isinstance(check, dict):
            known(place, f"checks.{number}.", check, Check)
    try:
        return validate_task(msgspec.convert(document, TaskSpec))
    except msgspec.ValidationError as error:
        raise TaskFileError(f"{place}: {error}") from error
    except InvalidTaskError as error:
        raise TaskFileError(f"{place}: {error}") from error


def known(place: str, prefix: str, document: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise `TaskFileError` for a key that `kind` does not have."""
    for key in document:
        if key not in kind.__struct_fields__:
            allowed = ", ".join(kind.__struct_fields__)
            raise TaskFileError(f"{place}: unknown field {prefix}{key}; allowed here: {allowed}")
