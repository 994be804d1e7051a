"""/v1/groups and /v1/executions: a group with its members, the log of an execution, and its tree."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from opengyre.gateway import examples
from opengyre.gateway.deps import BoundRoute, Deps, answer, together
from opengyre.gateway.folding import GroupSummary, fold_group, score_of, shown
from opengyre.gateway.models import EXECUTION_PATTERN, GROUP_PATTERN, MAX_SEQUENCE
from opengyre.gateway.openapi import documented
from opengyre.gateway.problems import Problem
from opengyre.gateway.runs import DepsOf
from opengyre.proto import subjects
from opengyre.proto.codec import UndecodableError
from opengyre.proto.decision import GroupEntry
from opengyre.proto.explain import ExplainReport, ExplainRequest
from opengyre.proto.ids import group_of, run_of
from opengyre.proto.traj import Ended, Part, Verified
from opengyre.shared.bus import Stored, call, page

EVENTS = 2000
EXPLAIN_S = 25.0
"""For the trajectory service to read a group's log and make its trees."""
MAX_LANES = 16
"""As `harness.branching.copies` allows."""
PATIENCE_S = 5.0
"""For it to be there."""

router = APIRouter(route_class=BoundRoute, tags=["executions"])


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a group."""

    execution: str
    state: str
    """`waiting` (nothing in its log yet), `live` or `ended`."""
    events: dict[str, int] = {}
    """Event -> how many are in its log."""
    end_reason: str | None = None
    turns: int | None = None
    score: float | None = None
    unscored: str | None = None
    staleness: int | None = None
    """`d` of the update that it was in, once it is trained."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    entry: GroupEntry
    """As the ledger has it."""
    staleness: int | None
    """`d = v_t - v_d` of the first update that took some of it, once it is trained."""
    members: tuple[MemberReport, ...]


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    """Place in the stream TRAJ."""
    time: float
    """When it was stored, seconds since the epoch."""
    event: dict[str, Any]
    """`{"undecodable": reason}` where it cannot be read."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """One of the alternatives that an execution went on as, once it is verified."""

    lane: int
    end_reason: str | None
    parts: tuple[Part, ...]
    verified_score: float | None
    """None where the evaluation failed."""
    infra_error: str | None


class ExecutionReport(msgspec.Struct, frozen=True, kw_only=True):
    execution: str
    group: str
    run: str
    state: str
    """`live` or `ended`."""
    end_reason: str | None
    turns: int | None
    score: float | None
    """As the group was scored; None while it is not, or where the evaluation failed."""
    unscored: str | None
    parts: tuple[Part, ...]
    """What the verifier found."""
    verified_score: float | None
    """Weighted mean of the parts; of lanes, the mean of theirs."""
    lanes: tuple[LaneReport, ...] = ()
    """Of an execution that went on as several: each has its own `parts`."""
    log: tuple[LogEntry, ...]
    next: int | None
    """`after` of the next page of the log."""


class TreeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The tree of an execution, and what became of it in training."""

    tree: ExplainReport
    trained_version: int | None = None
    """`v_t` of the update that took it; None while none has."""
    staleness: int | None = None
    dropped: str | None = None
    """Why it left training."""


def _lane(verified: Verified) -> LaneReport:
    failed = verified.infra_error is not None or verified.reason == "infra"
    return LaneReport(
        lane=verified.lane or 0,
        end_reason=verified.reason,
        parts=verified.parts,
        verified_score=None if failed else score_of(verified.parts),
        infra_error=verified.infra_error,
    )


async def _lanes(deps: Deps, scope: str) -> tuple[LaneReport, ...]:
    """Of the verdicts with these subjects."""
    got = await page(deps.bus, subjects.TRAJ, scope, limit=MAX_LANES)
    verdicts = [event for stored in got.messages if isinstance(event := stored.readable(), Verified)]
    return tuple(sorted((_lane(one) for one in verdicts if one.lane is not None), key=lambda lane: lane.lane))


async def _scored(deps: Deps, run: str, task: str, group: str) -> GroupSummary:
    """What the stream TASKS says of a group."""
    known: GroupSummary | None = None
    filters = [subjects.task(run, task, kind) for kind in ("admitted", "scored", "consumed")]
    start, left = 1, 1
    while left:
        got = await page(deps.bus, subjects.TASKS, filters, start=start, limit=EVENTS)
        left = got.left
        for stored in got.messages:
            start = stored.sequence + 1
            event = stored.readable()
            if event is not None and getattr(event, "group", None) == group:
                known = fold_group(known, event)
    return known or GroupSummary(group=group, state="live")


def _shown(stored: Stored, *, tokens: bool) -> dict[str, Any]:
    try:
        return shown(stored.event(), tokens=tokens)
    except UndecodableError as error:
        return {"undecodable": str(error)}


@router.get(
    "/v1/groups/{group}", summary="A group and its executions", responses=documented(GroupReport, examples.GROUP_REPORT)
)
async def read_group(deps: DepsOf, group: Annotated[str, Path(pattern=GROUP_PATTERN)]) -> Response:
    found = await deps.ledger.get(group)
    if found is None:
        raise Problem(
            404, f"there is no group {group}; GET /v1/tasks/RUN/TASK lists the groups of a task", field="group"
        )
    entry, _ = found
    summary = await _scored(deps, entry.run, entry.task, group)
    logs = await deps.bus.subjects(subjects.TRAJ, subjects.traj(entry.run, group, "*", "*"))
    ends = await page(deps.bus, subjects.TRAJ, subjects.traj(entry.run, group, "*", "ended"), limit=4096)
    ended = {event.execution: event for stored in ends.messages if isinstance(event := stored.readable(), Ended)}
    events: dict[str, dict[str, int]] = {}
    for subject, many in logs.items():
        execution, kind = subject.split(".")[-2:]
        events.setdefault(execution, {})[kind] = many
    members = tuple(
        MemberReport(
            execution=name,
            state="ended" if name in ended else "live" if name in events else "waiting",
            events=events.get(name, {}),
            end_reason=ended[name].reason if name in ended else None,
            turns=ended[name].turns if name in ended else None,
            score=summary.scores.get(name),
            unscored=summary.unscored.get(name),
            staleness=entry.trained[name] - entry.admitted_version if name in entry.trained else None,
        )
        for name in entry.executions
    )
    staleness = entry.consumed_version - entry.admitted_version if entry.consumed_version is not None else None
    return answer(GroupReport(entry=entry, staleness=staleness, members=members))


@router.get(
    "/v1/executions/{execution}",
    summary="The log of an execution: turns, calls, tools, score",
    responses=documented(ExecutionReport, examples.EXECUTION_REPORT),
)
async def read_execution(
    deps: DepsOf,
    execution: Annotated[str, Path(pattern=EXECUTION_PATTERN)],
    tokens: Annotated[bool, Query(description="Give token ids and log-probs, not only their number")] = False,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE - 1, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    group, run = group_of(execution), run_of(execution)
    scope = subjects.traj(run, group, execution, "*")
    log = await page(deps.bus, subjects.TRAJ, scope, start=after + 1, limit=limit)
    found = await deps.ledger.get(group)
    if not log.messages and (found is None or execution not in found[0].executions):
        raise Problem(
            404, f"there is no execution {execution}; GET /v1/groups/{group} lists a group's", field="execution"
        )
    last_ended, last_verified = await together(
        deps.bus.last(subjects.traj(run, group, execution, "ended"), subjects.TRAJ),
        deps.bus.last(subjects.traj(run, group, execution, "verified"), subjects.TRAJ),
    )
    ended = last_ended.readable() if last_ended is not None else None
    verified = last_verified.readable() if last_verified is not None else None
    parts: tuple[Part, ...] = ()
    lanes: tuple[LaneReport, ...] = ()
    if isinstance(verified, Verified) and verified.lane is None:
        parts = verified.parts
    elif isinstance(verified, Verified):
        lanes = await _lanes(deps, subjects.traj(run, group, execution, "verified"))
    scores = [lane.verified_score for lane in lanes if lane.verified_score is not None]
    summary = (
        await _scored(deps, run, found[0].task, group) if found is not None else GroupSummary(group=group, state="live")
    )
    entries = tuple(
        LogEntry(sequence=stored.sequence, time=stored.timestamp, event=_shown(stored, tokens=tokens))
        for stored in log.messages
    )
    return answer(
        ExecutionReport(
            execution=execution,
            group=group,
            run=run,
            state="ended" if isinstance(ended, Ended) else "live",
            end_reason=ended.reason if isinstance(ended, Ended) else None,
            turns=ended.turns if isinstance(ended, Ended) else None,
            score=summary.scores.get(execution),
            unscored=summary.unscored.get(execution),
            parts=parts,
            verified_score=sum(scores) / len(scores) if scores else score_of(parts),
            lanes=lanes,
            log=entries,
            next=log.messages[-1].sequence if log.left else None,
        )
    )


@router.get(
    "/v1/executions/{execution}/tree",
    summary="The tree of an execution: what was chosen, masked and refused, and why",
    responses=documented(TreeReport, examples.TREE_REPORT),
)
async def read_tree(deps: DepsOf, execution: Annotated[str, Path(pattern=EXECUTION_PATTERN)]) -> Response:
    group, run = group_of(execution), run_of(execution)
    if await deps.bus.last(subjects.traj(run, group, execution, "started"), subjects.TRAJ) is None:
        raise Problem(
            404, f"there is nothing of execution {execution}; GET /v1/groups/{group} lists a group's", field="execution"
        )
    request = ExplainRequest(execution=execution)
    tree = await call(
        deps.bus, "trajectory", "any", "explain", request, ExplainReport, timeout_s=EXPLAIN_S, patience_s=PATIENCE_S
    )
    found = await deps.ledger.get(tree.group)
    entry = found[0] if found is not None else None
    taken = entry.trained.get(execution) if entry is not None else None
    return answer(
        TreeReport(
            tree=tree,
            trained_version=taken,
            staleness=taken - entry.admitted_version if entry is not None and taken is not None else None,
            dropped=entry.dropped.get(execution) if entry is not None else None,
        )
    )
