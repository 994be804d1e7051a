"""Evaluates an execution's work: at its end until there is a verdict, and along the way once for each point.

Invariants: each evaluation has an id that is a function of the execution and its number, so that a writer that takes
over joins the one under way or gets the recorded answer, a failure's as well, and the budget of attempts holds for all
writers together; before each one that ends what the agent left running, it is confirmed that we are still the writer.

Awaits: an answer of the sandbox service, for as long as it is away; a pause between attempts; along the way, both
within `bound_s`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from prometheus_client import Counter

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import SandboxRef
from opengyre.rollout.evaluation import Verdict, another, pause_s, verdict
from opengyre.rollout.sandboxes import (
    InvalidCommandError,
    Mode,
    Sandboxes,
    SandboxFaultError,
    SandboxLostError,
    verifying_s,
)

log = logging.getLogger("gyre.rollout.grading")

FAILED = Counter("gyre_rollout_evaluations_failed", "Evaluations that gave no verdict", ["kind"])
PROGRESS_MARGIN_S = 60.0


@dataclass(frozen=True)
class Grader:
    sandboxes: Sandboxes
    dispatch: EpisodeDispatch
    owner: str
    confirm: Callable[[], Awaitable[None]]
    """Raises `FencedError` where another writer has taken over."""
    name: str
    """Of whose work it is: begins the ids of its evaluations."""

    @property
    def bound_s(self) -> float:
        """The longest that one measurement of progress may take."""
        return verifying_s(self.dispatch) + PROGRESS_MARGIN_S

    async def final(self, ref: SandboxRef) -> Verdict:
        """The verdict on the kept work; raises `SandboxLostError` where that is gone, and `FencedError`."""
        scoring = self.dispatch.scoring
        done = 0
        # All of it together may take longer than a lease lasts.
        async with self.sandboxes.kept(lambda: ref, self.owner, at_once=True):
            while True:
                await self.confirm()
                said = await self._evaluate(ref, f"{self.name}-v{done}", scoring.grading)
                done += 1
                said = replace(said, evaluations=done)
                if said.fault is not None:
                    FAILED.labels("final").inc()
                    log.warning("evaluation %d of at most %d failed: %s", done, scoring.attempts, said.fault)
                if not another(said, scoring.attempts):
                    return said
                await asyncio.sleep(pause_s(done))

    async def progress(self, ref: SandboxRef, calls: int) -> Verdict:
        """What the work is worth after so many calls, measured on a copy; a failure is a verdict as well."""
        try:
            async with asyncio.timeout(self.bound_s):
                said = await self._evaluate(ref, f"{self.name}-p{calls}", "live")
        except SandboxLostError as error:
            said = Verdict(fault=str(error))
        except TimeoutError:
            said = Verdict(fault=f"progress could not be measured within {self.bound_s:g} s")
        if said.fault is not None:
            FAILED.labels("progress").inc()
            log.warning("progress after %d calls could not be measured: %s", calls, said.fault)
        return said

    async def _evaluate(self, ref: SandboxRef, verify_id: str, mode: Mode) -> Verdict:
        try:
            return verdict(await self.sandboxes.verify(ref, self.dispatch, verify_id, mode))
        except InvalidCommandError as error:
            return Verdict(fault=str(error), hopeless=True)
        except SandboxFaultError as error:
            return Verdict(fault=str(error))
