"""Writing the ledger and the episodes of admitted groups.

Invariants:
- A group begins with its ledger entry, created under its sequence: of two leaders that both believe in themselves one
  is refused at its first entry and stops, so no task is taken twice and no sequence is skipped.
- The entry is marked dispatched last. A leader that finds one unmarked publishes all of its episodes again: they have
  the same ids, and an execution's log is its lock.
- An entry is written with the revision that we wrote or read last; another revision means that somebody else leads.

Awaits: each is woken by the broker's acknowledgement or the bus's own bound.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from opengyre.allocator.errors import DeposedError
from opengyre.allocator.together import together
from opengyre.elastic import admission
from opengyre.elastic.progress import Progress
from opengyre.proto import subjects
from opengyre.proto.decision import AdmissionInput, Decision, GroupEntry
from opengyre.proto.task import TaskSpec
from opengyre.shared.bus import Bucket, Bus, ConflictError

log = logging.getLogger("gyre.allocator")


class Decisions:
    """The decision log of one term: `<fencing token>-<number>`."""

    def __init__(self, bus: Bus, token: int) -> None:
        self._bus = bus
        self._token = token
        self._number = 0

    async def publish(self, run: str, kind: Any, **fields: Any) -> str:
        """Publish a decision; return its identifier."""
        decision = Decision(run=run, decision=f"{self._token}-{self._number}", kind=kind, **fields)
        self._number += 1
        await self._bus.publish(subjects.decision(run), decision)
        return decision.decision


class Records:
    def __init__(self, bus: Bus, decisions: Decisions) -> None:
        self._bus = bus
        self._decisions = decisions
        self._bucket = Bucket(bus, subjects.KV_LEDGER, GroupEntry)
        self._revisions: dict[str, int] = {}
        self.admitted = 0
        """Groups that this term admitted."""

    async def load(self) -> dict[str, list[GroupEntry]]:
        """All entries, by run, in order of sequence."""
        runs: dict[str, list[GroupEntry]] = {}
        async with self._bucket.view() as view:
            self._revisions = dict(view.revisions)
            for entry in view.values.values():
                runs.setdefault(entry.run, []).append(entry)
        for entries in runs.values():
            entries.sort(key=lambda entry: entry.sequence)
        return runs

    async def exists(self, group: str) -> bool:
        """Whether there is an entry now, perhaps written since `load`."""
        return await self._bucket.get(group) is not None

    async def persist(self, entries: Iterable[GroupEntry]) -> None:
        """Write changed entries. Raises `DeposedError`."""
        await together(self._update, entries)

    async def _update(self, entry: GroupEntry) -> None:
        try:
            self._revisions[entry.group] = await self._bucket.update(
                entry.group, entry, self._revisions.get(entry.group, 0)
            )
        except ConflictError as error:
            raise DeposedError(f"the ledger's entry of {entry.group} was changed by another") from error

    async def admit(self, progress: Progress, tasks: Sequence[TaskSpec], most: int) -> None:
        """Make one group of each of `tasks`, of which `most` may train. Raises `DeposedError`."""
        made: list[tuple[GroupEntry, TaskSpec]] = []
        given = _given(progress, tasks, most)
        before = progress.ledger.unconsumed
        for task in tasks:
            entry = admission.new_entry(progress.spec, task, progress.ledger.next_sequence, progress.published)
            try:
                self._revisions[entry.group] = await self._bucket.create(entry.group, entry)
            except ConflictError as error:
                raise DeposedError(f"group {entry.group} was admitted by another") from error
            progress.adopt(entry)
            made.append((entry, task))
        await self._dispatch(progress, made, before, "", given)
        self.admitted += len(made)

    async def finish(self, progress: Progress) -> None:
        """Finish what a former leader began: entries that are not marked dispatched."""
        before = progress.ledger.unconsumed
        begun = [entry for entry in progress.ledger if not entry.dispatched]
        lost = [entry for entry in begun if progress.queue.get(entry.task) is None]
        for entry in lost:
            log.error("group %s cannot be dispatched: task %s is not in the log", entry.group, entry.task)
            gone = msgspec.structs.replace(entry, state="dropped", reason="task_missing", dispatched=True)
            progress.adopt(gone)
            await self._update(gone)
        made = [(entry, task) for entry in begun if (task := progress.queue.get(entry.task)) is not None]
        if made:
            await self._dispatch(progress, made, before, "begun by a former leader")
        progress.queue.forget_made()

    async def _dispatch(
        self,
        progress: Progress,
        made: Sequence[tuple[GroupEntry, TaskSpec]],
        before: int,
        note: str,
        given: AdmissionInput | None = None,
    ) -> None:
        run = progress.spec.run
        subject = subjects.episode_dispatch(run)
        episodes = (event for entry, task in made for event in admission.dispatches(progress.spec, task, entry))
        await together(lambda event: self._bus.publish(subject, event), episodes)
        await together(
            lambda event: self._bus.publish(subjects.task(run, event.task, "admitted"), event),
            (admission.admitted(entry) for entry, _ in made),
        )
        marked = [msgspec.structs.replace(entry, dispatched=True) for entry, _ in made]
        for entry in marked:
            progress.adopt(entry)
        await self.persist(marked)
        await self._decisions.publish(
            run,
            "admission",
            admission=given,
            admitted=tuple(entry.group for entry in marked),
            version=progress.published,
            unconsumed=before,
            note=note,
        )


def _given(progress: Progress, tasks: Sequence[TaskSpec], most: int) -> AdmissionInput:
    """What the admission of `tasks`, which were taken from the queue just now, is decided on."""
    training = sum(task.purpose == "train" for task in tasks)
    return msgspec.structs.replace(
        progress.admission(most),
        waiting=progress.queue.waiting("train") + training,
        evaluating=len(tasks) - training,
    )
