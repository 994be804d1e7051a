"""What `gyre simulate RECIPE` reads: a recipe's `[run.dispatch]` and `[run.elastic]`, and a table `[workload]`.

A recipe of a real run is one as it stands; its tasks and its model are not looked at. Every fault is one sentence.

[workload]                 # nodes, cell_nodes, mean_h, sigma, shared, rollout_node_h, train_node_h, switch_h
nodes = 32
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from opengyre.cli.stack import StackError
from opengyre.cli.wrong import wrong_type
from opengyre.proto.run import Dispatch, Elastic, InvalidRunError, RunSpec, validate
from opengyre.sim.workload import PAPER, Workload

T = TypeVar("T", Dispatch, Elastic)
OWN = tuple(field.name for field in fields(Workload) if field.name not in ("batch_groups", "group_size", "episodes"))


@dataclass(frozen=True, slots=True)
class SimRecipe:
    workload: Workload
    dispatch: Dispatch
    elastic: Elastic
    updates: int | None


def read_sim_recipe(path: Path, allowed: str) -> SimRecipe:
    """Raises `StackError`; `allowed` is what may stand in the place of a recipe."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StackError(f"{path} does not exist; allowed: {allowed}") from error
    except OSError as error:
        raise StackError(f"{path} cannot be read: {error.strerror}; allowed: {allowed}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StackError(f"{path} is not valid TOML: {error}") from error
    run = _table(path, document, "run")
    dispatch = _convert(path, "run.dispatch", _table(path, run, "dispatch", "run."), Dispatch)
    elastic = _convert(path, "run.elastic", _table(path, run, "elastic", "run."), Elastic)
    updates = run.get("updates")
    if updates is not None and (not isinstance(updates, int) or isinstance(updates, bool)):
        raise StackError(f"{path}: run.updates is {updates!r}; allowed is a whole number from 1")
    try:
        validate(RunSpec(run="simulated", model="", updates=updates, dispatch=dispatch, elastic=elastic))
    except InvalidRunError as error:
        raise StackError(f"{path}: {error}") from error
    return SimRecipe(_workload(path, _table(path, document, "workload"), dispatch), dispatch, elastic, updates)


def _table(path: Path, document: dict[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise StackError(f"{path}: {prefix}{name} must be a table")
    return found


def _convert(path: Path, name: str, values: dict[str, Any], kind: type[T]) -> T:
    for key in values:
        if key not in kind.__struct_fields__:
            raise StackError(f"{path}: unknown field {name}.{key}; allowed: {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise StackError(f"{path}: in [{name}]: {wrong_type(error, values, kind)}") from error


def _workload(path: Path, values: dict[str, Any], dispatch: Dispatch) -> Workload:
    """The paper's costs for each execution where the recipe says nothing."""
    for key, value in values.items():
        if key not in OWN:
            raise StackError(f"{path}: unknown field workload.{key}; allowed: {', '.join(OWN)}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise StackError(f"{path}: workload.{key} is {value!r}; allowed is a number")
        if key in ("nodes", "cell_nodes") and not isinstance(value, int):
            raise StackError(f"{path}: workload.{key} is {value!r}; allowed is a whole number")
    by = dispatch.update_executions / PAPER.update_executions
    costs: dict[str, Any] = {"rollout_node_h": PAPER.rollout_node_h * by, "train_node_h": PAPER.train_node_h * by}
    try:
        return Workload(batch_groups=dispatch.batch_groups, group_size=dispatch.group_size, **(costs | values))
    except ValueError as error:
        raise StackError(f"{path}: {error}") from error
