"""`gyre sandbox exec`: a command that is begun once for its id and asked for until it has ended.

Invariants: a node that does not answer (its service was killed, say) is asked again under the same id until the
command's time and `MARGIN_S` are over, so the command runs once whatever happens to the service; an interruption ends
the command with all that it started, and says so.

Awaits: an answer of the node for `ATTEMPT_S`, of which the node itself waits `LOOK_S` for the command's end; where none
comes the next attempt, until the deadline.
"""

import asyncio

import msgspec

from opengyre.cli.client import errors
from opengyre.cli.sandbox_client import MARGIN_S, ask
from opengyre.cli.stack import StackError
from opengyre.proto.sandbox import SERVICE, ExecResult
from opengyre.proto.sandbox_jobs import JobStatus, KillRequest, PollRequest, SpawnRequest
from opengyre.shared.bus import Bus, RpcFailedError, RpcUnavailableError, call

LOOK_S = 2.0
ATTEMPT_S = LOOK_S + 3.0
AGAIN_S = 0.2
KILL_S = 15.0
"""For the end of what was interrupted: a node waits up to 10 s for it."""
GONE_S = 2.0
"""For a node that is not there: whoever interrupts wants the prompt."""


async def run_command(bus: Bus, node: str, request: SpawnRequest) -> ExecResult:
    """Run a command; raises `StackError`, and what the node refuses it with. Cancelled, it ends the command."""
    loop = asyncio.get_running_loop()
    bound_s = request.timeout_s + MARGIN_S
    asking = _until_answered(bus, node, "spawn", request, request, loop.time() + bound_s)
    beginning = asyncio.ensure_future(asking)
    try:
        status = await asyncio.shield(beginning)
        look = PollRequest(sandbox=request.sandbox, exec_id=request.exec_id, wait_s=LOOK_S)
        deadline = loop.time() + bound_s
        while status.running:
            if loop.time() > deadline:
                raise StackError(f"{request.exec_id} has not ended {MARGIN_S:g} s after its time; {_more(request)}")
            status = await _until_answered(bus, node, "poll", look, request, deadline)
    except asyncio.CancelledError:
        await _end(bus, node, request, beginning)
        raise
    if status.result is None:
        raise StackError(f"node {node!r} does not say what {request.exec_id} did; {_more(request)}")
    return status.result


def _more(request: SpawnRequest) -> str:
    return f"`gyre sandbox logs {request.sandbox} {request.exec_id}` has its output"


async def _until_answered(
    bus: Bus, node: str, verb: str, asked: msgspec.Struct, request: SpawnRequest, deadline: float
) -> JobStatus:
    """Ask until there is an answer, however often the service dies meanwhile."""
    loop = asyncio.get_running_loop()
    told = False
    while True:
        try:
            return await ask(bus, node, verb, asked, JobStatus, ATTEMPT_S)
        except (RpcUnavailableError, RpcFailedError) as error:
            if isinstance(error, RpcFailedError) and error.kind != "sandbox_busy":
                raise
            if loop.time() >= deadline:
                raise StackError(
                    f"node {node!r} does not answer, {request.exec_id} may have run ({error}); once it answers, "
                    f"{_more(request)}"
                ) from error
            if not told:
                errors.print(f"node {node} does not answer; asking it again for {request.exec_id}", soft_wrap=True)
                told = True
        await asyncio.sleep(AGAIN_S)


async def _end(bus: Bus, node: str, request: SpawnRequest, beginning: "asyncio.Task[JobStatus]") -> None:
    """End a command that nobody waits for any more, and say what became of it."""
    # It may be begun at this moment: what is not there yet cannot be ended.
    await asyncio.wait([beginning], timeout=GONE_S)
    begun = beginning.done() and not beginning.cancelled() and beginning.exception() is None
    beginning.cancel()
    kill = KillRequest(sandbox=request.sandbox, exec_id=request.exec_id)
    try:
        await call(bus, SERVICE, node, "kill", kill, JobStatus, timeout_s=KILL_S, patience_s=GONE_S)
    except (RpcFailedError, RpcUnavailableError) as error:
        rest = f"it is killed after its {request.timeout_s:g} s" if begun else "it may not have begun"
        errors.print(f"interrupted; command {request.exec_id} could not be ended ({error}), {rest}", soft_wrap=True)
    else:
        errors.print(f"interrupted; command {request.exec_id} was ended, {_more(request)}", soft_wrap=True)
