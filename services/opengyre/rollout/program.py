"""An agent that is a program: any command line, run in the sandbox, that calls the model by an API it knows.

It reaches its execution's endpoint on a port of the sandbox's own loopback, which the sandbox service carries here, and
nothing else. It ends by itself, or at a budget; what it leaves in the sandbox is what is scored. A writer that takes
over finds it still running and joins it; where the sandbox is gone, it runs again from the start in a new one, and its
requests that are as before are answered from the log.

Awaits: `run` is woken by the program's end; by a spent turn budget, and then gives it `GRACE_S` to end; its caller's
time budget cancels it. The port is asked for again every `AGAIN_S`: a sandbox service that started again has none.
"""

import asyncio
import contextlib
import shlex
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import ExecResult
from opengyre.proto.traj import EndReason
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.recorder import Recorder
from opengyre.rollout.sandboxes import InvalidCommandError, SandboxLostError

GRACE_S = 5.0
AGAIN_S = 5.0
MAX_S = 86_400.0
PORT = 4000
DETAIL = 300
"""Characters of a failed program's last words."""


def port_of(execution: str, *, isolated: bool) -> int:
    """Where the endpoint is in the sandbox. Without isolation all sandboxes of a machine share its ports."""
    return PORT if isolated else 20_000 + zlib.crc32(execution.encode()) % 30_000


def environment(dispatch: EpisodeDispatch, port: int, key: str) -> dict[str, str]:
    """What the program finds: the variables that clients of both APIs read, and the task."""
    base = f"http://127.0.0.1:{port}/x/{dispatch.execution}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "GYRE_MODEL": dispatch.run,
        "GYRE_EXECUTION": dispatch.execution,
        "GYRE_INSTRUCTION": dispatch.task.instruction,
    }


def command_of(dispatch: EpisodeDispatch, port: int, key: str) -> str:
    """The shell text that is run."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(dispatch, port, key).items()]
    return "\n".join([*lines, dispatch.harness.program or ""])


def ended(result: ExecResult, refused: EndReason | None) -> AgentEnded:
    """Why the agent ended; `refused` is the budget that refused it a call, if one did."""
    if result.timed_out:
        return AgentEnded("time_budget")
    # One that was told that its context is too long may have gone on with a shorter one.
    if refused is not None and (result.exit_code != 0 or refused != "overflow"):
        return AgentEnded(refused)
    if result.exit_code == 0:
        return AgentEnded("done")
    how = result.killed_by or f"exit status {result.exit_code}"
    words = (result.stderr.strip() or result.stdout.strip())[-DETAIL:]
    return AgentEnded("agent_error", f"the program ended with {how}: {words}".strip(": "))


@dataclass(frozen=True)
class ProgramAgent:
    start: Callable[[], Awaitable[ExecResult]]
    """Run the program, or join it."""
    forward: Callable[[], Awaitable[None]]
    """Open its way to the endpoint."""
    finished: Callable[[ExecResult], Awaitable[None]]
    """Record its end."""
    recorder: Recorder

    async def run(self) -> AgentEnded:
        await self.forward()
        running = asyncio.ensure_future(self.start())
        spent = asyncio.create_task(self.recorder.spent.wait())
        forwarding = asyncio.create_task(self._forward())
        tasks = {running, spent, forwarding}
        try:
            await asyncio.wait({running, spent}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait({running}, timeout=GRACE_S)
            if not running.done():
                return AgentEnded(self.recorder.refused or "turn_budget")
            result = running.result()
            await self.finished(result)
            return ended(result, self.recorder.refused)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _forward(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            # Whether the sandbox is gone is for `start` to say.
            with contextlib.suppress(SandboxLostError, InvalidCommandError):
                await self.forward()
