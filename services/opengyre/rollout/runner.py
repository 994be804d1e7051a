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
import dataclasses
import enum
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import ExecResult
from opengyre.proto.traj import (
    PROGRAM,
    AnyTrajEvent,
    Call,
    Ended,
    Forked,
    Progressed,
    SandboxOpened,
    Stepped,
    ToolResult,
    Verified,
)
from opengyre.rollout import lanes, shell, steps, synthetic
from opengyre.rollout.agent import Agent, ChatClient, ShellAgent, SyntheticAgent
from opengyre.rollout.budget import BudgetSpentError, TimeBudget
from opengyre.rollout.episode import AgentEnded, Effect, Episode, EpisodeEvent, Phase, Released, advance, due, rebuild
from opengyre.rollout.evaluation import Verdict, progress_due
from opengyre.rollout.history import History
from opengyre.rollout.journal import Journal
from opengyre.rollout.program import MAX_S, ProgramAgent, command_of, port_of
from opengyre.rollout.prompt import Renderer
from opengyre.rollout.recorder import Recorder
from opengyre.rollout.sandboxes import InvalidCommandError, SandboxLostError
from opengyre.rollout.station import Station
from opengyre.rollout.workspace import Workspace, ref_of
from opengyre.shared import metrics

log = logging.getLogger("gyre.rollout.runner")


PROGRAM_CHARS = 4096
"""What is recorded of an agent program's output."""


class Outcome(enum.Enum):
    ENDED = "ended"
    STOPPED = "stopped"
    FENCED = "fenced"


@dataclass
class Runner:
    station: Station
    dispatch: EpisodeDispatch
    state: Episode = field(default_factory=Episode)
    history: History = field(default_factory=History)
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(self.station.bus, self.station.waits, self.dispatch, self.station.blobs)
        self._measuring = asyncio.Lock()
        self._budget = self._budget_of_now()
        self._renderer: Renderer | None = None
        self._trunk: Workspace | None = None

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
        self._renderer = await self.station.models.renderer(self.dispatch.run)
        before = await self.journal.load()
        self.state = rebuild(before)
        self.history = History.of(before)
        self._name_step()
        if self.state.phase is Phase.RELEASING:
            log.info("%s has ended already", self.dispatch.execution)
            effects = due(self.state)
        else:
            effects = self._take(await self.journal.begin(self.station.replica, self._renderer.vocab_size))
        self._budget = self._budget_of_now()
        pending = list(effects)
        while pending:
            for event in await self._perform(pending.pop(0), self._budget):
                pending.extend(self._take(event))
        assert self.state.phase is Phase.OVER, self.state.phase

    def _take(self, event: EpisodeEvent) -> tuple[Effect, ...]:
        self.state, effects = advance(self.state, event)
        if isinstance(event, Call | ToolResult):
            self.history.take(event)
        self._name_step()
        if isinstance(event, Stepped):
            self._budget = self._budget_of_now()
        return effects

    @property
    def _now(self) -> EpisodeDispatch:
        """The dispatch, as that of the step alone that the task is at."""
        return steps.at(self.dispatch, self.state.step)

    def _name_step(self) -> None:
        if self.dispatch.task.steps:
            self.journal.step = self.state.step

    def _budget_of_now(self) -> TimeBudget:
        return TimeBudget(shell.time_budget_s(self._now), self.state.active_s - self.state.begun.active_s)

    def _stage(self) -> steps.Stage | None:
        if not self.dispatch.task.steps:
            return None
        prepared = self.state.phase is not Phase.PREPARING
        return steps.Stage(self.dispatch, self.state.step, self.state.begun.calls, self.state.parts, prepared)

    async def _record(self, kind: Callable[..., AnyTrajEvent], /, **fields: Any) -> AnyTrajEvent:
        """Store an event of the running agent, which asks for nothing by itself."""
        event = await self.journal.append(kind, **fields)
        effects = self._take(event)
        assert not effects, effects
        return event

    async def _perform(self, effect: Effect, budget: TimeBudget) -> list[EpisodeEvent]:
        match effect:
            case Effect.OPEN_SANDBOX:
                return [await self._open()]
            case Effect.PREPARE:
                return [await self._prepare()]
            case Effect.RUN_AGENT:
                return [await self._run_agent(budget)]
            case Effect.RUN_LANES:
                return await self._run_lanes(budget)
            case Effect.VERIFY:
                return [await self._verify()]
            case Effect.CONCLUDE:
                return [await self._conclude(budget)]
            case Effect.RELEASE:
                return [await self._release()]

    def _workspace(self) -> Workspace:
        """The sandbox of the trunk."""
        stage = self._stage()
        if self._trunk is None:
            self._trunk = Workspace(
                self._now,
                self.station.sandboxes,
                self.station.replica,
                self.journal,
                self.history,
                self._record,
                opened=self.state.sandbox,
                stage=stage,
            )
        elif self._trunk.stage != stage:
            self._trunk = dataclasses.replace(self._trunk, dispatch=self._now, stage=stage)
        return self._trunk

    async def _open(self) -> EpisodeEvent:
        try:
            ref = await self.station.sandboxes.open(self.dispatch, self.station.replica)
        except (SandboxLostError, InvalidCommandError) as error:
            return AgentEnded("infra", f"no sandbox: {error}")
        return await self.journal.append(SandboxOpened, sandbox=ref.sandbox, node=ref.node, isolated=ref.isolated)

    async def _prepare(self) -> EpisodeEvent:
        """Make the sandbox ready for the step, and begin it."""
        if self.journal.attempt > 0:
            lost = await self._workspace().find_again()
            if lost is not None:
                return lost
        end = await self._workspace().prepare()
        if end is not None:
            return end
        return await self.journal.append(Stepped, name=self.dispatch.task.steps[self.state.step].name)

    async def _release(self) -> Released:
        held = {opened.sandbox: opened for opened in (self.state.sandbox, *self.state.lanes) if opened is not None}
        forked = self.state.forked
        async with asyncio.TaskGroup() as tasks:
            for opened in held.values():
                tasks.create_task(self.station.sandboxes.destroy(ref_of(opened)))
            if forked is not None and forked.snapshot is not None and self.state.sandbox is not None:
                tasks.create_task(self.station.sandboxes.drop(forked.snapshot, self.state.sandbox.node))
        return Released()

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
                said = await self._workspace().grader.progress(self._workspace().ref(), calls)
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

    @contextlib.asynccontextmanager
    async def _endpoint(self, budget: TimeBudget) -> AsyncIterator[tuple[ChatClient, Recorder]]:
        """The execution's endpoint, open for as long as the block lasts."""
        assert self._renderer is not None
        recorder = Recorder(
            self._now,
            self.journal.attempt,
            self.history,
            self._renderer,
            self.station.router,
            self._record,
            budget,
            step=self.state.step,
            earlier=self.state.begun.calls,
        )
        verified = self._now.task.checks or self._now.task.tests is not None
        if self.dispatch.scoring.progress_every is not None and verified and not self.synthetic:
            recorder.before_call = lambda _number: self._measure(budget)
        client = ChatClient(
            self.station.session,
            f"{self.station.url}/x/{self.dispatch.execution}/v1",
            self.station.endpoints.key(self.dispatch.execution),
            self.dispatch.run,
        )
        self.recorder = recorder
        self.station.endpoints.open(recorder)
        try:
            yield client, recorder
        finally:
            self.station.endpoints.close(self.dispatch.execution)
            await recorder.close()
            await self.journal.settled()
            # Whoever asked for these was stopped meanwhile; they are in the log, so they count.
            for event in self.journal.claim():
                self._take(event)

    async def _act(self, budget: TimeBudget) -> AgentEnded | shell.Part:
        async with self._endpoint(budget) as (client, recorder):
            agent, sandbox = self._agent(client, recorder)
            try:
                async with sandbox, budget.limit():
                    return await agent.run()
            except BudgetSpentError:
                return AgentEnded("time_budget")
            except SandboxLostError as error:
                return AgentEnded("infra", str(error))
            except InvalidCommandError as error:
                return AgentEnded("agent_error", str(error))

    async def _run_agent(self, budget: TimeBudget) -> EpisodeEvent:
        if self.journal.attempt > 0 and not self.synthetic:
            lost = await self._workspace().find_again()
            if lost is not None:
                return lost
        end = await self._act(budget)
        if isinstance(end, AgentEnded):
            return end
        branching = self.dispatch.harness.branching
        assert branching is not None
        await self.journal.confirm()
        kept = await lanes.snapshot(self._workspace())
        return await self.journal.append(Forked, turn=branching.turn, copies=branching.copies, snapshot=kept)

    async def _run_lanes(self, budget: TimeBudget) -> list[EpisodeEvent]:
        async with self._endpoint(budget) as (client, _):
            return [*await lanes.Lanes(self._workspace(), client, budget).run(self.state)]

    def _agent(self, client: ChatClient, recorder: Recorder) -> tuple[Agent, AbstractAsyncContextManager[Any]]:
        """The agent, where its log stands, and what keeps its sandbox alive meanwhile."""
        if self.synthetic:
            answers = [turn.call.text for turn in self.history.turns()]
            return SyntheticAgent(self.dispatch, client, answers), contextlib.nullcontext()
        trunk = self._workspace()
        if self.dispatch.harness.agent == "program":
            return self._program(client, recorder), trunk.kept()

        async def run_command(turn: int, command: str) -> str:
            return await trunk.run_command(turn, command, recorder.budget)

        return ShellAgent(trunk.dispatch, client, run_command, trunk.steps()), trunk.kept()

    def _program(self, client: ChatClient, recorder: Recorder) -> ProgramAgent:
        sandboxes, ref, execution = self.station.sandboxes, self._workspace().ref(), self.dispatch.execution
        port = port_of(execution, isolated=ref.isolated)
        command = command_of(self._now, port, client.key)
        step = self.state.step
        exec_id = f"{steps.line_of(execution, step)}-program"

        async def start() -> ExecResult:
            return await sandboxes.run_program(ref, exec_id, command, MAX_S)

        async def forward() -> None:
            await sandboxes.forward(ref, port, self.station.url)

        async def finished(result: ExecResult) -> None:
            if self.history.program(step) is None:
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

    async def _verify(self) -> EpisodeEvent:
        end = AgentEnded(self.state.reason or "agent_error", self.state.detail, self.state.unjudged)
        if self.state.sandbox is not None:
            return await self._workspace().graded(end)
        if self.synthetic:
            said = Verdict((synthetic.verdict(self.dispatch),))
        else:
            said = Verdict(fault=end.detail or "no sandbox", evaluations=0)
        return await self.journal.append(
            Verified,
            parts=said.parts,
            infra_error=said.fault,
            evaluations=said.evaluations,
            reason=end.reason,
            detail=end.detail,
        )

    async def _conclude(self, budget: TimeBudget) -> EpisodeEvent:
        reason = self.state.reason or "agent_error"
        event = await self.journal.append(
            Ended,
            reason=reason,
            detail=self.state.detail,
            turns=self.state.calls,
            sampled_tokens=self.state.sampled_tokens,
            duration_s=max(self.state.begun.active_s + budget.spent_s, self.state.active_s) + self.state.parked_s,
            members=self.dispatch.members,
        )
        metrics.EPISODES_ENDED.labels(reason).inc()
        if reason == "infra":
            metrics.EPISODES_INTERRUPTED.inc()
        return event
