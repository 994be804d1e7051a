"""A fresh processor for recorded events: the groups that a stretch of the TRAJ stream makes, with no broker and no
state. `python -m opengyre.trajectory.replay < traj.jsonl > groups.jsonl` reads one event a line, in the stream's order,
and writes one `GroupReady` a line. A line is an event, or a record of `gyre stream replay --out`, whose event may not
contradict its subject. What cannot be used is told of on stderr and stops nothing. Ids that were too large for their
event are read from the blob store of the setting `state_dir`.

Awaits: the blob store, which is files of this machine and a cache that may fail.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import BinaryIO

import msgspec

from opengyre.proto import codec
from opengyre.proto.base import Event
from opengyre.proto.group import GroupReady
from opengyre.proto.traj import Overdue, TrajEvent
from opengyre.shared.blobs import Blobs
from opengyre.shared.bulk import fill
from opengyre.shared.bus import Stored
from opengyre.shared.settings import SettingsError, load
from opengyre.trajectory.assemble import NotWholeError, assemble, by_group
from opengyre.trajectory.faults import decoded, unfit


def replay_groups(events: Iterable[Event]) -> list[GroupReady]:
    """What went to the trainer of each group, in the order of the groups' ids; other events are passed over."""
    groups: list[GroupReady] = []
    for found in by_group(event for event in events if isinstance(event, TrajEvent | Overdue)).values():
        try:
            parts = assemble(found)
        except NotWholeError:
            continue
        groups.extend(part.ready for part in parts if part.ready is not None)
    return groups


class _Line(msgspec.Struct):
    subject: str | None = None
    sequence: int | None = None
    event: msgspec.Raw = msgspec.Raw()


def stored_of(line: bytes, number: int) -> Stored:
    """The message of a line: of a record with its subject, or of an event alone, whose sequence is then `number`."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError):
        return Stored(subject="", sequence=number, payload=line)
    if found.subject is None:
        return Stored(subject="", sequence=number, payload=line)
    return Stored(found.subject, number if found.sequence is None else found.sequence, bytes(found.event))


async def run(
    source: BinaryIO, target: BinaryIO, get: Callable[[str], Awaitable[bytes]], complain: Callable[[str], object]
) -> int:
    """Replay lines of JSON; return how many groups were written. `get` is as of `bulk.fill`; `complain` gets a line for
    each event that cannot be used, which stops nothing, as it stops nothing live."""
    log_of = decoded([stored_of(line, number) for number, line in enumerate(source, start=1) if line.strip()])
    events = await fill(get, log_of.events)
    for found in [*log_of.faults, *unfit(log_of, events)]:
        letter = found.letter
        place = f" on {letter.origin_subject}" if letter.origin_subject else ""
        complain(f"event {letter.origin_sequence}{place} is passed over: {letter.error}")
    groups = replay_groups(events)
    target.writelines(codec.encode(ready) + b"\n" for ready in groups)
    return len(groups)


async def _main() -> int:
    settings = load()
    async with Blobs(settings.state_dir / "blobs", settings.cache) as blobs:
        return await run(sys.stdin.buffer, sys.stdout.buffer, blobs.get, _complain)


def _complain(line: str) -> None:
    print(f"replay: {line}", file=sys.stderr)


def main() -> None:
    try:
        count = asyncio.run(_main())
    except SettingsError as error:
        sys.exit(f"replay: {error}")
    print(f"{count} groups", file=sys.stderr)


if __name__ == "__main__":
    main()
