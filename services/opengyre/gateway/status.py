"""/v1/status: what is waited for and for how long, what is missing, the books, the dead letters (laws 2 and 7)."""

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from opengyre.elastic import explain
from opengyre.gateway import examples
from opengyre.gateway.cells import cells_of, staleness_of
from opengyre.gateway.deps import BoundRoute, Deps, answer
from opengyre.gateway.openapi import documented
from opengyre.gateway.runs import DepsOf, RunReport, report_of
from opengyre.gateway.tasks import pending_tasks
from opengyre.proto import subjects
from opengyre.proto.decision import CellsReport, StalenessReport
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.run import RunSpec
from opengyre.proto.service import ServiceStatus
from opengyre.shared.bus import BusError, count, page

SERVICES = ("gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer", "host")
LETTERS = 5

router = APIRouter(route_class=BoundRoute, tags=["status"])


class ServiceWait(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    replica: str
    what: str
    since_s: float
    bound_s: float | None
    count: int


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, without its payload."""

    sequence: int
    origin_stream: str
    consumer: str
    origin_subject: str
    deliveries: int
    error: str


class DeadLetters(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    last: tuple[Letter, ...]


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    """Every service is there and ready."""
    missing: tuple[str, ...]
    """Services of which no replica is there."""
    not_ready: tuple[str, ...]
    """Replicas that are there and not ready, as `service.replica`."""
    waits: tuple[ServiceWait, ...]
    """What is waited for, the longest first."""
    run: RunReport | None
    """The active run or, where none is, the last one."""
    runs: dict[str, str]
    """Run -> state, 100 at most."""
    pending_tasks: int
    """Tasks of that run that wait to be admitted."""
    staleness: StalenessReport | None
    """With the books of groups and executions."""
    staleness_missing: str | None
    held: tuple[str, ...]
    """What holds the run back, as sentences: admission, refused cells, floors of cells, suspended episodes."""
    gauges: dict[str, float]
    """`service.figure` -> sum over the service's replicas."""
    dead_letters: DeadLetters
    services: tuple[ServiceStatus, ...]


async def dead_letters(deps: Deps) -> DeadLetters:
    """How many there are, and the last ones."""
    total = await count(deps.bus, subjects.DLQ, subjects.dlq("*", "*"))
    if not total:
        return DeadLetters(count=0, last=())
    newest = (await deps.bus.stream_info(subjects.DLQ)).state.last_seq
    got = await page(deps.bus, subjects.DLQ, subjects.dlq("*", "*"), start=max(1, newest - LETTERS + 1), limit=LETTERS)
    letters = [
        (stored.sequence, event) for stored in got.messages if isinstance(event := stored.readable(), DeadLetter)
    ]
    return DeadLetters(
        count=total,
        last=tuple(
            Letter(
                sequence=sequence,
                origin_stream=event.origin_stream,
                consumer=event.consumer,
                origin_subject=event.origin_subject,
                deliveries=event.deliveries,
                error=event.error,
            )
            for sequence, event in letters
        ),
    )


def held_of(spec: RunSpec, report: StalenessReport, cells: CellsReport) -> tuple[str, ...]:
    """What holds a run back."""
    found = [] if report.admission is None else [explain.held_by(report.admission)]
    if spec.state == "active":
        found += explain.refused(cells.cells)
        found += explain.unmet_floors(spec.elastic, cells.cells)
        found.append(explain.suspended(report.live_executions or 0, cells.cells))
    return tuple(sentence for sentence in found if sentence is not None)


def gauges_of(services: list[ServiceStatus]) -> dict[str, float]:
    """Sums of figures over the replicas of each service; of versions, the greatest."""
    found: dict[str, float] = {}
    for status in services:
        for name, value in status.gauges.items():
            key = f"{status.service}.{name}"
            if key not in found:
                found[key] = value
            elif name.endswith("version"):
                found[key] = max(found[key], value)
            else:
                found[key] += value
    return found


def waits_of(services: list[ServiceStatus]) -> tuple[ServiceWait, ...]:
    """All waits, the longest first."""
    waits = [
        ServiceWait(
            service=status.service,
            replica=status.replica,
            what=wait.what,
            since_s=wait.since_s,
            bound_s=wait.bound_s,
            count=wait.count,
        )
        for status in services
        for wait in status.waits
    ]
    return tuple(sorted(waits, key=lambda wait: -wait.since_s))


@router.get(
    "/v1/status", summary="What is waited for, and the books", responses=documented(StatusReport, examples.STATUS)
)
async def status(deps: DepsOf) -> Response:
    services = [deps.service_view.values[key] for key in sorted(deps.service_view.values)]
    here = {service.service for service in services}
    missing = tuple(name for name in SERVICES if name not in here)
    not_ready = tuple(f"{service.service}.{service.replica}" for service in services if not service.ready)
    present = deps.present_run()
    run: RunReport | None = None
    report: StalenessReport | None = None
    why: str | None = "there is no run yet"
    pending = 0
    held: tuple[str, ...] = ()
    if present is not None:
        run = await report_of(deps, (await deps.run(present))[0])
        pending = await pending_tasks(deps, present)
        try:
            report, why = await staleness_of(deps, present, patience_s=1.0), None
            held = held_of(run.spec, report, await cells_of(deps, patience_s=1.0))
        except BusError as error:
            why = str(error)
    return answer(
        StatusReport(
            ready=not missing and not not_ready,
            missing=missing,
            not_ready=not_ready,
            waits=waits_of(services),
            run=run,
            runs={name: spec.state for name, spec in sorted(deps.run_view.values.items())[:100]},
            pending_tasks=pending,
            staleness=report,
            staleness_missing=why,
            held=held,
            gauges=gauges_of(services),
            dead_letters=await dead_letters(deps),
            services=tuple(services),
        )
    )
