"""Decisions again: each is decided anew from its recorded inputs, and every difference is told. Pure.

Invariant: nothing is used but what the decision itself recorded, so a run can be re-decided anywhere and at any time.
A decision without inputs (a leader finished what a former one began, or the record is older than the inputs) is
counted, and is no difference.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from opengyre.elastic.admission import room
from opengyre.elastic.policy import decide, suspends
from opengyre.proto.base import Record
from opengyre.proto.decision import AdmissionInput, Decision, PolicyInput, RoleChange
from opengyre.proto.host import Role

WISHED: dict[str, Role] = {"drain": "train", "cordon": "cordoned", "resume": "rollout"}
"""An operator's wish -> the role that the cell is told."""


class Difference(Record, frozen=True, kw_only=True):
    """A field of a decision that comes out otherwise when it is decided again."""

    decision: str
    kind: str
    field: str
    recorded: Any
    decided: Any


class Replay(Record, frozen=True, kw_only=True):
    """What came of deciding a run's decisions again."""

    run: str
    decisions: int
    kinds: dict[str, int]
    """Kind -> decisions of it."""
    without_inputs: int
    """Decisions that cannot be decided again."""
    differences: tuple[Difference, ...]


def replay(run: str, decisions: Iterable[Decision]) -> Replay:
    """Decide again every decision of `run`, in the order given."""
    kinds: dict[str, int] = {}
    without = 0
    found: list[Difference] = []
    for decision in decisions:
        kinds[decision.kind] = kinds.get(decision.kind, 0) + 1
        differences = redecide(decision)
        if differences is None:
            without += 1
        else:
            found += differences
    return Replay(
        run=run,
        decisions=sum(kinds.values()),
        kinds=dict(sorted(kinds.items())),
        without_inputs=without,
        differences=tuple(found),
    )


def redecide(decision: Decision) -> list[Difference] | None:
    """What differs when `decision` is decided again; None where its inputs were not recorded."""
    match decision.kind:
        case "roles":
            compared = None if decision.input is None else _roles(decision, decision.input)
        case "admission":
            compared = None if decision.admission is None else _admission(decision, decision.admission)
        case "wish":
            compared = None if decision.wish is None else _wish(decision, decision.wish)
    if compared is None:
        return None
    return [
        Difference(decision=decision.decision, kind=decision.kind, field=field, recorded=recorded, decided=decided)
        for field, recorded, decided in compared
        if recorded != decided
    ]


def _roles(decision: Decision, given: PolicyInput) -> list[tuple[str, Any, Any]]:
    again = decide(given)
    recorded, decided = _by_cell(decision.changes), _by_cell(again)
    compared: list[tuple[str, Any, Any]] = []
    for cell in sorted({*recorded, *decided}):
        before, after = recorded.get(cell), decided.get(cell)
        if before is None or after is None:
            compared.append((f"changes.{cell}", _shown(before), _shown(after)))
        else:
            compared.append((f"changes.{cell}.role", before.role, after.role))
            compared.append((f"changes.{cell}.reason", before.reason, after.reason))
    compared.append(("suspends", decision.suspends, suspends(given, again)))
    return compared


def _by_cell(changes: Iterable[RoleChange]) -> dict[str, RoleChange]:
    return {change.cell: change for change in changes}


def _shown(change: RoleChange | None) -> Any:
    return None if change is None else msgspec.to_builtins(change)


def _admission(decision: Decision, given: AdmissionInput) -> list[tuple[str, Any, Any]]:
    return [
        ("version", decision.version, given.published),
        ("admitted", len(decision.admitted) - given.evaluating, room(given)),
    ]


def _wish(decision: Decision, wish: str) -> list[tuple[str, Any, Any]]:
    return [("changes", [change.role for change in decision.changes], [WISHED[wish]])]
