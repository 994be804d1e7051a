"""One term of the leader: it loads the ledger, follows the active run's log, admits groups and switches cells.

States: loading -> leading -> over (`DeposedError`, a stop, or a fault). One loop does everything in turn: take what
the log said, write the entries that changed, admit, decide roles. So a decision sees whole states only, and the
ledger has one writer. Only a wish of an operator is written beside it, under `_switching`.

Invariants: admission and commands are compare-and-set (see `records`, `levels`), so that a leader that was replaced
without knowing it is stopped at its first write; everything in memory can be made again from KV and the log.

Awaits: the loop is woken by an event of the run, a change of a host or of a run, or `tick_s`; followers by the broker.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from statistics import fmean

from opengyre.allocator import figures
from opengyre.allocator.cells import Cell, Clocks, gather
from opengyre.allocator.choose import current
from opengyre.allocator.deadlines import Deadlines
from opengyre.allocator.errors import DeposedError
from opengyre.allocator.feed import Feed
from opengyre.allocator.levels import Levels, Snapshot
from opengyre.allocator.records import Decisions, Records
from opengyre.allocator.standing import Standing
from opengyre.elastic.policy import decide, suspends
from opengyre.elastic.progress import Progress
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.decision import GroupEntry, PolicyInput, RoleChange
from opengyre.proto.host import DesiredRole, HostStatus
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.task import GroupOverdue
from opengyre.shared.bus import View
from opengyre.shared.lifecycle import Context

log = logging.getLogger("gyre.allocator")

MOST_AT_ONCE = 64
"""Groups of one admission; the rest follow in the next turn of the loop, after what was said meanwhile."""
MOST_EVENTS = 1024


class Term:
    """Made with the lease's fencing token; `leading` is the way in."""

    def __init__(
        self, context: Context, token: int, hosts: View[HostStatus], desired: View[DesiredRole], runs: View[RunSpec]
    ) -> None:
        self._context = context
        self._hosts = hosts
        self._runs = runs
        self.decisions = Decisions(context.bus, token)
        self._records = Records(context.bus, self.decisions)
        self._levels = Levels(context.bus, desired)
        self._clocks = Clocks()
        self._seen: dict[str, str] = {}
        """Host -> cell, of all that had a heartbeat in this term."""
        self._refused: set[str] = set()
        """Why cells are refused, as far as it was told."""
        self._waiting = Standing(context.waits)
        self._wake = asyncio.Event()
        self._switching = asyncio.Lock()
        self.entries: dict[str, list[GroupEntry]] = {}
        """Of the runs that are not led, as they were when the term began."""
        self.progress: Progress | None = None

    @property
    def runs(self) -> dict[str, RunSpec]:
        return self._runs.values

    def cells(self) -> dict[str, Cell]:
        return self._look()[0]

    def _look(self) -> tuple[dict[str, Cell], Snapshot]:
        """The cells as they are, and the levels that they were made of."""
        seen = self._levels.current()
        self._seen.update({host: status.cell for host, status in self._hosts.values.items()})
        spec = current(self._runs.values, self._runs.revisions)
        cells = gather(self._hosts.values, {host: level for host, (level, _) in seen.items()}, self._seen, spec)
        self._tell_refused({cell.refused for cell in cells.values() if cell.refused is not None})
        return cells, seen

    def _tell_refused(self, refused: set[str]) -> None:
        for why in sorted(refused - self._refused):
            log.warning("%s", why)
        self._refused = refused

    async def load(self) -> None:
        """Read the ledger and finish what a former leader left half told."""
        self.entries = await self._records.load()
        await self._levels.finish()

    async def run(self) -> None:
        """Lead until the service stops. Raises `DeposedError`, `LawBrokenError`, `BusError`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._watch(view)) for view in (self._hosts, self._runs)]
                while not self._context.stopping.is_set():
                    spec = current(self._runs.values, self._runs.revisions)
                    if spec is None:
                        await self._lead_nothing()
                    else:
                        async with self._following(spec) as (progress, feed):
                            await self._lead(progress, feed)
                for watcher in watchers:
                    watcher.cancel()
        finally:
            self._waiting.close()

    async def _watch(self, view: "View[HostStatus] | View[RunSpec]") -> None:
        while True:
            if await view.changed(10):
                self._wake.set()

    async def _rest(self) -> None:
        """Until something changes, a tick at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.allocator.tick_s):
                await self._wake.wait()
        self._wake.clear()

    async def _lead_nothing(self) -> None:
        self._waiting.say("a run")
        self._context.missing = None
        await self._decide_roles(None)
        await self._rest()

    @contextlib.asynccontextmanager
    async def _following(self, spec: RunSpec) -> AsyncIterator[tuple[Progress, Feed]]:
        """Read a run's log and follow it for as long as the block lasts."""
        feed = Feed(self._context.bus, spec.run)
        progress = Progress(spec, self.entries.get(spec.run, ()))
        self._waiting.say(f"the log of run {spec.run} to be read")
        await self._take(progress, await feed.history(progress.ledger.unfinished()))
        await self._records.finish(progress)
        self.progress = progress
        self._context.missing = None
        log.info("leading run %s: %d groups, version %d", spec.run, len(progress.ledger), progress.published)
        try:
            async with asyncio.TaskGroup() as tasks:
                followers = [tasks.create_task(self._follow(feed, stream)) for stream in feed.streams]
                yield progress, feed
                for follower in followers:
                    follower.cancel()
        finally:
            self.progress = None
            self.entries[spec.run] = list(progress.ledger)

    async def _follow(self, feed: Feed, stream: str) -> None:
        async for event in feed.follow(stream):
            await feed.queue.put(event)
            self._wake.set()

    async def _lead(self, progress: Progress, feed: Feed) -> None:
        """Until another run is to be led or the service stops."""
        deadlines = Deadlines()
        while not self._context.stopping.is_set():
            spec = current(self._runs.values, self._runs.revisions)
            if spec is None or spec.run != progress.spec.run:
                return
            progress.spec = spec
            await self._take(progress, _drained(feed.queue))
            await self._call_time(progress, deadlines)
            await self._admit(progress)
            await self._decide_roles(progress)
            figures.show(self._context, progress, self.cells())
            self._waiting.say(progress.waits_for())
            if feed.queue.empty():
                await self._rest()

    async def _take(self, progress: Progress, events: list[Event]) -> None:
        """Apply events and write the entries that they changed."""
        changed: dict[str, GroupEntry] = {}
        for event in events:
            try:
                entry = progress.apply(event)
            except LookupError as error:
                await self._check_unknown(str(error.args[0]), event)
                continue
            if entry is not None:
                changed[entry.group] = entry
        await self._records.persist(changed.values())

    async def _check_unknown(self, group: str, event: Event) -> None:
        """A group that we do not know may have been made since we loaded, by a leader that was on its way out."""
        if await self._records.exists(group):
            raise DeposedError(f"group {group} was made by another while we led")
        log.warning("%s speaks of group %s, which is not in the ledger", type(event).__name__, group)

    async def _call_time(self, progress: Progress, deadlines: Deadlines) -> None:
        """Say of which groups the deadline has passed."""
        now = asyncio.get_running_loop().time()
        limit = progress.spec.dispatch.deadline_s
        for entry in deadlines.due(progress.ledger.live(), limit, now) if limit is not None else ():
            log.info("group %s has been live for %g s: it is to close", entry.group, limit)
            overdue = GroupOverdue(run=entry.run, task=entry.task, group=entry.group)
            await self._context.bus.publish(subjects.task(entry.run, entry.task, "overdue"), overdue)

    async def _admit(self, progress: Progress) -> None:
        spec, queue = progress.spec, progress.queue
        if progress.published < 0 or spec.state == "stopped":
            return
        tasks = queue.take("evaluate", MOST_AT_ONCE, progress.published)
        tasks += queue.take("train", min(progress.room, MOST_AT_ONCE))
        if tasks:
            await self._records.admit(progress, tasks, MOST_AT_ONCE)
            self._wake.set()

    async def _decide_roles(self, progress: Progress | None) -> None:
        async with self._switching:
            cells, seen = self._look()
            now = asyncio.get_running_loop().time()
            views = self._clocks.views(cells, now)
            if progress is None:
                given = PolicyInput(
                    cells=views, live_executions=0, ready_groups=0, dispatch=Dispatch(), elastic=Elastic()
                )
            else:
                progress.demand.observe(views, progress.begun_executions, now, _switch_s(cells) or 0.0)
                given = progress.policy_input(views, _switch_s(cells))
            began = time.perf_counter()
            changes = decide(given)
            took_s = round(time.perf_counter() - began, 6)
            if changes:
                run = progress.spec.run if progress else "none"
                decision = await self.decisions.publish(
                    run, "roles", input=given, changes=changes, suspends=suspends(given, changes), took_s=took_s
                )
                for change in changes:
                    cell = cells[change.cell]
                    log.info("cell %s to %s: %s", change.cell, change.role, change.reason)
                    await self._levels.command(seen, cell, change.role, change.reason, decision, cell.wish)
            await self._mend(cells, seen, {change.cell for change in changes})

    async def _mend(self, cells: dict[str, Cell], seen: Snapshot, changed: set[str]) -> None:
        """Give a command again of which not every host of a cell was told."""
        for cell in cells.values():
            if cell.torn and cell.role is not None and cell.name not in changed:
                await self._levels.command(seen, cell, cell.role, "as its cell", None, cell.wish)

    async def wish(self, name: str, wish: str) -> Cell:
        """Obey an operator; return the cell as it is. Raises `LookupError` for a cell that nobody knows."""
        async with self._switching:
            cells, seen = self._look()
            cell = cells.get(name)
            if cell is None:
                raise LookupError(name)
            role, wanted = {
                "drain": ("train", "train"),
                "cordon": ("cordoned", "cordoned"),
                "resume": ("rollout", None),
            }[wish]
            if cell.wish != wanted or cell.role != role:
                run = self.progress.spec.run if self.progress else "none"
                reason = f"an operator's wish: {wish}"
                change = RoleChange(cell=name, role=role, reason=reason)
                decision = await self.decisions.publish(
                    run, "wish", wish=wish, changes=(change,), note=reason, suspends=self._suspends(cells, change)
                )
                await self._levels.command(seen, cell, role, reason, decision, wanted)
                self._wake.set()
            return cell

    def _suspends(self, cells: dict[str, Cell], change: RoleChange) -> bool:
        """Whether an operator's wish takes the last cell from the rollout role while executions are live."""
        if self.progress is None:
            return False
        views = self._clocks.views(cells, asyncio.get_running_loop().time())
        return suspends(self.progress.policy_input(views, _switch_s(cells)), (change,))


def _switch_s(cells: dict[str, Cell]) -> float | None:
    """Mean of the hosts' last switches; None before the first."""
    measured = [s.last_switch_s for cell in cells.values() for s in cell.present if s.last_switch_s is not None]
    return fmean(measured) if measured else None


def _drained(queue: asyncio.Queue[Event]) -> list[Event]:
    events: list[Event] = []
    while len(events) < MOST_EVENTS and not queue.empty():
        events.append(queue.get_nowait())
    return events
