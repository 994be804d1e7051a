"""The trainer: one replica leads (a lease), and trains the active run.

States: standing by -> leading, with a run or without. A leader that loses its lease stops at once: should it commit
nevertheless, the checkpoint's name decides who was first.

Awaits: the lease by its time to live; a change of the runs by their mirror; the run's own waits (`run`).
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.routing import BaseRoute

from opengyre.proto import subjects
from opengyre.proto.host import HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.update import HandOver, HandOverReply, PullReply, PullRequest
from opengyre.shared.bus import Bucket, Endpoint, Lease, LeaseOwner, View, pulling, serving
from opengyre.shared.lifecycle import Context
from opengyre.tiny.config import ModelDirectoryError
from opengyre.trainer.books import NegativeStalenessError
from opengyre.trainer.intake import Intake
from opengyre.trainer.run import RunTrainer
from opengyre.trainer.state import store_of
from opengyre.trainer.store import CheckpointError, CommittedElsewhereError, Record

log = logging.getLogger("gyre.trainer")

LEASE_S: Final = 4
LOOK_S: Final = 1.0
WATCH_S: Final = 0.25
FILES_S: Final = 5.0
"""How long until an unusable model directory or checkpoint is looked at again."""


def active_run(runs: Mapping[str, RunSpec], revisions: Mapping[str, int]) -> RunSpec | None:
    """The run to train: the active one; of several, the one that has been so longest."""
    names = [name for name, spec in runs.items() if spec.state == "active"]
    return runs[min(names, key=lambda name: revisions[name])] if names else None


class Trainer:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._current: RunTrainer | None = None
        self._attempts = itertools.count()

    def routes(self) -> Sequence[BaseRoute]:
        return ()

    async def run(self) -> None:
        """Lead whenever the lease is ours, until the service stops."""
        context = self._context
        leases = Bucket(context.bus, subjects.KV_LEASES, LeaseOwner)
        lease = Lease(leases, "leader.trainer", context.replica, LEASE_S)
        async with (
            Bucket(context.bus, subjects.KV_RUNS, RunSpec).view() as runs,
            Bucket(context.bus, subjects.KV_HOSTS, HostStatus).view() as hosts,
        ):
            while not context.stopping.is_set():
                if not await lease.acquire():
                    context.missing = None
                    with context.waits.on("the lease of the trainer that leads", LEASE_S):
                        await context.pause(0.5)
                    continue
                try:
                    await self._lead(lease, runs, hosts)
                finally:
                    await lease.release()

    async def _lead(self, lease: Lease, runs: View[RunSpec], hosts: View[HostStatus]) -> None:
        endpoints = {"pull": Endpoint(PullRequest, self._pull), "hand_over": Endpoint(HandOver, self._hand_over)}
        async with (
            pulling(self._context.bus, *subjects.TRAINER_GROUPS) as puller,
            serving(self._context.bus, "trainer", "any", endpoints, "OpenGyre trainer"),
        ):
            intake = Intake(self._context.bus, self._context.blobs, puller, self._last_commit)
            keeping = asyncio.create_task(self._keep(lease))
            training = asyncio.create_task(self._train_runs(intake, runs, hosts))
            try:
                done, _ = await asyncio.wait([keeping, training], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self._current = None
                keeping.cancel()
                training.cancel()
                await asyncio.wait([keeping, training], timeout=5)

    async def _keep(self, lease: Lease) -> None:
        """Return when the lease is lost."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            if not await lease.renew():
                log.error("the lease of the trainer is lost; standing by")
                return

    async def _train_runs(self, intake: Intake, runs: View[RunSpec], hosts: View[HostStatus]) -> None:
        context = self._context
        while not context.stopping.is_set():
            spec = active_run(runs.values, runs.revisions)
            if spec is None:
                context.missing = None
                with context.waits.on("an active run", looking=True):
                    await self._settle_one(intake)
                continue
            try:
                await self._train(spec, intake, runs, hosts)
            except ModelDirectoryError as error:
                await self._wait_for("a usable model", spec.run, error)
            except CheckpointError as error:
                await self._wait_for("a usable checkpoint", spec.run, error)

    async def _wait_for(self, what: str, run: str, error: Exception) -> None:
        """Files on the disk cannot be used: only a person can mend that, so say it and look again later."""
        context = self._context
        context.missing = str(error)
        log.error("run %s cannot be trained: %s", run, error)
        with context.waits.on(f"{what} for run {run}: {error}", FILES_S, looking=True):
            await context.pause(FILES_S)

    async def _train(self, spec: RunSpec, intake: Intake, runs: View[RunSpec], hosts: View[HostStatus]) -> None:
        """Train `spec` until it is finished, another run is active, or the service stops."""
        # Of each term its own: a process that led before opens the same update anew, and its groups are to be
        # computed again.
        attempt = f"{self._context.replica}-{next(self._attempts)}"
        trainer = RunTrainer(self._context, spec, attempt, intake, hosts)
        self._current = trainer
        training = asyncio.create_task(trainer.run())
        try:
            while not training.done():
                chosen = active_run(runs.values, runs.revisions)
                if chosen is None or chosen.run != spec.run or self._context.stopping.is_set():
                    trainer.leave.set()
                else:
                    trainer.spec = chosen
                await asyncio.wait([training], timeout=WATCH_S)
            training.result()
        except* (CommittedElsewhereError, NegativeStalenessError) as errors:
            for error in errors.exceptions:
                log.critical("run %s cannot be trained on: %s", spec.run, error)
            raise
        finally:
            self._current = None
            training.cancel()
            await asyncio.wait([training], timeout=5)

    async def _settle_one(self, intake: Intake) -> None:
        """No run is trained: groups of ended runs leave training."""
        taken = await intake.take(LOOK_S)
        if taken is not None:
            await intake.settle(*taken)

    async def _last_commit(self, run: str) -> Record | None:
        return await asyncio.to_thread(store_of(self._context, run).latest)

    async def _pull(self, request: PullRequest) -> PullReply:
        if self._current is None:
            return PullReply(discard=True) if request.holding else PullReply(wait="a run that is trained")
        return await self._current.pull(request)

    async def _hand_over(self, request: HandOver) -> HandOverReply:
        if self._current is None:
            return HandOverReply(accepted=not request.executions, reason="no run is trained")
        return await self._current.hand_over(request)
