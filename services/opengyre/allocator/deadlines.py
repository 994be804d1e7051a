"""Which groups have been live for too long. Pure, but for the times it remembers.

A deadline is counted on the clock of the leader's loop, from when this term first saw the group live: a new leader
counts anew. Each group is named once; who hears it late or twice closes it once (its log is what counts).
"""

from collections.abc import Iterable

from opengyre.proto.decision import GroupEntry


class Deadlines:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._named: set[str] = set()

    def due(self, live: Iterable[GroupEntry], deadline_s: float | None, now: float) -> list[GroupEntry]:
        """Train groups of `live` that are live for `deadline_s` seconds or more and were not named before."""
        there = {entry.group: entry for entry in live if entry.purpose == "train"}
        self._since = {group: self._since.get(group, now) for group in there}
        self._named &= there.keys()
        if deadline_s is None:
            return []
        late = [
            there[group]
            for group, since in self._since.items()
            if now - since >= deadline_s and group not in self._named
        ]
        self._named.update(entry.group for entry in late)
        return late
