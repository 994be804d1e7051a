"""/v1/runs and /v1/updates: create a run, stop it, see how far it is.

Invariant: at most one run is active in a stack. A run is created under a lease of its own, so that two requests cannot
both find no active run; the lease outlives by far the reads and the write that it protects (`SECTION_S`).

Awaits: the lease, for `PATIENCE_S` at most; the bus, within the bound of the route.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request
from starlette.responses import Response

from opengyre.gateway import examples
from opengyre.gateway.changes import RunChange, changed, checked
from opengyre.gateway.deps import BoundRoute, Deps, answer, chosen_run, deps_of, together
from opengyre.gateway.idempotency import once
from opengyre.gateway.models import MAX_SEQUENCE, RUN_PATTERN, RunIn
from opengyre.gateway.openapi import body_example, documented
from opengyre.gateway.problems import Problem
from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.proto.update import Committed
from opengyre.proto.weights import WeightsPublished
from opengyre.shared.bus import Bucket, BusUnavailableError, ConflictError, Lease, LeaseOwner, page

LEASE_S = 30
SECTION_S = 10.0
PATIENCE_S = 5.0

router = APIRouter(route_class=BoundRoute, tags=["runs"])
RunPath = Annotated[str, Path(pattern=RUN_PATTERN)]
RunQuery = Annotated[str | None, Query(pattern=RUN_PATTERN, description="Default: the active run, or the last one")]
DepsOf = Annotated[Deps, Depends(deps_of)]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is."""

    update: int = 0
    """Updates that were committed."""
    version: int = 0
    """The trainer's."""
    published_version: int | None = None
    score: float | None = None
    """Of the last update."""
    logprob_gap: float | None = None
    """Of the last update: mean |trainer log-prob - engine log-prob| at one version, nats; None: none was measured."""
    alarm: str | None = None
    """Of the last update: what is wrong with its figures."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    spec: RunSpec
    progress: Progress


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    runs: tuple[RunSpec, ...]
    next: str | None
    """`after` of the next page."""


class UpdateSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A committed update; means are over its trained tokens."""

    update: int
    version: int
    published: bool
    score: float
    groups: int
    executions: int
    staleness_mean: float | None
    staleness_max: int | None
    tokens: int
    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    gradient_norm: float
    learning_rate: float | None
    logprob_gap: float | None
    """Mean |trainer log-prob - engine log-prob| over tokens that the trained version sampled, nats; None: none did."""
    logprob_gap_max: float | None
    """The greatest of these."""
    logprob_gap_by_version: dict[int, float]
    """Version that sampled -> mean gap to the one that was trained; of older ones what the policy moved is in it."""
    reference_kl: float
    effective_share: float
    """Effective over trained tokens, by importance ratios; 1 where all are equal."""
    masked_tokens: int
    """Too old to have a loss."""
    unique_tokens: int
    """That the gradient was computed of, shared prefixes once."""
    path_tokens: int
    """Of all calls, without sharing."""
    token_versions: dict[int, int]
    """Version -> tokens that it sampled."""
    skipped: str | None
    alarm: str | None
    """What is wrong with its figures."""
    seconds: float
    sequence: int


class UpdateList(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    updates: tuple[UpdateSummary, ...]
    next: int | None
    """`after` of the next page."""


def summary_of(event: Committed, sequence: int) -> UpdateSummary:
    """What is shown of a commit."""
    stats = event.stats
    tokens, live = max(1, stats.tokens), max(1, stats.live_tokens)
    return UpdateSummary(
        update=event.update,
        version=event.version,
        published=event.published,
        score=event.score,
        groups=len(event.groups),
        executions=len(event.executions),
        staleness_mean=sum(event.staleness) / len(event.staleness) if event.staleness else None,
        staleness_max=max(event.staleness, default=None),
        tokens=stats.tokens,
        loss=stats.loss,
        kl=stats.kl_sum / live,
        entropy=stats.entropy_sum / tokens,
        clip_fraction=stats.clipped_tokens / live,
        gradient_norm=event.gradient_norm,
        learning_rate=event.learning_rate,
        logprob_gap=stats.logprob_gap,
        logprob_gap_max=stats.logprob_gap_max if stats.logprob_gap_tokens else None,
        logprob_gap_by_version=stats.logprob_gap_by_version,
        reference_kl=stats.reference_kl_sum / live,
        effective_share=stats.effective_share,
        masked_tokens=stats.masked_tokens,
        unique_tokens=stats.unique_tokens,
        path_tokens=stats.path_tokens,
        token_versions=stats.token_versions,
        skipped=event.skipped,
        alarm=event.alarm,
        seconds=event.opened_s,
        sequence=sequence,
    )


async def report_of(deps: Deps, spec: RunSpec) -> RunReport:
    """A run with its progress, read from the streams' last messages."""
    committed, published = await together(
        deps.bus.last(subjects.update(spec.run, "committed"), subjects.UPDATES),
        deps.bus.last(subjects.weights(spec.run, "published"), subjects.WEIGHTS),
    )
    progress = Progress()
    if committed is not None and isinstance(event := committed.readable(), Committed):
        progress = Progress(
            update=event.update,
            version=event.version,
            score=event.score,
            logprob_gap=event.stats.logprob_gap,
            alarm=event.alarm,
        )
    if published is not None and isinstance(news := published.readable(), WeightsPublished):
        progress = msgspec.structs.replace(progress, published_version=news.manifest.version)
    return RunReport(spec=spec, progress=progress)


@contextlib.asynccontextmanager
async def _alone(deps: Deps) -> AsyncIterator[None]:
    """Nobody else creates a run while this block lasts."""
    bucket = Bucket(deps.bus, subjects.KV_LEASES, LeaseOwner)
    lease = Lease(bucket, "gateway.runs", f"{deps.context.replica}-{uuid.uuid4().hex[:8]}", LEASE_S)
    with deps.context.waits.on("the creation of another run", PATIENCE_S):
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await lease.acquire():  # noqa: ASYNC110 - the lease is another process's
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise BusUnavailableError("another run is just being created; try again later") from error
    try:
        async with asyncio.timeout(SECTION_S):
            yield
    finally:
        await lease.release()


async def _others_active(deps: Deps, run: str) -> str | None:
    """Another run that is active, read from the leader."""
    prefix = deps.runs.subject("")
    names = await deps.bus.subjects(f"KV_{subjects.KV_RUNS}", deps.runs.subject(">"))
    for name in sorted(subject.removeprefix(prefix) for subject in names):
        known = deps.run_view.values.get(name)
        if name == run or (known is not None and known.state != "active"):
            continue  # a run that is finished or stopped never becomes active again
        found = await deps.runs.get(name)
        if found is not None and found[0].state == "active":
            return name
    return None


async def _create(deps: Deps, spec: RunSpec) -> RunReport:
    async with _alone(deps):
        there = await deps.runs.get(spec.run)
        if there is not None:
            if msgspec.structs.replace(there[0], state="active") != spec:
                detail = f"run {spec.run} exists with another setting; choose another name"
                raise Problem(409, detail, field="run")
            return await report_of(deps, there[0])
        if (other := await _others_active(deps, spec.run)) is not None:
            stop = f'PATCH /v1/runs/{other} with {{"state": "stopped"}} stops it'
            detail = f"run {other} is active, and one run is active at a time; {stop}"
            raise Problem(409, detail, field="run")
        made = checked(spec, deps.cells())
        deps.run_view.learn(spec.run, made, await deps.runs.create(spec.run, made))
    return await report_of(deps, spec)


@router.post(
    "/v1/runs",
    status_code=201,
    summary="Create a run",
    responses=documented(RunReport, examples.RUN_REPORT, status=201),
)
async def create_run(
    request: Request,
    deps: DepsOf,
    body: Annotated[RunIn, Body(openapi_examples=body_example(run=examples.RUN_IN))],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    spec = body.spec()

    async def handle() -> tuple[int, bytes]:
        return 201, msgspec.json.encode(await _create(deps, spec))

    content = f"{request.url.path} {msgspec.json.encode(spec).decode()}"
    return await once(deps.bus, idempotency_key, content, handle)


@router.get("/v1/runs", summary="List runs", responses=documented(RunList, examples.RUN_LIST))
async def list_runs(
    deps: DepsOf,
    state: Literal["active", "finished", "stopped"] | None = None,
    after: Annotated[str | None, Query(pattern=RUN_PATTERN, description="Names after this one")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    names = [name for name in sorted(deps.run_view.values) if after is None or name > after]
    runs = [spec for name in names if (spec := deps.run_view.values[name]) and state in (None, spec.state)]
    chosen = tuple(runs[:limit])
    return answer(RunList(runs=chosen, next=chosen[-1].run if len(runs) > limit else None))


@router.get("/v1/runs/{run}", summary="A run and how far it is", responses=documented(RunReport, examples.RUN_REPORT))
async def read_run(deps: DepsOf, run: RunPath) -> Response:
    return answer(await report_of(deps, (await deps.run(run))[0]))


@router.patch(
    "/v1/runs/{run}",
    summary="Change a live run, or stop it",
    responses=documented(RunReport, examples.RUN_STOPPED),
)
async def change_run(
    deps: DepsOf,
    run: RunPath,
    body: Annotated[RunChange, Body(openapi_examples=body_example(stop=examples.RUN_STOP, change=examples.RUN_CHANGE))],
) -> Response:
    change = body.values()
    for _ in range(8):
        spec, revision = await deps.run(run)
        after = changed(spec, change, deps.cells())
        if after == spec:
            return answer(await report_of(deps, spec))
        with contextlib.suppress(ConflictError):
            deps.run_view.learn(run, after, await deps.runs.update(run, after, revision))
            return answer(await report_of(deps, after))
    raise Problem(409, f"run {run} is being changed by others; try again", field="run")


@router.get("/v1/updates", summary="Committed updates", responses=documented(UpdateList, examples.UPDATE_LIST))
async def list_updates(
    deps: DepsOf,
    run: RunQuery = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE - 1, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Response:
    spec, _ = await chosen_run(deps, run)
    subject = subjects.update(spec.run, "committed")
    found = await page(deps.bus, subjects.UPDATES, subject, start=after + 1, limit=limit)
    events = [(stored.readable(), stored.sequence) for stored in found.messages]
    updates = tuple(summary_of(event, sequence) for event, sequence in events if isinstance(event, Committed))
    return answer(UpdateList(run=spec.run, updates=updates, next=events[-1][1] if found.left else None))
