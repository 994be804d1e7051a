"""Telling what a commit decided: the events of a record, each once.

Events of a version are told in a fixed order before the next version can be committed, so after a crash only those of
the last record can be missing. Then they are looked for before they are told (message ids alone remember two minutes).

Awaits: the broker's answers.
"""

import asyncio

from opengyre.proto import subjects
from opengyre.proto.task import GroupConsumed
from opengyre.proto.update import Committed, RunFinished
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bus, read
from opengyre.trainer.store import Record


async def announce(
    bus: Bus, record: Record, manifest: Manifest, *, again: bool, published: Manifest | None = None
) -> None:
    """Publish Committed, GroupConsumed of each group, WeightsPublished, RunFinished, as far as `record` has them.

    `again`: some may be in the streams already. `published`: the manifest of `record.published` where that is an older
    version than the record's; it is published again if the stream does not know it, for nothing is admitted before.
    """
    run = record.run
    if record.committed is not None and not (again and await committed_version(bus, run) >= record.version):
        await bus.publish(subjects.update(run, "committed"), record.committed)
    async with asyncio.TaskGroup() as tasks:
        for consumed in record.consumed:
            tasks.create_task(_consumed(bus, consumed, again=again))
    if record.published == record.version and not (again and await published_version(bus, run) >= record.version):
        await bus.publish(subjects.weights(run, "published"), WeightsPublished(run=run, manifest=manifest))
    if published is not None and await published_version(bus, run) < record.published:
        await bus.publish(subjects.weights(run, "published"), WeightsPublished(run=run, manifest=published))
    if record.finished:
        subject = subjects.update(run, "finished")
        if not (again and await bus.last(subject, subjects.UPDATES) is not None):
            await bus.publish(subject, RunFinished(run=run, update=record.version, version=record.version))


async def _consumed(bus: Bus, consumed: GroupConsumed, *, again: bool) -> None:
    subject = subjects.task(consumed.run, consumed.task, "consumed")
    if again:
        # A task may have several groups, so the subject's last message is not enough.
        there = [stored.readable() for stored in await read(bus, subjects.TASKS, subject)]
        if any(isinstance(event, GroupConsumed) and event.event_id() == consumed.event_id() for event in there):
            return
    await bus.publish(subject, consumed)


async def committed_version(bus: Bus, run: str) -> int:
    """The last version that was told to be committed; -1 before the first."""
    last = await bus.last(subjects.update(run, "committed"), subjects.UPDATES)
    event = last.readable() if last is not None else None
    return event.version if isinstance(event, Committed) else -1


async def published_version(bus: Bus, run: str) -> int:
    """The last version that was told to be published; -1 before the first."""
    last = await bus.last(subjects.weights(run, "published"), subjects.WEIGHTS)
    event = last.readable() if last is not None else None
    return event.manifest.version if isinstance(event, WeightsPublished) else -1
