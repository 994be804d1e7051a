"""The training worker: pulls groups from the trainer, adds their gradients, hands over.

States: empty (holds nothing) -> holding (an accumulator of one attempt of one update) -> handing over (a gradient
blob that the trainer has not answered for yet) -> empty. What a worker loses by a crash the trainer leases again;
what it holds of an attempt that is no more is dropped.

What computes is the learner, which is open as long as the worker is in the TRAIN role. A group that cannot be trained
is left out and named in the waits; the trainer sees that it is not held.

Awaits: the trainer's answer (2 s an attempt); the learner's end of one group; `leave`, or `POLL_S`, where the trainer
has nothing; the blob store.
"""

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from opengyre.host.learners import Accumulator, Learner, LearnerLostError, UntrainableError, members_of
from opengyre.proto import subjects
from opengyre.proto.group import Member
from opengyre.proto.update import HandOver, HandOverReply, PullReply, PullRequest, UpdateStats, WorkItem
from opengyre.proto.weights import WeightsRefused
from opengyre.shared.blobs import BlobMissingError
from opengyre.shared.bus import BusError, RpcFailedError, RpcUnavailableError, call
from opengyre.shared.lifecycle import Context
from opengyre.tiny.config import ModelDirectoryError
from opengyre.weights.manifest import WeightsError

log = logging.getLogger("gyre.host.worker")

POLL_S: Final = 0.1
ANSWER_S: Final = 2.0
ABSENT_S: Final = 0.1
"""How long a pull looks for a trainer where none answers: a worker that is to leave must not wait for it."""
FAULT_S: Final = 1.0
GOODBYE_S: Final = 0.5
"""How long a worker that holds nothing tries to say that it leaves."""
LEAVE_PATIENCE_S: Final = 8.0
"""How long a worker that leaves tries to hand over; then the trainer's own timeout leases its groups again."""
TAKE_S: Final = 5.0
"""How long the trainer may take to look at a gradient that is small."""
TAKEN_PER_S: Final = 16 << 20
"""Bytes of a gradient that it looks at in a second at least, on a machine that is busy."""

UNANSWERED: Final = (RpcFailedError, RpcUnavailableError)
GROUP_FAULTS: Final = (UntrainableError, WeightsError, ModelDirectoryError, BlobMissingError, msgspec.DecodeError)


class Worker:
    def __init__(self, context: Context, host: str, boot: str, learner: Learner) -> None:
        self._context = context
        self._host = host
        self._boot = boot
        self._learner = learner
        self._held: Accumulator | None = None
        self._contributions = 0
        self._joined: tuple[int, str] | None = None
        """The update, and its attempt, whose trainer believes that we work for it."""
        self.group: str | None = None
        """The group at hand."""
        self.update: int | None = None
        """The update it works for."""

    async def train(self, leave: asyncio.Event) -> None:
        """Work until `leave` is set and the group at hand is finished. What is held stays held."""
        self._learner.open()
        while not leave.is_set():
            reply = await self._pull()
            if reply is None or reply.wait is not None:
                what = "the trainer to answer" if reply is None else (reply.wait or "the trainer")
                with self._context.waits.on(what, POLL_S, looking=True):
                    await _until(leave, POLL_S)
                continue
            if reply.discard:
                self._drop("the update that it belongs to is no more")
            if reply.flush:
                await self._hand_over(leaving=False, patience_s=LEAVE_PATIENCE_S)
            if reply.item is not None:
                await self._take(reply.item, leave)

    async def leave(self) -> None:
        """Hand over what is held, and close the learner. What cannot be handed over is dropped."""
        if self._held is not None:
            await self._hand_over(leaving=True, patience_s=LEAVE_PATIENCE_S)
        elif self._joined is not None:
            await self._say_goodbye(*self._joined)
        if self._held is not None:
            self._drop("the trainer did not answer for it while we left")
        self.close()
        # What is told next is that an engine may take the memory.
        await self._learner.ended()

    def close(self) -> None:
        """Close the learner without waiting for the group that it may be at."""
        self.update = self._joined = None
        self._held = None
        self._learner.close()

    async def _pull(self) -> PullReply | None:
        held = self._held
        request = PullRequest(
            host=self._host,
            boot=self._boot,
            update=held.update if held else None,
            attempt=held.attempt if held else None,
            holding=tuple(held.executions) if held else (),
        )
        try:
            return await call(
                self._context.bus, "trainer", "any", "pull", request, PullReply,
                timeout_s=ANSWER_S, patience_s=ABSENT_S,
            )  # fmt: skip
        except UNANSWERED as error:
            log.info("pull: %s", error)
            return None

    async def _take(self, item: WorkItem, leave: asyncio.Event) -> None:
        if self._held is not None:
            if not self._held.belongs(item):
                self._drop(f"the trainer gave work of update {item.update}, attempt {item.attempt}")
            elif item.executions and set(item.executions) <= set(self._held.executions):
                return  # The answer to a pull that was asked twice.
        self.group, self.update = item.group.group, item.update
        self._joined = (item.update, item.attempt)
        try:
            members = await self._members(item)
            if self._held is None:
                self._contributions += 1
            name = f"{self._boot}-{self._contributions}"
            held = await self._learner.add(item, members, self._held, name)
            held.executions.extend(member.execution for member in members)
            self._held = held
        except LearnerLostError as error:
            self._drop(f"it is lost: {error}")
            with self._context.waits.on(f"the learner to start again: {error}", FAULT_S):
                await _until(leave, FAULT_S)
        except GROUP_FAULTS as error:
            log.error("%s cannot be trained: %s", item.group.group, error)  # noqa: TRY400 - a known fault
            if isinstance(error, WeightsError):
                await self._refuse(item, error)
            with self._context.waits.on(f"{item.group.group} to be usable: {error}", FAULT_S):
                await _until(leave, FAULT_S)
        finally:
            self.group = None

    async def _refuse(self, item: WorkItem, error: WeightsError) -> None:
        """Tell which weights cannot be used: the trainer writes again what is damaged, and gives the group again."""
        damaged = {Path(manifest.directory): manifest for manifest in (item.base, item.reference) if manifest}
        manifest = damaged.get(error.file.parent, item.base)
        event = WeightsRefused(
            run=manifest.run, version=manifest.version, host=self._host, boot=self._boot, error=str(error)
        )
        try:
            await self._context.bus.publish(subjects.weights(manifest.run, "refused"), event)
        except BusError as fault:
            log.warning("the refusal could not be told: %s", fault)

    async def _members(self, item: WorkItem) -> tuple[Member, ...]:
        members = item.group.members
        if item.group.blob is not None:
            content = await self._context.blobs.get(item.group.blob)
            members = await asyncio.to_thread(members_of, content)
        return tuple(member for member in members if not item.executions or member.execution in item.executions)

    async def _hand_over(self, *, leaving: bool, patience_s: float) -> None:
        """Until the trainer took or refused it; what nobody answered for is kept."""
        held = self._held
        if held is None:
            return
        # Heartbeats that name a group are signs of life to the trainer: a large gradient takes longer to write and to
        # look at than a cell may be silent.
        self.group = held.groups[-1] if held.groups else None
        try:
            await self._offer(held, leaving=leaving, patience_s=patience_s)
        finally:
            self.group = None

    async def _offer(self, held: Accumulator, *, leaving: bool, patience_s: float) -> None:
        try:
            # Not synced: groups are acknowledged at the commit, so a gradient need not outlive a crash of the machine.
            written = await self._context.blobs.put_by(partial(self._learner.write, held), durable=False)
        except LearnerLostError as error:
            self._drop(f"it is lost: {error}")
            return
        more_s = written.size / TAKEN_PER_S
        request = HandOver(
            host=self._host,
            boot=self._boot,
            update=held.update,
            attempt=held.attempt,
            contribution=held.contribution,
            executions=tuple(held.executions),
            gradient=written.reference,
            stats=held.stats,
            leaving=leaving,
        )
        try:
            with self._context.waits.on("the trainer to take a gradient", patience_s + more_s):
                # Asked again too early it would read all of it once more.
                reply = await call(
                    self._context.bus, "trainer", "any", "hand_over", request, HandOverReply,
                    timeout_s=TAKE_S + more_s, patience_s=patience_s + more_s,
                )  # fmt: skip
        except UNANSWERED as error:
            log.warning("hand over of %s: %s", held.contribution, error)
            return
        if not reply.accepted:
            log.warning("hand over of %s was refused: %s", held.contribution, reply.reason)
        self._held = None

    async def _say_goodbye(self, update: int, attempt: str) -> None:
        """Leave an update that holds nothing of ours; unheard, the trainer gives us up by its own timeout."""
        request = HandOver(
            host=self._host,
            boot=self._boot,
            update=update,
            attempt=attempt,
            contribution=f"{self._boot}-{self._contributions}-left",
            gradient="",
            stats=UpdateStats(),
            leaving=True,
        )
        try:
            await call(
                self._context.bus, "trainer", "any", "hand_over", request, HandOverReply,
                timeout_s=GOODBYE_S, patience_s=GOODBYE_S,
            )  # fmt: skip
        except UNANSWERED as error:
            log.info("leaving update %d: %s", update, error)

    def _drop(self, reason: str) -> None:
        if self._held is not None:
            log.warning("dropped the gradient of %s: %s", ", ".join(self._held.groups), reason)
        self._held = None


async def _until(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
