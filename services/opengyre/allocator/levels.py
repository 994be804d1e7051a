"""The hosts' levels (bucket `gyre_desired`): the roles that cells were told to have, each change with a greater epoch.

Invariants: the hosts of a cell are told the same with the same epoch, and the greatest one counts where a command was
torn; epochs grow by compare-and-set on the host's key, so that of two leaders one is refused; the level is written
before its command event, which is only the audit: a leader that finds a level without one publishes it. A command is
written over the revisions that it was decided on, not over what is there by then.

Awaits: each is woken by the broker's acknowledgement or the bus's own bound.
"""

from collections.abc import Mapping

from opengyre.allocator.cells import Cell
from opengyre.allocator.errors import DeposedError
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostCommand, Role
from opengyre.shared.bus import Bucket, Bus, ConflictError, View

Snapshot = Mapping[str, tuple[DesiredRole, int]]


class Levels:
    def __init__(self, bus: Bus, view: View[DesiredRole]) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self._view = view
        self._own: dict[str, tuple[DesiredRole, int]] = {}
        """What we wrote, until the mirror shows it."""
        self._last: dict[str, DesiredRole] = {}
        """Of the greatest epoch that was seen: what hosts obey, though an older level is put back over it."""

    def current(self) -> Snapshot:
        """Host -> level and its revision: the mirror, and what we wrote since."""
        for host in [h for h, (_, revision) in self._own.items() if self._view.revisions.get(h, 0) >= revision]:
            del self._own[host]
        mirror = {host: (level, self._view.revisions[host]) for host, level in self._view.values.items()}
        found = {**mirror, **self._own}
        for host, (level, revision) in found.items():
            last = self._last.get(host, level)
            if level.epoch < last.epoch:
                found[host] = (last, revision)
            else:
                self._last[host] = level
        return found

    async def command(
        self, seen: Snapshot, cell: Cell, role: Role, reason: str, decision: str | None, wish: Role | None
    ) -> None:
        """Tell every host of `cell` its role, as decided on `seen`. Raises `DeposedError` if that has changed since."""
        known = [seen[host][0].epoch for host in cell.hosts if host in seen]
        epoch = max([0, *known, *(status.epoch for status in cell.present)]) + 1
        for host in cell.hosts:
            level = DesiredRole(
                host=host,
                role=role,
                epoch=epoch,
                reason=reason,
                cell=cell.name,
                wish=wish,
            )
            await self._write(level, seen[host][1] if host in seen else None)
            await self._audit(level, decision)

    async def _write(self, level: DesiredRole, known: int | None) -> None:
        try:
            if known is None:
                revision = await self._bucket.create(level.host, level)
            else:
                revision = await self._bucket.update(level.host, level, known)
        except ConflictError as error:
            raise DeposedError(f"host {level.host} was commanded by another") from error
        self._own[level.host] = (level, revision)

    async def _audit(self, level: DesiredRole, decision: str | None) -> None:
        await self._bus.publish(subjects.host(level.host, "command"), HostCommand(desired=level, decision=decision))

    async def finish(self) -> None:
        """Publish the commands of levels that a former leader wrote and did not live to tell."""
        for host, (level, _) in self.current().items():
            last = await self._bus.last(subjects.host(host, "command"), subjects.HOSTS)
            told = last.readable() if last is not None else None
            if not isinstance(told, HostCommand) or told.desired.epoch < level.epoch:
                await self._audit(level, None)
