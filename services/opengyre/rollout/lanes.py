"""An execution that goes on as several lanes: alternatives of what its trunk began (`harness.branching`).

Invariants:
- `Forked` is stored before any lane does anything, so a writer that takes over continues the lanes and not the trunk.
- A lane has a sandbox of its own: the first keeps the trunk's, the others begin with its snapshot; where there is none
  (any more), with the trunk's commands done again. What a lane did before is never asked of a snapshot.
- All lanes share the execution's time budget and its endpoint; each is verified by itself, when all have ended.

Awaits: `run` is woken by the end of every lane's agent or of the time budget, then by every lane's verdict; the leases
of all lanes are renewed meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.proto.traj import Verified
from opengyre.rollout.agent import ChatClient, ShellAgent
from opengyre.rollout.budget import BudgetSpentError, TimeBudget
from opengyre.rollout.episode import AgentEnded, Episode
from opengyre.rollout.sandboxes import InvalidCommandError, SandboxLostError
from opengyre.rollout.workspace import Workspace

log = logging.getLogger("gyre.rollout.lanes")


def snapshot_of(execution: str) -> str:
    """Id of the snapshot that an execution's lanes begin with."""
    return f"{execution}-fork"


async def snapshot(trunk: Workspace) -> str | None:
    """Keep the trunk's files for the lanes; None where that cannot be."""
    name = snapshot_of(trunk.dispatch.execution)
    try:
        await trunk.sandboxes.snapshot(trunk.ref(), name)
    except (SandboxLostError, InvalidCommandError) as error:
        log.warning("%s: no snapshot, its lanes are made from its log: %s", trunk.dispatch.execution, error)
        return None
    return name


@dataclass(frozen=True)
class Lanes:
    trunk: Workspace
    client: ChatClient
    budget: TimeBudget

    def left(self, state: Episode) -> list[Workspace]:
        """Those without a verdict."""
        return [
            dataclasses.replace(
                self.trunk, lane=lane, history=self.trunk.history.line(lane), opened=state.lanes[lane], _remade=0
            )
            for lane, verdict in enumerate(state.verdicts)
            if verdict is None
        ]

    async def run(self, state: Episode) -> list[Verified]:
        """Bring every lane to its end; the verdicts, stored."""
        lanes = self.left(state)
        ends: dict[int | None, AgentEnded] = {}
        async with contextlib.AsyncExitStack() as leases:
            async with asyncio.TaskGroup() as tasks:
                opening = {lane.lane: tasks.create_task(self._open(lane, state)) for lane in lanes}
            for lane in lanes:
                lost = opening[lane.lane].result()
                if lost is not None:
                    ends[lane.lane] = lost
                else:
                    await leases.enter_async_context(lane.kept())
            await self._act([lane for lane in lanes if lane.lane not in ends], ends)
            async with asyncio.TaskGroup() as tasks:
                verdicts = [tasks.create_task(lane.graded(ends[lane.lane])) for lane in lanes]
        return [verdict.result() for verdict in verdicts]

    async def _open(self, lane: Workspace, state: Episode) -> AgentEnded | None:
        """Give a lane its sandbox; the lane's end, where it cannot have one."""
        if lane.opened is not None:
            return await lane.find_again() if lane.journal.attempt else None
        try:
            if lane.lane == 0 and state.sandbox is not None:
                await lane.take(self.trunk.ref())
                return await lane.find_again()
            assert state.forked is not None
            assert state.sandbox is not None
            if state.forked.snapshot is None or not await self._fork(lane, state.forked.snapshot, state.sandbox.node):
                await lane.make_again()
        except SandboxLostError as error:
            return AgentEnded("infra", str(error))
        return None

    async def _fork(self, lane: Workspace, snapshot: str, node: str) -> bool:
        # A writer before us may have made one that is in no log: its lease ends it.
        name = f"{lane.name}-f{lane.journal.attempt}"
        try:
            ref = await lane.sandboxes.fork(snapshot, node, lane.dispatch, lane.replica, name)
        except (SandboxLostError, InvalidCommandError) as error:
            log.warning("%s: not forked, made from the log instead: %s", lane.name, error)
            return False
        await lane.take(ref)
        return True

    async def _act(self, lanes: Sequence[Workspace], ends: dict[int | None, AgentEnded]) -> None:
        async def act(lane: Workspace) -> None:
            async def run_command(turn: int, command: str) -> str:
                return await lane.run_command(turn, command, self.budget)

            client = dataclasses.replace(self.client, lane=lane.lane)
            agent = ShellAgent(lane.dispatch, client, run_command, lane.steps(), lane.lane)
            try:
                end = await agent.run()
            except SandboxLostError as error:
                end = AgentEnded("infra", str(error))
            assert isinstance(end, AgentEnded), end
            ends[lane.lane] = end

        with contextlib.suppress(BudgetSpentError):
            async with self.budget.limit(), asyncio.TaskGroup() as tasks:
                for lane in lanes:
                    tasks.create_task(act(lane))
        for lane in lanes:
            ends.setdefault(lane.lane, AgentEnded("time_budget"))
