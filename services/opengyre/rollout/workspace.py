"""The sandbox of one line of an execution: the trunk's, or a lane's.

Invariants: what it did is recorded before the agent sees it; where it is lost it is made again as the log says, at most
`restore.MOST` times by one writer, and not for a program, which would lack what it did. A sandbox that is made again
has a name of its own.

Awaits: those of `Sandboxes`, with their bounds, and of the journal.
"""

import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import ExecResult, SandboxRef
from opengyre.proto.traj import SandboxOpened, ToolResult, Verified
from opengyre.rollout import restore, shell, steps
from opengyre.rollout.budget import TimeBudget
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.evaluation import Verdict
from opengyre.rollout.grading import Grader
from opengyre.rollout.history import History
from opengyre.rollout.journal import Journal
from opengyre.rollout.recorder import Record
from opengyre.rollout.sandboxes import InvalidCommandError, Sandboxes, SandboxFaultError, SandboxLostError
from opengyre.rollout.steps import Stage, line_of

log = logging.getLogger("gyre.rollout.workspace")


def ref_of(opened: SandboxOpened) -> SandboxRef:
    return SandboxRef(sandbox=opened.sandbox, node=opened.node, isolated=opened.isolated)


@dataclass
class Workspace:
    dispatch: EpisodeDispatch
    sandboxes: Sandboxes
    replica: str
    journal: Journal
    history: History
    """Of its line."""
    record: Record
    lane: int | None = None
    opened: SandboxOpened | None = None
    """By the log, or since."""
    stage: Stage | None = None
    """Of a task of several steps: `dispatch` is then of one step alone."""
    _remade: int = 0

    def __post_init__(self) -> None:
        self.grader = Grader(self.sandboxes, self.dispatch, self.replica, self.journal.confirm, self.name)

    @property
    def name(self) -> str:
        """Of its line; begins the ids of all that is done in it."""
        if self.stage is not None:
            return line_of(self.dispatch.execution, self.stage.step)
        return self.dispatch.execution if self.lane is None else f"{self.dispatch.execution}-l{self.lane}"

    @property
    def earlier(self) -> int:
        """Calls before the conversation that its agent is in."""
        return self.stage.calls if self.stage is not None else 0

    def ref(self) -> SandboxRef:
        assert self.opened is not None
        return ref_of(self.opened)

    def steps(self) -> list[shell.Step]:
        """What a shell agent has behind it."""
        turns = self.history.turns()[self.earlier :]
        return [shell.Step(turn.call.text, turn.result.output if turn.result is not None else None) for turn in turns]

    def kept(self) -> AbstractAsyncContextManager[None]:
        """Its lease is renewed, for as long as the block lasts."""
        return self.sandboxes.kept(self.ref, self.replica, at_once=self.journal.attempt > 0)

    async def take(self, ref: SandboxRef) -> None:
        """From now on this is its sandbox."""
        fields = {"sandbox": ref.sandbox, "node": ref.node, "isolated": ref.isolated, "lane": self.lane}
        opened = await self.record(SandboxOpened, **fields)
        assert isinstance(opened, SandboxOpened)
        self.opened = opened

    async def find_again(self) -> AgentEnded | None:
        """The sandbox of the writer before, or one that is made again as it was; the end, where that cannot be."""
        try:
            await self.sandboxes.check(self.ref(), self.replica)
        except SandboxLostError:
            try:
                await self.make_again()
            except SandboxLostError as error:
                return AgentEnded("infra", str(error))
        return None

    async def make_again(self) -> None:
        """A sandbox as the log says that the lost one was; raises `SandboxLostError`."""
        name = restore.name_of(self.name, self.journal.attempt, self._remade)
        self._remade += 1
        if self.stage is not None and self.stage.step and self.dispatch.harness.agent == "program":
            raise SandboxLostError("the sandbox is gone, with what the agent program did in the steps before")
        whole = self.dispatch if self.stage is None else self.stage.dispatch
        ref = await restore.restored(self.sandboxes, whole, self.history, self.replica, name, self.stage)
        await self.take(ref)

    async def recover(self, loss: SandboxLostError) -> None:
        """Make the sandbox again that was lost under us, or raise the loss: a program's would lack what it did."""
        if self.dispatch.harness.agent != "shell" or self._remade >= restore.MOST:
            raise loss
        log.warning("%s; making it again", loss)
        old = self.ref()
        await self.make_again()
        if isinstance(loss, SandboxFaultError):  # it may be there still
            await self.sandboxes.destroy(old)

    async def prepare(self) -> AgentEnded | None:
        """Bring what comes with the step; its agent's end, where the step cannot begin."""
        assert self.stage is not None
        await self.journal.confirm()
        async with self.kept():
            while True:
                try:
                    fault = await self.sandboxes.prepare(self.ref(), self.name, self.stage.now)
                except SandboxLostError as loss:
                    try:
                        await self.recover(loss)
                    except SandboxLostError as error:
                        return AgentEnded("infra", str(error))
                    continue
                if fault is None:
                    return None
                return AgentEnded("agent_error", f"step {self.stage.now.name}: {fault}", unjudged=True)

    async def _execute(self, exec_id: str, command: str, budget: TimeBudget) -> ExecResult:
        """Run a command, in the sandbox that is made again where it is lost, which is not the agent's time."""
        timeout_s = self.dispatch.harness.command_timeout_s
        while True:
            try:
                return await self.sandboxes.execute(self.ref(), exec_id, command, timeout_s)
            except SandboxLostError as loss:
                budget.pause()
                try:
                    await self.recover(loss)
                finally:
                    budget.resume()

    async def run_command(self, turn: int, command: str, budget: TimeBudget) -> str:
        """Run the agent's command and record it; what the agent sees of it."""
        turn += self.earlier
        harness = self.dispatch.harness
        exec_id = f"{self.name}-t{turn}"
        since = budget.spent_s
        try:
            result = await self._execute(exec_id, command, budget)
        except InvalidCommandError as error:
            exit_code, size, timed_out = 2, 0, False
            output = str(error)[: harness.observation_chars]
        else:
            exit_code, timed_out = result.exit_code, result.timed_out
            size = result.stdout_bytes + result.stderr_bytes
            output = shell.observation(result, harness.observation_chars)
        await self.record(
            ToolResult,
            turn=turn,
            exec_id=exec_id,
            command=command,
            exit_code=exit_code,
            output=output,
            output_bytes=size,
            timed_out=timed_out,
            duration_s=budget.spent_s - since,
            lane=self.lane,
        )
        return output

    async def graded(self, end: AgentEnded) -> Verified:
        """What the work is worth that an agent which ended so has left: stored, not yet taken."""
        reason, detail = end.reason, end.detail
        said = Verdict(evaluations=0)
        if reason == "infra" or end.unjudged:
            said = Verdict(fault=detail or "the sandbox is gone", evaluations=0)
        elif self.dispatch.task.checks or self.dispatch.task.tests is not None:
            try:
                said = await self._final()
            except SandboxLostError as error:
                reason, detail = "infra", str(error)
                said = Verdict(fault=str(error))
        parts, more = said.parts, False
        if self.stage is not None and said.fault is None:
            task, step = self.stage.dispatch.task, self.stage.step
            more = steps.goes_on(task, step, said.parts, reason)
            parts = steps.parts(task, step, self.stage.parts, said.parts, last=not more)
        return await self.journal.append(
            Verified,
            parts=parts,
            goes_on=more,
            infra_error=said.fault,
            evaluations=said.evaluations,
            reason=reason,
            detail=detail,
            lane=self.lane,
        )

    async def _final(self) -> Verdict:
        """The verdict on what the agent left; raises `SandboxLostError` where that cannot be made again."""
        while True:
            try:
                return await self.grader.final(self.ref())
            except SandboxLostError as loss:
                await self.recover(loss)
