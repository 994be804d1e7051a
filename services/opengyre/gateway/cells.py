"""/v1/hosts, /v1/cells, /v1/staleness, /v1/weights: what the allocator and the hosts say."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response

from opengyre.gateway import examples
from opengyre.gateway.deps import BoundRoute, Deps, answer, chosen_run, listed
from opengyre.gateway.idempotency import once
from opengyre.gateway.models import MAX_SEQUENCE, TOKEN_PATTERN
from opengyre.gateway.openapi import documented
from opengyre.gateway.problems import Problem
from opengyre.gateway.runs import DepsOf, RunQuery
from opengyre.proto import subjects
from opengyre.proto.decision import (
    CellReport,
    CellsReport,
    StalenessReport,
    StalenessRequest,
    WishReply,
    WishRequest,
)
from opengyre.proto.host import HostStatus
from opengyre.proto.service import Empty
from opengyre.proto.weights import WeightsApplied, WeightsPublished, WeightsRefused
from opengyre.shared.bus import BusError, call, page

PATIENCE_S = 5.0
APPLIED = 5000

router = APIRouter(route_class=BoundRoute, tags=["cells"])


class HostsReport(msgspec.Struct, frozen=True, kw_only=True):
    hosts: tuple[HostStatus, ...]
    cells: tuple[CellReport, ...]
    cells_missing: str | None = None
    """Why the allocator's view of the cells is not here."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    boot: str
    duration_s: float


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    boot: str
    error: str


class VersionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A published version of the weights, and who serves it or refused it."""

    version: int
    parent: int | None
    step: int
    directory: str
    bytes: int
    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]
    sequence: int


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    published_version: int | None
    versions: tuple[VersionReport, ...]
    next: int | None
    """`after` of the next page."""


async def staleness_of(deps: Deps, run: str, patience_s: float = PATIENCE_S) -> StalenessReport:
    """Ask the allocator; raises `BusError`."""
    request = StalenessRequest(run=run)
    return await call(
        deps.bus, "allocator", "any", "staleness", request, StalenessReport, timeout_s=2, patience_s=patience_s
    )


async def cells_of(deps: Deps, patience_s: float = PATIENCE_S) -> CellsReport:
    """Ask the allocator; raises `BusError`."""
    return await call(deps.bus, "allocator", "any", "cells", Empty(), CellsReport, timeout_s=2, patience_s=patience_s)


@router.get(
    "/v1/staleness",
    summary="The ledger, and staleness predicted and measured",
    responses=documented(StalenessReport, examples.STALENESS),
)
async def staleness(deps: DepsOf, run: RunQuery = None) -> Response:
    spec, _ = await chosen_run(deps, run)
    return answer(await staleness_of(deps, spec.run))


@router.get("/v1/hosts", summary="Hosts and cells", responses=documented(HostsReport, examples.HOSTS))
async def hosts(deps: DepsOf) -> Response:
    known = tuple(deps.host_view.values[name] for name in sorted(deps.host_view.values))
    try:
        cells = await cells_of(deps, patience_s=1.0)
    except BusError as error:
        return answer(HostsReport(hosts=known, cells=(), cells_missing=str(error)))
    return answer(HostsReport(hosts=known, cells=cells.cells))


@router.get("/v1/cells", summary="Cells and their roles", responses=documented(CellsReport, examples.CELLS))
async def cells(deps: DepsOf) -> Response:
    return answer(await cells_of(deps))


WishName = Literal["drain", "resume", "cordon"]
Wish = Annotated[WishName, Path(description="drain: train; resume: as the policy says")]
Key = Annotated[str | None, Header(alias="Idempotency-Key")]
Name = Annotated[str, Path(pattern=TOKEN_PATTERN)]


async def _wish(deps: Deps, request: Request, cell: str, wish: WishName, key: str | None) -> Response:
    async def handle() -> tuple[int, bytes]:
        wished = WishRequest(cell=cell, wish=wish)
        reply = await call(deps.bus, "allocator", "any", "wish", wished, WishReply, timeout_s=2, patience_s=PATIENCE_S)
        return 200, msgspec.json.encode(reply)

    return await once(deps.bus, key, request.url.path, handle)


@router.post(
    "/v1/cells/{cell}/{wish}",
    summary="Drain, resume or cordon a cell",
    responses=documented(WishReply, examples.WISH, "The allocator has the wish; GET /v1/hosts shows the change"),
)
async def wish_cell(request: Request, deps: DepsOf, cell: Name, wish: Wish, idempotency_key: Key = None) -> Response:
    return await _wish(deps, request, cell, wish, idempotency_key)


@router.post(
    "/v1/hosts/{host}/{wish}",
    summary="Drain, resume or cordon the cell of a host",
    responses=documented(WishReply, examples.WISH, "The allocator has the wish; GET /v1/hosts shows the change"),
)
async def wish_host(request: Request, deps: DepsOf, host: Name, wish: Wish, idempotency_key: Key = None) -> Response:
    status = deps.host_view.values.get(host)
    if status is None:
        raise Problem(404, f"there is no host {host}; there are: {listed(deps.host_view.values)}", field="host")
    return await _wish(deps, request, status.cell, wish, idempotency_key)


@router.get("/v1/weights", summary="Versions of the weights", responses=documented(WeightsReport, examples.WEIGHTS))
async def weights(
    deps: DepsOf,
    run: RunQuery = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE - 1, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    spec, _ = await chosen_run(deps, run)
    name = spec.run
    subject = subjects.weights(name, "published")
    got = await page(deps.bus, subjects.WEIGHTS, subject, start=after + 1, limit=limit)
    latest = await deps.bus.last(subject, subjects.WEIGHTS)
    newest = latest.readable() if latest is not None else None
    published = [(s.sequence, event) for s in got.messages if isinstance(event := s.readable(), WeightsPublished)]
    applied: dict[int, list[Applied]] = {}
    refused: dict[int, list[Refused]] = {}
    if published:
        filters = [subjects.weights(name, "applied"), subjects.weights(name, "refused")]
        answers = await page(deps.bus, subjects.WEIGHTS, filters, start=published[0][0], limit=APPLIED)
        for stored in answers.messages:
            event = stored.readable()
            if isinstance(event, WeightsApplied):
                one = Applied(host=event.host, boot=event.boot, duration_s=event.duration_s)
                applied.setdefault(event.version, []).append(one)
            elif isinstance(event, WeightsRefused):
                no = Refused(host=event.host, boot=event.boot, error=event.error)
                refused.setdefault(event.version, []).append(no)
    versions = tuple(
        VersionReport(
            version=event.manifest.version,
            parent=event.manifest.parent,
            step=event.manifest.step,
            directory=event.manifest.directory,
            bytes=sum(file.bytes for file in event.manifest.files),
            applied=tuple(applied.get(event.manifest.version, ())),
            refused=tuple(refused.get(event.manifest.version, ())),
            sequence=sequence,
        )
        for sequence, event in published
    )
    version = newest.manifest.version if isinstance(newest, WeightsPublished) else None
    following = published[-1][0] if published and got.left else None
    return answer(WeightsReport(run=name, published_version=version, versions=versions, next=following))
