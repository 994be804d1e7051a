"""A fresh processor for recorded events: the groups that a stretch of the TRAJ stream makes, with no broker and no
state. `python -m opengyre.trajectory.replay < traj.jsonl > groups.jsonl` reads one event a line, in the stream's order,
and writes one `GroupReady` a line. Ids that were too large for their event are read from the blob store of the setting
`state_dir`.

Awaits: the blob store, which is files of this machine and a cache that may fail.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import BinaryIO

from opengyre.proto import codec
from opengyre.proto.base import Event
from opengyre.proto.group import GroupReady
from opengyre.proto.traj import Overdue, TrajEvent
from opengyre.shared.blobs import Blobs
from opengyre.shared.bulk import fill
from opengyre.shared.settings import SettingsError, load
from opengyre.trajectory.assemble import NotWholeError, assemble, by_group


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


async def run(source: BinaryIO, target: BinaryIO, get: Callable[[str], Awaitable[bytes]]) -> int:
    """Replay lines of JSON; return how many groups were written. `get` is as of `bulk.fill`. Raises
    `codec.UndecodableError` with the line."""
    events: list[Event] = []
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        try:
            events.append(codec.decode(line))
        except codec.UndecodableError as error:
            raise codec.UndecodableError(f"line {number}: {error}") from error
    groups = replay_groups(await fill(get, events))
    target.writelines(codec.encode(ready) + b"\n" for ready in groups)
    return len(groups)


async def _main() -> int:
    settings = load()
    async with Blobs(settings.state_dir / "blobs", settings.cache) as blobs:
        return await run(sys.stdin.buffer, sys.stdout.buffer, blobs.get)


def main() -> None:
    try:
        count = asyncio.run(_main())
    except (codec.UndecodableError, SettingsError) as error:
        sys.exit(f"replay: {error}")
    print(f"{count} groups", file=sys.stderr)


if __name__ == "__main__":
    main()
