"""The leader's answers to requests: staleness of a run, cells, an operator's wish."""

from collections.abc import Iterable, Mapping

import msgspec

from opengyre.allocator.errors import DeposedError
from opengyre.allocator.term import MOST_AT_ONCE, Term
from opengyre.elastic.ledger import Ledger, report
from opengyre.proto import subjects
from opengyre.proto.decision import CellsReport, StalenessReport, StalenessRequest, WishReply, WishRequest
from opengyre.proto.service import Empty
from opengyre.proto.weights import WeightsPublished
from opengyre.shared.bus import Bus, Endpoint, RpcFailedError


def not_found(what: str, name: str, known: Iterable[str]) -> RpcFailedError:
    there = ", ".join(sorted(known))
    allowed = f"allowed: {there}" if there else f"there is no {what} yet"
    return RpcFailedError("not_found", f"there is no {what} {name!r}; {allowed}")


class Answers:
    def __init__(self, bus: Bus, term: Term) -> None:
        self._bus = bus
        self._term = term

    def endpoints(self) -> Mapping[str, Endpoint]:
        return {
            "staleness": Endpoint(StalenessRequest, self.staleness),
            "cells": Endpoint(Empty, self.cells),
            "wish": Endpoint(WishRequest, self.wish),
        }

    async def staleness(self, request: StalenessRequest) -> StalenessReport:
        """`not_found` for a run that nobody made; `not_ready` while its log is read."""
        run, term = request.run, self._term
        led = term.progress
        if led is not None and led.spec.run == run:
            return msgspec.structs.replace(
                report(run, led.spec.dispatch, led.ledger, led.published, led.by_token_mean),
                admission=msgspec.structs.replace(led.admission(MOST_AT_ONCE), waiting=led.queue.waiting("train")),
                live_executions=led.live_executions,
            )
        spec = term.runs.get(run)
        if spec is None:
            raise not_found("run", run, term.runs)
        last = await self._bus.last(subjects.weights(run, "published"), subjects.WEIGHTS)
        event = last.readable() if last is not None else None
        published = event.manifest.version if isinstance(event, WeightsPublished) else -1
        return report(run, spec.dispatch, Ledger(term.entries.get(run, ())), published)

    async def cells(self, _request: Empty) -> CellsReport:
        return CellsReport(cells=tuple(cell.report() for cell in self._term.cells().values()))

    async def wish(self, request: WishRequest) -> WishReply:
        """`not_found` for a cell that nobody knows."""
        try:
            cell = await self._term.wish(request.cell, request.wish)
        except DeposedError as error:
            raise RpcFailedError("unavailable", "the allocator's leader changes; ask again") from error
        except LookupError as error:
            raise not_found("cell", request.cell, self._term.cells()) from error
        return WishReply(cell=request.cell, wish=request.wish, state=cell.report().state)
