"""Training one run: from its last checkpoint, update after update.

The order is what makes it exactly once: the checkpoint's rename is the commit; then its events are told; then messages
of which nothing is left are acknowledged; only then the next update opens. What a crash interrupts is told again from
the checkpoint, and what is delivered again is known by the checkpoint's frontier.

Awaits: an update is woken by its last contribution (`Desk.whole`), by a message from the queue, or by `leave`, which is
looked at while an update collects and never during a commit; torch work by its own thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.group import GroupReady
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.update import Contributed, HandOver, HandOverReply, PullReply, PullRequest
from opengyre.shared.blobs import BlobMissingError
from opengyre.shared.bus import Bucket, ConflictError, Delivery, View, read
from opengyre.shared.lifecycle import Context
from opengyre.trainer import figures
from opengyre.trainer.announce import announce
from opengyre.trainer.books import Held, next_record, parts_of, refusal, scale, staleness
from opengyre.trainer.desk import Desk
from opengyre.trainer.filling import arrivals, burst_left, open_for, stale
from opengyre.trainer.frontier import Frontier
from opengyre.trainer.intake import Intake
from opengyre.trainer.learner import Total
from opengyre.trainer.mending import mend_refused
from opengyre.trainer.state import State, open_state
from opengyre.trainer.stock import Stock
from opengyre.trainer.store import Record
from opengyre.trainer.update import Cell, Phase, Stored, Ticked, Update, Worked

log = logging.getLogger("gyre.trainer")

TICK_S: Final = 0.25
NO_CELL_S: Final = 1.0
"""After so long without a sign of any cell, what we wait for is one."""

T = TypeVar("T")


class RunTrainer:
    """Leads the updates of `spec`, which may be replaced while it goes on. `leave` is set when it is to end."""

    def __init__(self, context: Context, spec: RunSpec, attempt: str, intake: Intake, hosts: View[HostStatus]) -> None:
        self._context = context
        self.spec = spec
        self._attempt = attempt
        self._intake = intake
        self._hosts = hosts
        self._heard: dict[str, int] = {}
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._outbox: asyncio.Queue[tuple[str, Event]] = asyncio.Queue()
        self._desk: Desk | None = None
        self._state: State
        self._frontier = Frontier()
        self._dropped: dict[str, int] = {}
        """Executions that left training since the last commit, each with the size of its group."""
        self._offered: set[str] = set()
        """Gradients that were handed over since the last commit, taken or refused: files that nobody else removes."""
        self._alarm = figures.Alarm(context.waits)
        self.leave = asyncio.Event()

    @property
    def record(self) -> Record:
        return self._state.record

    async def run(self) -> None:
        """Train until the run is finished, or `leave`.

        Raises `ModelDirectoryError`, `CheckpointError`, `NegativeStalenessError`, `CommittedElsewhereError` (in a
        group).
        """
        try:
            self._state = await self._off_loop(open_state, self._context, self.spec)
            self._frontier = Frontier(self.record.frontier, self.record.partial)
            bus = self._context.bus
            older = await self._off_loop(self._state.published)
            await announce(bus, self.record, self._state.manifest, again=True, published=older)
            await self._forget(self.record.blobs)
            await self._forget_gradients()
            self._context.missing = None
            self._show()
            async with asyncio.TaskGroup() as tasks:
                posting = tasks.create_task(self._post())
                mending = tasks.create_task(mend_refused(bus, self.spec.run, self.record.published, self._mend))
                async with Stock() as stock:
                    while not (self.leave.is_set() or self.record.finished):
                        await self._one_update(stock)
                await self._outbox.join()
                posting.cancel()
                mending.cancel()
            if self.record.finished:
                await self._mark_finished()
        finally:
            self._desk = None
            self._alarm.show(None)
            self._torch.shutdown(wait=False)

    async def pull(self, request: PullRequest) -> PullReply:
        """Answer a cell that asks for work."""
        if self._desk is None:
            return PullReply(discard=True) if request.holding else PullReply(wait="the next update")
        return await self._desk.pull(request)

    async def hand_over(self, request: HandOver) -> HandOverReply:
        """Take a cell's gradient, once it is seen to be one."""
        if request.executions:
            self._offered.add(request.gradient)
        if self._desk is None:
            return HandOverReply(accepted=not request.executions, reason="no update is open")
        return await self._desk.hand_over(request)

    async def _one_update(self, stock: Stock) -> None:
        number = self.record.version + 1
        loop = asyncio.get_running_loop()
        opened = loop.time()
        dispatch = self.spec.dispatch
        grain = self.spec.elastic.grain or dispatch.group_size
        cells = sum(status.state is HostState.TRAIN for status in self._hosts.values.values())
        update = Update(
            number=number, attempt=self._attempt, size=dispatch.update_executions, grain=grain, cells=max(1, cells)
        )
        desk = self._desk = Desk(self.spec, update, self._state, stock.held, self._tell, self._context.blobs)
        if not await self._collect(desk, stock):
            self._desk = None
            await self._forget_offered()
            return
        with self._context.waits.on(f"the commit of update {number}"):
            await self._outbox.join()
            await self._commit(desk, stock, opened)
            await announce(self._context.bus, self.record, self._state.manifest, again=False)
            stock.settle(desk.update.units)
            await stock.acknowledge()
        desk.advance(Stored())
        # A gradient of the next update may be the same bytes, so these are forgotten before it opens.
        await self._forget(self.record.blobs)
        await self._forget_offered()
        self._show()
        await self._off_loop(self._state.prune)

    async def _collect(self, desk: Desk, stock: Stock) -> bool:
        """Take executions and contributions until all are there; False if we are to leave before."""
        ends = [asyncio.create_task(desk.whole.wait()), asyncio.create_task(self.leave.wait())]
        work = [asyncio.create_task(self._take(desk, stock)), asyncio.create_task(self._watch_cells(desk))]
        pending = {*ends, *work}
        try:
            while not (desk.whole.is_set() or self.leave.is_set()):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (*ends, *work):
                task.cancel()
            await asyncio.wait([*ends, *work], timeout=5)
        return desk.whole.is_set()

    async def _take(self, desk: Desk, stock: Stock) -> None:
        """Fill the update from the stock, and the stock from the queue."""
        await self._fill(desk, stock)
        while desk.update.phase is Phase.COLLECTING and len(desk.update.units) < desk.update.size:
            with self._context.waits.on(self._lacking(desk, stock)):
                pending, entered = stock.pending.copy(), len(desk.update.units)
                while stock.pending == pending and len(desk.update.units) == entered:
                    taken = await self._intake.take()
                    if taken is not None:
                        async with taken[0].back_if_cancelled():
                            await self._receive(stock, *taken)
                    # The setting may have changed meanwhile.
                    await self._fill(desk, stock)

    def _lacking(self, desk: Desk, stock: Stock) -> str:
        update = desk.update
        if open_for(self.spec, self.record, stock.pending, update):
            return f"executions: {len(update.units)} of {update.size} of update {update.number}"
        there, wanted = sum(map(len, stock.pending.values())), burst_left(self.spec, self.record)
        return f"executions: {there} of {wanted} of the burst that begins with update {update.number}"

    async def _fill(self, desk: Desk, stock: Stock) -> None:
        await self._drop_stale(desk, stock)
        if not open_for(self.spec, self.record, stock.pending, desk.update):
            return
        for key, executions in arrivals(stock.pending, desk.update):
            desk.arrive(key, executions)
        self._context.gauges["update_executions"] = len(desk.update.units)

    async def _drop_stale(self, desk: Desk, stock: Stock) -> None:
        """What did not enter an update in time to keep `d_max` leaves training."""
        for key, executions in list(stock.pending.items()):
            held = stock.held[key]
            late = tuple(execution for execution in executions if execution not in desk.update.source)
            if late and stale(self.spec, self.record, held.ready.version):
                await self._drop(held, late, "stale")
                ending = stock.ending(late)
                stock.settle(late)
                await stock.acknowledge()
                for done in ending:
                    await self._intake.forget(done.ready)

    async def _drop(self, held: Held, executions: tuple[str, ...], reason: str) -> None:
        await self._intake.drop(held.ready, executions, reason, self.record.version)
        self._dropped.update(dict.fromkeys(executions, held.group_size))

    async def _receive(self, stock: Stock, delivery: Delivery, ready: GroupReady) -> None:
        if ready.run != self.spec.run:
            await self._intake.settle(delivery, ready)
            return
        if ready.executions and not self._left(ready.executions):
            await self._done_with(stock, delivery, ready)
            return
        staleness(ready, self.record.version)
        learner = self._state.learner
        held = await self._intake.check(
            ready, vocabulary=learner.vocabulary, context=learner.context, version=self.record.version
        )
        if isinstance(held, str):
            log.error("group %s cannot be trained: %s", ready.group, held)
            broken = Held(ready, ready.members)
            left = self._left(broken.executions)
            if left or not broken.executions:
                await self._drop(broken, left, "invalid_group")
            await delivery.reject(held)
        elif left := self._left(held.executions):
            await stock.keep(delivery, held, left)
        else:
            await self._done_with(stock, delivery, ready)

    def _left(self, executions: tuple[str, ...]) -> tuple[str, ...]:
        """Those that were neither consumed nor dropped."""
        return tuple(name for name in executions if name not in self._frontier and name not in self._dropped)

    async def _done_with(self, stock: Stock, delivery: Delivery, ready: GroupReady) -> None:
        """A message that came again, and of which nothing is left to train."""
        await delivery.ack()
        if ready.event_id() not in stock.held:
            await self._intake.forget(ready)

    async def _watch_cells(self, desk: Desk) -> None:
        """Give up silent cells; say when it is a cell that we wait for."""
        shown: contextlib.ExitStack | None = None
        try:
            while True:
                before = asyncio.get_running_loop().time()
                await asyncio.sleep(TICK_S)
                now = asyncio.get_running_loop().time()
                self._hear(desk, now)
                timeout_s = self._context.settings.trainer.cell_timeout_s
                # Who was itself away for long has not read what cells said meanwhile: not before the next look.
                if now - before < TICK_S + timeout_s / 2:
                    desk.advance(Ticked(now, timeout_s))
                heard = max(desk.update.seen.values(), default=float("-inf"))
                lacking = bool(desk.update.waiting) and now - heard > NO_CELL_S
                if lacking and shown is None:
                    shown = contextlib.ExitStack()
                    shown.enter_context(self._context.waits.on("a cell in the TRAIN role"))
                elif not lacking and shown is not None:
                    shown.close()
                    shown = None
        finally:
            if shown is not None:
                shown.close()

    def _hear(self, desk: Desk, now: float) -> None:
        """A heartbeat that names a group is a sign of life: a group may take longer than a cell's silence may."""
        for name, status in self._hosts.values.items():
            revision = self._hosts.revisions[name]
            if status.training_group is not None and self._heard.get(name) != revision:
                self._heard[name] = revision
                desk.advance(Worked(Cell(status.host, status.boot), status.training_group, now))

    async def _commit(self, desk: Desk, stock: Stock, opened: float) -> None:
        update, learner = desk.update, self._state.learner
        total = Total()
        for name in sorted(update.contributions):
            path = await self._context.blobs.file(update.contributions[name].gradient)
            await self._off_loop(learner.add, total, name, path)
        elapsed = round(asyncio.get_running_loop().time() - opened, 3)
        blobs = [held.ready.blob for held in stock.ending(update.units) if held.ready.blob is not None]
        spec = self.spec

        def decide() -> None:
            factor = scale(spec, parts_of(update, stock.held))
            stepped = learner.step(total, factor, update=update.number, updates=spec.updates, refused=refusal(update))
            record = next_record(
                self.record, spec, update, stock.held, stepped, total.broken,
                dropped=self._dropped, blobs=blobs, opened_s=elapsed,
            )  # fmt: skip
            self._state.commit(record)

        await self._off_loop(decide)
        self._dropped.clear()
        self._frontier = Frontier(self.record.frontier, self.record.partial)
        committed = self.record.committed
        assert committed is not None
        if committed.skipped is not None:
            log.error("update %d did not step: %s", update.number, committed.skipped)
        if committed.alarm is not None:
            log.warning("update %d: %s", update.number, committed.alarm)
        self._context.gauges.update(figures.commit(committed))
        log.info("committed version %d: score %.3f", committed.version, committed.score)

    async def _mend(self, version: int) -> list[str]:
        return await self._off_loop(self._state.mend, version)

    async def _forget(self, blobs: Iterable[str]) -> None:
        for blob in blobs:
            await self._context.blobs.discard(blob)

    async def _forget_offered(self) -> None:
        """Nothing of what was handed over is needed any more: what was refused neither, and what came once more after
        the commit. Only while no update is open, for the same bytes may be handed over for that."""
        while self._offered:
            with contextlib.suppress(BlobMissingError):  # what is no reference is refused, and names no file
                await self._context.blobs.discard(self._offered.pop())

    async def _forget_gradients(self) -> None:
        """Gradients of an attempt that was interrupted: nobody will add them up."""
        bus, run = self._context.bus, self.spec.run
        last = await bus.last(subjects.update(run, "committed"), subjects.UPDATES)
        start = last.sequence if last is not None else 1
        for stored in await read(bus, subjects.UPDATES, subjects.update(run, "contributed"), start):
            event = stored.readable()
            if isinstance(event, Contributed) and event.update > self.record.version:
                await self._forget((event.gradient,))

    async def _mark_finished(self) -> None:
        runs = Bucket(self._context.bus, subjects.KV_RUNS, RunSpec)
        found = await runs.get(self.spec.run)
        if found is not None and found[0].state == "active":
            with contextlib.suppress(ConflictError):  # Looked at again as long as it is active.
                await runs.update(self.spec.run, msgspec.structs.replace(found[0], state="finished"), found[1])

    def _tell(self, name: str, event: Event) -> None:
        self._outbox.put_nowait((subjects.update(self.spec.run, name), event))

    async def _post(self) -> None:
        while True:
            subject, event = await self._outbox.get()
            await self._context.bus.publish(subject, event)
            self._outbox.task_done()

    def _show(self) -> None:
        record = self.record
        self._context.gauges.update(
            trainer_version=record.version, published_version=record.published, update_executions=0
        )
        figures.VERSION.labels(self.spec.run).set(record.version)
        self._alarm.show(record.committed.alarm if record.committed is not None else None)

    async def _off_loop(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, function, *arguments)
