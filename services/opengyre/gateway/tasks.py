"""/v1/tasks: submit tasks, list them, see what became of one.

Invariants: a submission is checked as a whole before anything is stored; a task is stored once under its identifier
(the append expects that there is none), and the same task again is the same answer, another one under the same
identifier a conflict. While more than `max_pending_tasks` wait to be admitted, submissions are refused with 429.

Awaits: the bus, within the bound of the route.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Body, Header, Path, Query, Request
from starlette.responses import Response

from opengyre.gateway import examples
from opengyre.gateway.deps import BoundRoute, Deps, answer, chosen_run, together
from opengyre.gateway.folding import TaskFold, TaskReport, TaskState, TaskSummary
from opengyre.gateway.idempotency import once
from opengyre.gateway.models import MAX_SEQUENCE, TOKEN_PATTERN, SingleTask, Submission, TaskBatch, specs_of
from opengyre.gateway.openapi import body_example, documented
from opengyre.gateway.problems import RETRY_AFTER_S, Problem
from opengyre.gateway.runs import DepsOf, RunPath, RunQuery
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.proto.task import TaskSpec, TaskSubmitted
from opengyre.shared.bus import FencedError, Stored, count, page

SCAN = 2000
"""How many submissions a filtered listing looks at before it answers with what it found."""
CHUNK = 100
"""Tasks whose events are read through one consumer."""
EVENTS = 2000
"""Events in one read."""
PUBLISHING = 32

router = APIRouter(route_class=BoundRoute, tags=["tasks"])


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is stored."""

    run: str
    task: str
    sequence: int
    """Place in the stream TASKS."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    tasks: tuple[Submitted, ...]
    pending: int
    """Tasks of the run that wait to be admitted, these included."""


class TaskList(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    tasks: tuple[TaskSummary, ...]
    next: int | None
    """`after` of the next page."""


async def pending_tasks(deps: Deps, run: str) -> int:
    """Tasks of `run` of which no group was made yet."""
    submitted, admitted = await together(
        count(deps.bus, subjects.TASKS, subjects.task(run, "*", "submitted"), distinct=True),
        count(deps.bus, subjects.TASKS, subjects.task(run, "*", "admitted"), distinct=True),
    )
    return max(0, submitted - admitted)


def refusal(run: RunSpec, specs: list[TaskSpec]) -> str | None:
    """Why `run` takes no such tasks now; None if it does."""
    stepped = next((spec.task for spec in specs if spec.steps), None)
    if stepped is not None and (field := _not_with_steps(run)) is not None:
        return f"task {stepped} has steps and run {run.run} sets {field}; allowed are tasks without steps there"
    if (
        early := next((spec for spec in specs if spec.from_version > (run.updates or spec.from_version)), None)
    ) is not None:
        return (
            f"task {early.task} evaluates weights from version {early.from_version} on and run {run.run} ends with "
            f"version {run.updates}; allowed are versions up to that"
        )
    if run.state == "active":
        return None
    if run.state == "finished":
        trained = next((spec.task for spec in specs if spec.purpose == "train"), None)
        allowed = "allowed are tasks with purpose evaluate"
        return f"run {run.run} is finished and task {trained} is to be trained; {allowed}" if trained else None
    return f"run {run.run} is stopped; tasks are accepted while a run is active, or to evaluate a finished one"


def _not_with_steps(run: RunSpec) -> str | None:
    """The setting of a run that a task of several steps cannot have."""
    if run.harness.branching is not None:
        return "harness.branching"
    return "scoring.progress_every" if run.scoring.progress_every is not None else None


def _stored_spec(stored: Stored | None) -> TaskSpec | None:
    event = stored.readable() if stored is not None else None
    return event.spec if isinstance(event, TaskSubmitted) else None


async def _there(deps: Deps, run: str, specs: list[TaskSpec]) -> dict[str, int]:
    """Task -> sequence, of those that are stored already; raises `Problem` 409 for another one under the same name."""
    wanted = {spec.task: spec for spec in specs}
    names = list(wanted)
    found: dict[str, int] = {}
    for first in range(0, len(names), CHUNK):
        filters = [subjects.task(run, name, "submitted") for name in names[first : first + CHUNK]]
        start, left = 1, 1
        while left:
            got = await page(deps.bus, subjects.TASKS, filters, start=start, limit=CHUNK)
            left = got.left
            for stored in got.messages:
                start = stored.sequence + 1
                spec = _stored_spec(stored)
                if spec is not None and spec != wanted[spec.task]:
                    raise _conflict(run, spec.task)
                if spec is not None:
                    found[spec.task] = stored.sequence
    return found


def _conflict(run: str, task: str) -> Problem:
    detail = f"task {task} of run {run} exists with another content; allowed is the same content or another identifier"
    return Problem(409, detail, field="task")


async def _store(deps: Deps, run: str, spec: TaskSpec) -> int:
    subject = subjects.task(run, spec.task, "submitted")
    event = TaskSubmitted(run=run, task=spec.task, spec=spec)
    try:
        return await deps.bus.append(subject, event, scope=subject, last=0)
    except FencedError:
        stored = await deps.bus.last(subject, subjects.TASKS)
        if stored is None or _stored_spec(stored) != spec:
            raise _conflict(run, spec.task) from None
        return stored.sequence


async def _submit(deps: Deps, run: str, specs: list[TaskSpec]) -> Accepted:
    pending = await pending_tasks(deps, run)
    known = await _there(deps, run, specs)
    new = len(specs) - len(known)
    most = deps.settings.max_pending_tasks
    if new and pending + new > most:
        detail = f"{pending} tasks of run {run} wait to be admitted and {new} more make too many; allowed are {most}"
        raise Problem(429, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
    places = asyncio.Semaphore(PUBLISHING)

    async def one(spec: TaskSpec) -> int:
        if spec.task in known:
            return known[spec.task]
        async with places:  # in the order of the batch: the semaphore is first come, first served
            return await _store(deps, run, spec)

    sequences = await together(*(one(spec) for spec in specs))
    stored = tuple(
        Submitted(run=run, task=spec.task, sequence=sequence) for spec, sequence in zip(specs, sequences, strict=True)
    )
    return Accepted(run=run, tasks=stored, pending=pending + new)


@router.post(
    "/v1/tasks",
    status_code=202,
    summary="Submit one task or a batch",
    responses=documented(Accepted, examples.ACCEPTED, "The tasks are stored", status=202),
)
async def submit_tasks(
    request: Request,
    deps: DepsOf,
    body: Annotated[
        Submission, Body(openapi_examples=body_example(single=examples.TASK_IN, batch=examples.TASK_BATCH))
    ],
    run: RunQuery = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    assert isinstance(body, SingleTask | TaskBatch)
    if run is not None and body.run is not None and run != body.run:
        raise Problem(422, f"run is {run} in the query and {body.run} in the body; name one", field="run")
    specs = specs_of(body)
    spec, _ = await chosen_run(deps, body.run or run)
    if (why := refusal(spec, specs)) is not None:
        raise Problem(409, why, field="run")

    async def handle() -> tuple[int, bytes]:
        return 202, msgspec.json.encode(await _submit(deps, spec.run, specs))

    content = f"{request.url.path} {spec.run} {msgspec.json.encode(specs).decode()}"
    return await once(deps.bus, idempotency_key, content, handle)


async def _folds(deps: Deps, run: str, submissions: list[tuple[TaskSubmitted, int]]) -> list[TaskFold]:
    """The tasks with all their events."""
    folds = {event.task: TaskFold(event, sequence) for event, sequence in submissions}
    names = list(folds)
    for first in range(0, len(names), CHUNK):
        filters = [
            subjects.task(run, name, kind)
            for name in names[first : first + CHUNK]
            for kind in ("admitted", "scored", "consumed")
        ]
        start, left = 1, 1
        while left:
            got = await page(deps.bus, subjects.TASKS, filters, start=start, limit=EVENTS)
            left = got.left
            for stored in got.messages:
                start = stored.sequence + 1
                event = stored.readable()
                task = getattr(event, "task", None)
                if event is not None and task in folds:
                    folds[task].take(event)
    return list(folds.values())


@router.get("/v1/tasks", summary="List the tasks of a run", responses=documented(TaskList, examples.TASK_LIST))
async def list_tasks(
    deps: DepsOf,
    run: RunQuery = None,
    state: TaskState | None = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE - 1, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    spec, _ = await chosen_run(deps, run)
    subject = subjects.task(spec.run, "*", "submitted")
    chosen: list[TaskSummary] = []
    scanned = 0
    more = True
    while more and len(chosen) < limit and scanned < SCAN:
        got = await page(deps.bus, subjects.TASKS, subject, start=after + 1, limit=CHUNK)
        submissions = [(stored.readable(), stored.sequence) for stored in got.messages]
        wanted = [(event, sequence) for event, sequence in submissions if isinstance(event, TaskSubmitted)]
        more = got.left > 0
        for fold in await _folds(deps, spec.run, wanted):
            if len(chosen) == limit:
                more = True
                break
            after = fold.sequence
            summary = fold.summary()
            if state in (None, summary.state):
                chosen.append(summary)
        else:
            # Also past submissions that cannot be read, which make no fold.
            after = submissions[-1][1] if submissions else after
        scanned += len(submissions)
    return answer(TaskList(run=spec.run, tasks=tuple(chosen), next=after if more else None))


@router.get(
    "/v1/tasks/{run}/{task}", summary="A task and its groups", responses=documented(TaskReport, examples.TASK_REPORT)
)
async def read_task(deps: DepsOf, run: RunPath, task: Annotated[str, Path(pattern=TOKEN_PATTERN)]) -> Response:
    await deps.run(run)
    stored = await deps.bus.last(subjects.task(run, task, "submitted"), subjects.TASKS)
    event = stored.readable() if stored is not None else None
    if stored is None or not isinstance(event, TaskSubmitted):
        raise Problem(404, f"there is no task {task} in run {run}; GET /v1/tasks?run={run} lists them", field="task")
    (fold,) = await _folds(deps, run, [(event, stored.sequence)])
    return answer(fold.report())
