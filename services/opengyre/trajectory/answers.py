"""Answers to requests: an execution opened again. Reads the log of its group; holds nothing.

Awaits: reading a log, by the broker's answers; the requester gives up by its own timeout.
"""

import asyncio
from collections.abc import Mapping, Sequence

from opengyre.proto import codec, subjects
from opengyre.proto.explain import ExplainReport, ExplainRequest
from opengyre.proto.ids import BadIdentifierError, check_token, group_of, run_of
from opengyre.proto.traj import Overdue, TrajEvent
from opengyre.shared.bus import Bus, BusUnavailableError, Endpoint, RpcFailedError, Stored, read
from opengyre.trajectory.explain import UnknownExecutionError, explain


class Answers:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

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
            return await asyncio.to_thread(_explain, execution, stored)
        except UnknownExecutionError as error:
            raise RpcFailedError("not_found", str(error)) from error


def _explain(execution: str, stored: Sequence[Stored]) -> ExplainReport:
    events: list[TrajEvent | Overdue] = []
    for message in stored:
        try:
            event = message.event()
        except codec.UndecodableError:
            continue  # Its place in the log stays empty, as it does when the group is made.
        if isinstance(event, TrajEvent | Overdue):
            events.append(event)
    return explain(execution, events)
