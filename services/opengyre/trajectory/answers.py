"""Answers to requests: an execution opened again. Reads the log of its group; holds nothing.

Awaits: reading a log, by the broker's answers; the requester gives up by its own timeout.
"""

import asyncio
from collections.abc import Mapping

from opengyre.proto import subjects
from opengyre.proto.explain import ExplainReport, ExplainRequest
from opengyre.proto.ids import BadIdentifierError, check_token, group_of, run_of
from opengyre.shared.blobs import Blobs
from opengyre.shared.bulk import fill
from opengyre.shared.bus import Bus, BusUnavailableError, Endpoint, RpcFailedError, read
from opengyre.trajectory.explain import UnknownExecutionError, explain
from opengyre.trajectory.faults import decoded


class Answers:
    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self._bus = bus
        self._blobs = blobs

    def endpoints(self) -> Mapping[str, Endpoint]:
        return {"explain": Endpoint(ExplainRequest, self.explain)}

    async def explain(self, request: ExplainRequest) -> ExplainReport:
        """`not_found` for an execution that the log does not have (any more)."""
        try:
            execution = check_token("execution", request.execution)
            group = check_token("group", group_of(execution))
            scope = subjects.traj(check_token("run", run_of(group)), group, "*", "*")
        except BadIdentifierError as error:
            raise RpcFailedError("not_found", str(error)) from error
        try:
            stored = await read(self._bus, subjects.TRAJ, scope)
        except BusUnavailableError as error:
            raise RpcFailedError("not_ready", str(error)) from error
        try:
            log_of = await asyncio.to_thread(decoded, stored)
            events = await fill(self._blobs.get, log_of.events)
            return await asyncio.to_thread(explain, execution, events)
        except UnknownExecutionError as error:
            raise RpcFailedError("not_found", str(error)) from error
