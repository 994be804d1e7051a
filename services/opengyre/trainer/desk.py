"""Where cells come for work: one update's machine, with its effects told as events and its answers as replies.

Awaits: a hand-over waits for its gradient to be read and checked in a thread; nothing else waits here.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from opengyre.learn.codec import GradientFormatError
from opengyre.proto.run import RunSpec
from opengyre.proto.update import (
    Contributed,
    HandOver,
    HandOverReply,
    Joined,
    Left,
    Opened,
    PullReply,
    PullRequest,
    UpdateEvent,
    WorkItem,
)
from opengyre.shared.blobs import BlobMissingError, Blobs
from opengyre.trainer import figures
from opengyre.trainer.books import Held, groups_of, nominal_weight, token_weights
from opengyre.trainer.placing import load_of
from opengyre.trainer.state import State
from opengyre.trainer.update import (
    Accept,
    Arrived,
    Cell,
    CellJoined,
    CellLeft,
    Commit,
    Discard,
    Effect,
    Event,
    Flush,
    Give,
    HandedOver,
    Phase,
    Pulled,
    Refuse,
    Taken,
    Unusable,
    Update,
    Wait,
    advance,
)

log = logging.getLogger("gyre.trainer")

Tell = Callable[[str, UpdateEvent], None]


class Desk:
    """The open update. `tell(name, event)` takes the events of the stream UPDATES, and does not wait.

    `held`: the messages that its units came by, by key. `whole` is set when all of it is in contributions.
    """

    def __init__(
        self, spec: RunSpec, update: Update, state: State, held: Mapping[str, Held], tell: Tell, blobs: Blobs
    ) -> None:
        self._spec = spec
        self.update = update
        self._state = state
        self._held = held
        self._tell = tell
        self._blobs = blobs
        self.whole = asyncio.Event()
        ids = {"run": spec.run, "update": update.number, "attempt": update.attempt}
        tell("opened", Opened(**ids, groups=spec.dispatch.batch_groups, executions=update.size))

    def advance(self, event: Event) -> tuple[Update, tuple[Effect, ...]]:
        """Move the update on and tell what happened; the answer to a request is among the effects."""
        update, effects = advance(self.update, event)
        self.update = update
        ids = {"run": self._spec.run, "update": update.number, "attempt": update.attempt}
        for effect in effects:
            match effect:
                case CellJoined(cell):
                    self._tell("joined", Joined(**ids, host=cell.host, boot=cell.boot))
                case CellLeft(cell, reason):
                    if reason != "another role":
                        figures.CELLS_LOST.inc()
                    log.info("%s left update %d: %s", cell.host, update.number, reason)
                    self._tell("left", Left(**ids, host=cell.host, boot=cell.boot, reason=reason))
                case Taken(name):
                    taken = update.contributions[name]
                    self._tell(
                        "contributed",
                        Contributed(
                            **ids, host=taken.cell.host, contribution=name, groups=groups_of(taken.units),
                            gradient=taken.gradient, stats=taken.stats, executions=taken.units,
                        ),
                    )  # fmt: skip
                case Commit():
                    self.whole.set()
                case _:
                    pass
        return update, effects

    def arrive(self, key: str, executions: tuple[str, ...]) -> None:
        """Executions that came by the message `key` enter the update, with what they cost."""
        held = self._held[key]
        load = load_of(executions, held.members, every=self._spec.optimization.kl > 0)
        costs = dict(zip(load.units, load.costs, strict=True))
        self.advance(Arrived(key, executions, held.idle, costs, load.shared))

    async def pull(self, request: PullRequest) -> PullReply:
        """Answer a cell that asks for work."""
        cell = Cell(request.host, request.boot)
        now = asyncio.get_running_loop().time()
        _, effects = self.advance(Pulled(cell, now, request.update, request.attempt, request.holding))
        for effect in effects:
            match effect:
                case Give(units):
                    return PullReply(item=self._item(units))
                case Flush():
                    return PullReply(flush=True)
                case Discard(reason):
                    log.info("%s drops what it holds: %s", request.host, reason)
                    return PullReply(discard=True)
                case Wait(what):
                    return PullReply(wait=what)
                case _:
                    pass
        raise AssertionError("a pull has an answer")

    def _item(self, units: tuple[str, ...]) -> WorkItem:
        held = self._held[self.update.source[units[0]]]
        ready = held.ready
        if ready.blob is None and units != ready.executions:
            members = tuple(member for member in held.members if member.execution in units)
            ready = msgspec.structs.replace(ready, members=members)
        return WorkItem(
            update=self.update.number,
            attempt=self.update.attempt,
            base=self._state.manifest,
            reference=self._state.reference,
            group=ready,
            executions=units,
            weight=nominal_weight(self._spec),
            token_weights=token_weights(self._spec, held, units),
            optimization=self._spec.optimization,
        )

    async def hand_over(self, request: HandOver) -> HandOverReply:
        """Take a cell's gradient, once it is seen to be one."""
        cell = Cell(request.host, request.boot)
        fault = await self._fault_of(request.gradient) if request.executions else None
        if fault is not None:
            log.error("the gradient of %s cannot be used: %s", request.host, fault)
            if self.update.phase is Phase.COLLECTING:
                self.advance(Unusable(cell, fault))
            return HandOverReply(accepted=False, reason=fault)
        event = HandedOver(
            cell=cell,
            now=asyncio.get_running_loop().time(),
            update=request.update,
            attempt=request.attempt,
            contribution=request.contribution,
            units=request.executions,
            gradient=request.gradient,
            stats=request.stats,
            leaving=request.leaving,
        )
        for effect in self.advance(event)[1]:
            match effect:
                case Accept():
                    return HandOverReply(accepted=True)
                case Refuse(reason):
                    log.info("refused a contribution of %s: %s", request.host, reason)
                    return HandOverReply(accepted=False, reason=reason)
                case _:
                    pass
        raise AssertionError("a contribution has an answer")

    async def _fault_of(self, gradient: str) -> str | None:
        if self.update.phase is not Phase.COLLECTING:
            return None  # Only what we have already can be accepted now, and that was looked at.
        try:
            path = await self._blobs.file(gradient)
            # Not in the trainer's thread, which may end before the answer: it looks at names and shapes only.
            await asyncio.to_thread(self._state.learner.check, path)
        except (BlobMissingError, GradientFormatError) as error:
            return str(error)
        return None
