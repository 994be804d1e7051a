"""The writer's end of an execution's log: the log is its lock.

Invariants:
- Events are appended one after the other, each under the sequence of the one before it. A writer that was replaced is
  refused, `fenced` is set, and nothing more of it is stored.
- An append that has begun is finished, also when who asked for it is cancelled: its outcome decides what comes next,
  and `claim` has what was stored for nobody.
- Ids that are too large for a message are a blob on disk before their event is stored; who appends and who loads has
  them in the event.
- While the broker does not answer, the same append is repeated under the same id; nothing is lost and nothing twice.

Awaits: `append` is woken by the broker's acknowledgement; `settled` by the end of an append under way.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from opengyre.proto import codec, subjects
from opengyre.proto.base import Event, tag_of
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import AnyTrajEvent, Call, Started, TakenOver
from opengyre.shared.blobs import Blobs
from opengyre.shared.bulk import fill, pack
from opengyre.shared.bus import Bus, BusUnavailableError, FencedError, Stored, read
from opengyre.shared.waits import Waits

log = logging.getLogger("gyre.rollout.journal")

E = TypeVar("E", bound=AnyTrajEvent)


def without_lost(events: list[AnyTrajEvent]) -> list[AnyTrajEvent]:
    """The log, where the ids of calls whose blob is missing, and of what goes on from them, are no history that a
    prompt is made from: what they said is written anew from its text."""
    lost: set[str] = set()
    found: list[AnyTrajEvent] = []
    for event in events:
        if isinstance(event, Call) and (event.bulk is not None or event.parent in lost):
            lost.add(event.call)
            found.append(msgspec.structs.replace(event, history_digest=""))
        else:
            found.append(event)
    return found


def _event(message: Stored, *, readable: bool) -> Event | None:
    try:
        return message.event()
    except codec.UndecodableError:
        if readable:
            return None
        raise


class Journal:
    """Appends to one execution's log. Its order of use: `load`, `begin`, then the rest."""

    def __init__(self, bus: Bus, waits: Waits, dispatch: EpisodeDispatch, blobs: Blobs) -> None:
        self._bus = bus
        self._blobs = blobs
        self._waits = waits
        self._dispatch = dispatch
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._unclaimed: list[AnyTrajEvent] = []
        self.scope = subjects.traj(dispatch.run, dispatch.group, dispatch.execution, ">")
        self.last = 0
        """Sequence of the log's last event."""
        self.length = 0
        self.attempt = 0
        self.step: int | None = None
        """Of what is appended."""
        self.fenced = asyncio.Event()

    async def load(self, *, readable: bool = False) -> list[AnyTrajEvent]:
        """All events of the log, in order; empty if there is none. `readable`: only those that can be decoded, where
        one that cannot is an `UndecodableError` else."""
        last = await self._bus.last(self.scope, subjects.TRAJ)
        if last is None:
            return []
        stored = await read(self._bus, subjects.TRAJ, self.scope)
        events = [event for message in stored if (event := _event(message, readable=readable)) is not None]
        if not stored or stored[-1].sequence < last.sequence:
            raise BusUnavailableError(f"{self.scope}: the log could not be read to its end")
        self.last = stored[-1].sequence
        self.length = len(stored)
        trajectory = [event for event in events if isinstance(event, AnyTrajEvent)]
        self.attempt = max((event.attempt for event in trajectory), default=0)
        return without_lost(await fill(self._blobs.get, trajectory))

    async def begin(self, replica: str, vocabulary: int | None = None) -> AnyTrajEvent:
        """Become the writer, after `load`: the event that begins our attempt. Raises `FencedError`."""
        if self.length:
            self.attempt += 1
            return await self.append(TakenOver, replica=replica)
        return await self.append(Started, dispatch=self._dispatch, replica=replica, vocabulary=vocabulary)

    async def append(self, kind: Callable[..., E], **fields: object) -> E:
        """Store an event of `kind`; identity and place in the log are filled in. Raises `FencedError`."""
        done: asyncio.Future[E] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._append(kind, fields, done))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if done.done():
                self._keep(done)
            else:
                done.add_done_callback(self._keep)
            raise

    def _keep(self, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._unclaimed.append(done.result())

    def claim(self) -> list[AnyTrajEvent]:
        """Events that were stored after who asked for them was cancelled; each is given once. After `settled`."""
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed

    async def _append(self, kind: Callable[..., E], fields: dict[str, object], done: "asyncio.Future[E]") -> None:
        try:
            async with self._lock:
                done.set_result(await self._store(kind, fields))
        except FencedError as error:
            self.fenced.set()
            done.set_exception(error)
        except BaseException as error:
            if not done.done():
                done.set_exception(error)
            raise
        finally:
            if done.done() and not done.cancelled():
                done.exception()

    async def _store(self, kind: Callable[..., E], fields: dict[str, object]) -> E:
        if self.fenced.is_set():
            raise FencedError(f"{self.scope}: another writer appended first")
        event = kind(
            run=self._dispatch.run,
            group=self._dispatch.group,
            execution=self._dispatch.execution,
            index=self.length,
            attempt=self.attempt,
            step=self.step,
            **fields,
        )
        subject = self.scope[:-1] + tag_of(event).split(".")[1]
        stored = await pack(self._blobs, event) if isinstance(event, Call) else event
        while True:
            try:
                self.last = await self._bus.append(subject, stored, scope=self.scope, last=self.last)
            except BusUnavailableError as error:
                log.warning("%s: %s; trying on", self._dispatch.execution, error)
                with self._waits.on("the broker to store an event of an episode", 1.0):
                    await asyncio.sleep(0.2)
                continue
            self.length += 1
            return event

    async def confirm(self) -> None:
        """Make sure that we are still the writer, before an effect that is not an append. Raises `FencedError`."""
        async with self._lock:
            last = await self._bus.last(self.scope, subjects.TRAJ)
            if self.fenced.is_set() or last is None or last.sequence != self.last:
                self.fenced.set()
                raise FencedError(f"{self.scope}: another writer appended first")

    async def settled(self) -> None:
        """Wait for appends under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)
