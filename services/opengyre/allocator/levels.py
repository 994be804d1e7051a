"""The hosts' levels (bucket `gyre_desired`): the roles that cells were told to have, each change with a greater epoch.

Invariants: the hosts of a cell are told the same with the same epoch, and the greatest one counts where a command was
torn; epochs grow by compare-and-set on the host's key, so that of two leaders one is refused; the level is written
before its command event, which is only the audit: a leader that finds a level without one publishes it.

Awaits: each is woken by the broker's acknowledgement or the bus's own bound.
"""

from collections.abc import Mapping

from opengyre.allocator.cells import Cell
from opengyre.allocator.errors import DeposedError
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostCommand, Role
from opengyre.shared.bus import Bucket, Bus, ConflictError, View


class Levels:
    def __init__(self, bus: Bus, view: View[DesiredRole]) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self._view = view
        self._own: dict[str, tuple[DesiredRole, int]] = {}
        """What we wrote, until the mirror shows it."""

    def current(self) -> Mapping[str, DesiredRole]:
        """Host -> level: the mirror, and what we wrote since."""
        for host in [h for h, (_, revision) in self._own.items() if self._view.revisions.get(h, 0) >= revision]:
            del self._own[host]
        return {**self._view.values, **{host: level for host, (level, _) in self._own.items()}}

    async def command(self, cell: Cell, role: Role, reason: str, decision: str, wish: Role | None) -> None:
        """Tell every host of `cell` its role. Raises `DeposedError`."""
        levels = self.current()
        known = [levels[host].epoch for host in cell.hosts if host in levels]
        epoch = max([0, *known, *(status.epoch for status in cell.present)]) + 1
        for host in cell.hosts:
            before = levels.get(host)
            level = DesiredRole(
                host=host,
                role=role,
                epoch=epoch,
                reason=reason,
                cell=cell.name,
                wish=wish,
            )
            await self._write(level, before)
            await self._audit(level, decision)

    async def _write(self, level: DesiredRole, before: DesiredRole | None) -> None:
        mine = self._own.get(level.host)
        try:
            if before is None:
                revision = await self._bucket.create(level.host, level)
            else:
                known = mine[1] if mine else self._view.revisions[level.host]
                revision = await self._bucket.update(level.host, level, known)
        except ConflictError as error:
            raise DeposedError(f"host {level.host} was commanded by another") from error
        self._own[level.host] = (level, revision)

    async def _audit(self, level: DesiredRole, decision: str | None) -> None:
        await self._bus.publish(subjects.host(level.host, "command"), HostCommand(desired=level, decision=decision))

    async def finish(self) -> None:
        """Publish the commands of levels that a former leader wrote and did not live to tell."""
        for host, level in self.current().items():
            last = await self._bus.last(subjects.host(host, "command"), subjects.HOSTS)
            told = last.event() if last is not None else None
            if not isinstance(told, HostCommand) or told.desired.epoch < level.epoch:
                await self._audit(level, None)
