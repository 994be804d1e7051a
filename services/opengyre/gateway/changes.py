"""What may be changed of a run that goes on, and whether its floors fit the cells there are. Pure.

Invariant: a change is checked as a whole new run is, so no way leads to a setting that a new run could not have.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field

from opengyre.elastic.explain import unfit
from opengyre.gateway.models import DispatchIn, ElasticIn, Input
from opengyre.gateway.problems import Problem
from opengyre.proto.run import InvalidRunError, RunSpec, validate

_EPISODES = "the episodes under way were begun with it"
_UPDATES = "the updates and groups under way count by it"


def _without_fixed(schema: dict[str, Any], model: type[Any]) -> None:
    for name in model.fixed:
        schema["properties"].pop(name, None)


class DispatchChange(DispatchIn):
    """Fields that are left out stay as they are."""

    model_config = ConfigDict(json_schema_extra=_without_fixed)
    fixed: ClassVar[Mapping[str, str]] = {"batch_groups": _UPDATES, "group_size": _UPDATES, "min_members": _EPISODES}


class ElasticChange(ElasticIn):
    """Fields that are left out stay as they are."""


class RunChange(Input):
    """What is to be changed of an active run; what is left out stays."""

    fixed: ClassVar[Mapping[str, str]] = {
        "run": "it is the run's name",
        "model": "its weights are what is trained",
        "updates": "admission and the trainer count towards it",
        "seed": "its episodes are seeded by it",
        "harness": _EPISODES,
        "optimization": "the optimizer's state belongs to it",
    }

    state: Literal["stopped"] | None = Field(default=None, description="A stopped run admits no further groups")
    dispatch: DispatchChange | None = None
    elastic: ElasticChange | None = None

    def values(self) -> dict[str, Any]:
        """Only what was said; raises `Problem` when that is nothing."""
        said = {name: value for name, value in self.model_dump(exclude_unset=True).items() if value not in (None, {})}
        if not said:
            raise Problem(422, "the body changes nothing; allowed: state, dispatch, elastic", field="body")
        return said


def changed(spec: RunSpec, change: Mapping[str, Any], cells: Collection[str]) -> RunSpec:
    """`spec` with `change`, checked; raises `Problem` 409 for a run that is over and 422 for what is not allowed."""
    if change.get("state") == spec.state and len(change) == 1:
        return spec
    if spec.state != "active":
        field = next(iter(change))
        raise Problem(409, f"run {spec.run} is {spec.state}; allowed is to change or stop an active run", field=field)
    after = spec
    for part in ("dispatch", "elastic"):
        if part in change:
            merged = msgspec.structs.replace(getattr(after, part), **change[part])
            after = msgspec.structs.replace(after, **{part: merged})
    after = checked(after, cells if "elastic" in change else ())
    return msgspec.structs.replace(after, state=change.get("state", after.state))


def checked(spec: RunSpec, cells: Collection[str]) -> RunSpec:
    """`spec`, if it is valid and the cells that are known can meet its floors; raises `Problem` naming the field."""
    try:
        validate(spec)
    except InvalidRunError as error:
        raise Problem(422, str(error), field=str(error).partition(" ")[0].rstrip(":")) from error
    if (lack := unmet(spec, len(cells))) is not None:
        raise Problem(422, lack, field=lack.partition(" ")[0])
    return spec


def unmet(spec: RunSpec, cells: int) -> str | None:
    """Why `cells` cells cannot be divided as it says; None while they can, or where no cell is known yet."""
    return unfit(spec.elastic, cells) if cells else None
