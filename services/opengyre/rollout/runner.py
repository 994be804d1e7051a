"""Drives one execution from where its log stands to its end: the shell around `episode.advance`.

Outcomes: `ENDED` (Ended is stored, the sandbox removed), `STOPPED` (this replica stops: another one continues from the
log), `FENCED` (another writer has it already: nothing more is done here, nothing answered).

Invariants: every effect follows a stored event; what must not be done by a writer that was replaced (evaluation,
which ends what the agent left running) is preceded by `Journal.confirm`; an append that has begun is finished. Progress
is measured before a call is sampled, when all that the agent did since the one before has come in: the agent waits for
it, its budget does not, and its sandbox is only read.

Awaits: `run` is woken by the end of the drive, by `stopping`, or by the journal's `fenced`, whichever is first.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import ExecResult, SandboxRef
from opengyre.proto.traj import PROGRAM, AnyTrajEvent, Call, Ended, Progressed, SandboxOpened, ToolResult, Verified
from opengyre.rollout import restore, shell, synthetic
from opengyre.rollout.agent import Agent, ChatClient, ShellAgent, SyntheticAgent
from opengyre.rollout.budget import BudgetSpentError, TimeBudget
from opengyre.rollout.endpoint import Endpoints
from opengyre.rollout.episode import AgentEnded, Effect, Episode, EpisodeEvent, Phase, Released, advance, due, rebuild
from opengyre.rollout.evaluation import Verdict, progress_due
from opengyre.rollout.grading import Grader
from opengyre.rollout.history import History
from opengyre.rollout.journal import Journal
from opengyre.rollout.models import Models
from opengyre.rollout.program import MAX_S, ProgramAgent, command_of, port_of
from opengyre.rollout.recorder import Recorder
from opengyre.rollout.router import Router
from opengyre.rollout.sandboxes import InvalidCommandError, Sandboxes, SandboxFaultError, SandboxLostError
from opengyre.shared import metrics
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus
from opengyre.shared.waits import Waits

log = logging.getLogger("gyre.rollout.runner")


PROGRAM_CHARS = 4096
"""What is recorded of an agent program's output."""


class Outcome(enum.Enum):
    ENDED = "ended"
    STOPPED = "stopped"
    FENCED = "fenced"


@dataclass(frozen=True)
class Station:
    """What the episodes of one replica share."""

    bus: Bus
    blobs: Blobs
    waits: Waits
    replica: str
    url: str
    """Base URL of this replica's HTTP side."""
    session: aiohttp.ClientSession
    sandboxes: Sandboxes
    router: Router
    endpoints: Endpoints
    models: Models
    stopping: asyncio.Event


@dataclass
class Runner:
    station: Station
    dispatch: EpisodeDispatch
    state: Episode = field(default_factory=Episode)
    history: History = field(default_factory=History)
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(self.station.bus, self.station.waits, self.dispatch, self.station.blobs)
        self._grader = Grader(self.station.sandboxes, self.dispatch, self.station.replica, self.journal.confirm)
        self._measuring = asyncio.Lock()
        self._remade = 0

    @property
    def suspended(self) -> bool:
        return self.recorder is not None and self.recorder.suspended

    @property
    def synthetic(self) -> bool:
        """Whether the agent is a load without a sandbox."""
        return self.dispatch.harness.agent == "synthetic"

    async def run(self) -> Outcome:
        """Begin or continue the execution. Raises `RetryLater` when its run is not there."""
        driving = asyncio.create_task(self._drive())
        watching = [asyncio.create_task(event.wait()) for event in (self.station.stopping, self.journal.fenced)]
        try:
            await asyncio.wait([driving, *watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped = not driving.done()
            for task in (driving, *watching):
                task.cancel()
            await asyncio.wait([driving, *watching])
            await self.journal.settled()
        if self.journal.fenced.is_set():
            if not driving.cancelled():
                driving.exception()
            return Outcome.FENCED
        if stopped and driving.cancelled():
            return Outcome.STOPPED
        driving.result()
        return Outcome.ENDED

    async def _drive(self) -> None:
        renderer = await self.station.models.renderer(self.dispatch.run)
        before = await self.journal.load()
        self.state = rebuild(before)
        self.history = History.of(before)
        if self.state.phase is Phase.RELEASING:
            log.info("%s has ended already", self.dispatch.execution)
            effects = due(self.state)
        else:
            effects = self._take(await self.journal.begin(self.station.replica, renderer.vocab_size))
        budget = TimeBudget(shell.time_budget_s(self.dispatch), self.state.active_s)
        self.recorder = Recorder(
            self.dispatch, self.journal.attempt, self.history, renderer, self.station.router, self._record, budget
        )
        verified = self.dispatch.task.checks or self.dispatch.task.tests is not None
        if self.dispatch.scoring.progress_every is not None and verified and not self.synthetic:
            self.recorder.before_call = lambda _number: self._measure(budget)
        pending = list(effects)
        while pending:
            for event in await self._perform(pending.pop(0), self.recorder, budget):
                pending.extend(self._take(event))
        assert self.state.phase is Phase.OVER, self.state.phase

    def _take(self, event: EpisodeEvent) -> tuple[Effect, ...]:
        self.state, effects = advance(self.state, event)
        if isinstance(event, Call | ToolResult):
            self.history.take(event)
        return effects

    async def _record(self, kind: Callable[..., AnyTrajEvent], /, **fields: Any) -> AnyTrajEvent:
        """Store an event of the running agent, which asks for nothing by itself."""
        event = await self.journal.append(kind, **fields)
        effects = self._take(event)
        assert not effects, effects
        return event

    async def _perform(self, effect: Effect, recorder: Recorder, budget: TimeBudget) -> list[EpisodeEvent]:
        match effect:
            case Effect.OPEN_SANDBOX:
                return [await self._open()]
            case Effect.RUN_AGENT:
                again = self.journal.attempt > 0 and not self.synthetic
                lost = await self._find_again() if again else None
                return [lost or await self._act(recorder, budget)]
            case Effect.VERIFY:
                return await self._verify()
            case Effect.CONCLUDE:
                return [await self._conclude(budget)]
            case Effect.RELEASE:
                if self.state.sandbox is not None:
                    await self.station.sandboxes.destroy(self._ref())
                return [Released()]

    def _ref(self) -> SandboxRef:
        opened = self.state.sandbox
        assert opened is not None
        return SandboxRef(sandbox=opened.sandbox, node=opened.node, isolated=opened.isolated)

    async def _open(self) -> EpisodeEvent:
        try:
            ref = await self.station.sandboxes.open(self.dispatch, self.station.replica)
        except (SandboxLostError, InvalidCommandError) as error:
            return AgentEnded("infra", f"no sandbox: {error}")
        return await self.journal.append(SandboxOpened, sandbox=ref.sandbox, node=ref.node, isolated=ref.isolated)

    async def _find_again(self) -> AgentEnded | None:
        """The sandbox of the writer before, or one that is made again as it was; the end, where that cannot be."""
        try:
            await self.station.sandboxes.check(self._ref(), self.station.replica)
        except SandboxLostError:
            try:
                await self._make_again()
            except SandboxLostError as error:
                return AgentEnded("infra", str(error))
        return None

    async def _make_again(self) -> None:
        """A sandbox as the log says that the lost one was; raises `SandboxLostError`."""
        name = restore.name_of(self.dispatch.execution, self.journal.attempt, self._remade)
        self._remade += 1
        ref = await restore.restored(self.station.sandboxes, self.dispatch, self.history, self.station.replica, name)
        await self._record(SandboxOpened, sandbox=ref.sandbox, node=ref.node, isolated=ref.isolated)

    async def _recover(self, loss: SandboxLostError) -> None:
        """Make the sandbox again that was lost under us, or raise the loss: a program's would lack what it did."""
        if self.dispatch.harness.agent != "shell" or self._remade >= restore.MOST:
            raise loss
        log.warning("%s; making it again", loss)
        old = self._ref()
        await self._make_again()
        if isinstance(loss, SandboxFaultError):  # it may be there still
            await self.station.sandboxes.destroy(old)

    async def _measure(self, budget: TimeBudget) -> None:
        """Before a call: what the work is worth, if that is due."""
        async with self._measuring:
            calls = self.state.calls
            if not progress_due(self.dispatch.scoring.progress_every, calls, self.state.measured_at):
                return
            loop = asyncio.get_running_loop()
            since = loop.time()
            budget.pause()
            try:
                said = await self._grader.progress(self._ref(), calls)
            finally:
                budget.resume()
            await self._record(
                Progressed,
                turn=calls,
                call=self.history.calls[-1].call if self.history.calls else None,
                parts=said.parts,
                infra_error=said.fault,
                duration_s=loop.time() - since,
            )

    async def _act(self, recorder: Recorder, budget: TimeBudget) -> AgentEnded:
        client = ChatClient(
            self.station.session,
            f"{self.station.url}/x/{self.dispatch.execution}/v1",
            self.station.endpoints.key(self.dispatch.execution),
            self.dispatch.run,
        )
        agent, sandbox = self._agent(client, recorder)
        self.station.endpoints.open(recorder)
        try:
            async with sandbox, budget.limit():
                return await agent.run()
        except BudgetSpentError:
            return AgentEnded("time_budget")
        except SandboxLostError as error:
            return AgentEnded("infra", str(error))
        except InvalidCommandError as error:
            return AgentEnded("agent_error", str(error))
        finally:
            self.station.endpoints.close(self.dispatch.execution)
            await recorder.close()
            await self.journal.settled()
            # Whoever asked for these was stopped meanwhile; they are in the log, so they count.
            for event in self.journal.claim():
                self._take(event)

    def _agent(self, client: ChatClient, recorder: Recorder) -> tuple[Agent, AbstractAsyncContextManager[Any]]:
        """The agent, where its log stands, and what keeps its sandbox alive meanwhile."""
        turns = self.history.turns()
        if self.synthetic:
            answers = [turn.call.text for turn in turns]
            return SyntheticAgent(self.dispatch, client, answers), contextlib.nullcontext()
        steps = [shell.Step(turn.call.text, turn.result.output if turn.result is not None else None) for turn in turns]
        at_once = self.journal.attempt > 0
        kept = self.station.sandboxes.kept(self._ref, self.station.replica, at_once=at_once)
        if self.dispatch.harness.agent == "program":
            return self._program(client, recorder), kept

        async def run_command(turn: int, command: str) -> str:
            return await self._run_command(turn, command, recorder.budget)

        return ShellAgent(self.dispatch, client, run_command, steps), kept

    def _program(self, client: ChatClient, recorder: Recorder) -> ProgramAgent:
        sandboxes, ref, execution = self.station.sandboxes, self._ref(), self.dispatch.execution
        port = port_of(execution, isolated=ref.isolated)
        command = command_of(self.dispatch, port, client.key)
        exec_id = f"{execution}-program"

        async def start() -> ExecResult:
            return await sandboxes.run_program(ref, exec_id, command, MAX_S)

        async def forward() -> None:
            await sandboxes.forward(ref, port, self.station.url)

        async def finished(result: ExecResult) -> None:
            if self.history.program is None:
                await self._record(
                    ToolResult,
                    turn=PROGRAM,
                    exec_id=exec_id,
                    command=self.dispatch.harness.program or "",
                    exit_code=result.exit_code,
                    output=shell.observation(result, PROGRAM_CHARS),
                    output_bytes=result.stdout_bytes + result.stderr_bytes,
                    timed_out=result.timed_out,
                    duration_s=result.duration_s,
                )

        return ProgramAgent(start, forward, finished, recorder)

    async def _execute(self, exec_id: str, command: str, budget: TimeBudget) -> ExecResult:
        """Run a command, in the sandbox that is made again where it is lost, which is not the agent's time."""
        sandboxes, timeout_s = self.station.sandboxes, self.dispatch.harness.command_timeout_s
        while True:
            try:
                return await sandboxes.execute(self._ref(), exec_id, command, timeout_s)
            except SandboxLostError as loss:
                budget.pause()
                try:
                    await self._recover(loss)
                finally:
                    budget.resume()

    async def _run_command(self, turn: int, command: str, budget: TimeBudget) -> str:
        harness = self.dispatch.harness
        exec_id = f"{self.dispatch.execution}-t{turn}"
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
        await self._record(
            ToolResult,
            turn=turn,
            exec_id=exec_id,
            command=command,
            exit_code=exit_code,
            output=output,
            output_bytes=size,
            timed_out=timed_out,
            duration_s=budget.spent_s - since,
        )
        return output

    async def _verify(self) -> list[EpisodeEvent]:
        reason, detail = self.state.reason, self.state.detail
        said = Verdict(evaluations=0)
        if self.synthetic:
            said = Verdict((synthetic.verdict(self.dispatch),))
        elif reason == "infra":
            said = Verdict(fault=detail or "the sandbox is gone", evaluations=0)
        elif self.dispatch.task.checks or self.dispatch.task.tests is not None:
            try:
                said = await self._graded()
            except SandboxLostError as error:
                reason, detail = "infra", str(error)
                said = Verdict(fault=str(error))
        return [
            await self.journal.append(
                Verified,
                parts=said.parts,
                infra_error=said.fault,
                evaluations=said.evaluations,
                reason=reason,
                detail=detail,
            )
        ]

    async def _graded(self) -> Verdict:
        """The verdict on what the agent left; raises `SandboxLostError` where that cannot be made again."""
        while True:
            try:
                return await self._grader.final(self._ref())
            except SandboxLostError as loss:
                await self._recover(loss)

    async def _conclude(self, budget: TimeBudget) -> EpisodeEvent:
        reason = self.state.reason or "agent_error"
        event = await self.journal.append(
            Ended,
            reason=reason,
            detail=self.state.detail,
            turns=self.state.calls,
            sampled_tokens=self.state.sampled_tokens,
            duration_s=max(budget.spent_s, self.state.active_s) + self.state.parked_s,
            members=self.dispatch.members,
        )
        metrics.EPISODES_ENDED.labels(reason).inc()
        if reason == "infra":
            metrics.EPISODES_INTERRUPTED.inc()
        return event
