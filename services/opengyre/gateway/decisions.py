"""/v1/decisions: what the allocator decided, each with the inputs that it decided on."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from opengyre.gateway import examples
from opengyre.gateway.deps import BoundRoute, answer, chosen_run
from opengyre.gateway.models import MAX_SEQUENCE
from opengyre.gateway.openapi import documented
from opengyre.gateway.runs import DepsOf, RunQuery
from opengyre.proto import subjects
from opengyre.proto.decision import Decision
from opengyre.shared.bus import Bus, Stored, page

NO_RUN = "none"
"""The run of decisions that were made while there was no run."""

router = APIRouter(route_class=BoundRoute, tags=["cells"])


class DecisionAt(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    time: float
    """When it was stored, seconds since the epoch."""
    decision: Decision


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    decisions: tuple[DecisionAt, ...]
    """The oldest first."""
    next: int | None
    """`after` of the next page."""


async def start_of_last(bus: Bus, stream: str, subject: str, wanted: int) -> int:
    """A sequence from which on `wanted` messages are under `subject`, and not many more; 1 where there are fewer."""
    end = (await bus.stream_info(stream)).state.last_seq
    width = wanted
    while width < end:
        start = end - width + 1
        if (await page(bus, stream, subject, start=start, limit=0)).left >= wanted:
            return start
        width *= 2
    return 1


async def last_of(bus: Bus, stream: str, subject: str, wanted: int) -> list[Stored]:
    """The last `wanted` messages under `subject`, the oldest first."""
    start = await start_of_last(bus, stream, subject, wanted)
    messages: list[Stored] = []
    while True:
        got = await page(bus, stream, subject, start=start, limit=wanted)
        messages = [*messages, *got.messages][-wanted:]
        if not got.messages or not got.left:
            return messages
        start = got.messages[-1].sequence + 1


@router.get(
    "/v1/decisions",
    summary="Decisions of the allocator, with their inputs",
    responses=documented(DecisionList, examples.DECISION_LIST),
)
async def list_decisions(
    deps: DepsOf,
    run: RunQuery = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE - 1, description="`next` of the page before")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    last: Annotated[bool, Query(description="The last ones instead of those after `after`")] = False,
    inputs: Annotated[bool, Query(description="With what was decided on; without, only what was decided")] = True,
) -> Response:
    name = NO_RUN if run == NO_RUN and run not in deps.run_view.values else (await chosen_run(deps, run))[0].run
    subject = subjects.decision(name)
    if last:
        messages, more = await last_of(deps.bus, subjects.DECISIONS, subject, limit), False
    else:
        got = await page(deps.bus, subjects.DECISIONS, subject, start=after + 1, limit=limit)
        messages, more = got.messages, got.left > 0
    found: list[DecisionAt] = []
    for stored in messages:
        event = stored.readable()
        if isinstance(event, Decision):
            if not inputs:
                event = msgspec.structs.replace(event, input=None, admission=None)
            found.append(DecisionAt(sequence=stored.sequence, time=stored.timestamp, decision=event))
    following = messages[-1].sequence if messages and more else None
    return answer(DecisionList(run=name, decisions=tuple(found), next=following))
