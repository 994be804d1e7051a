"""Which executions were consumed or have left training. Pure.

Of groups that are through, only the group's name is kept, so that it grows with groups and not with executions.
"""

from collections.abc import Iterable, Mapping

from opengyre.proto.ids import group_of


class Frontier:
    def __init__(self, whole: Iterable[str] = (), partial: Iterable[str] = ()) -> None:
        self._whole = set(whole)
        self._partial: dict[str, set[str]] = {}
        for execution in partial:
            self._partial.setdefault(group_of(execution), set()).add(execution)

    def __contains__(self, execution: object) -> bool:
        if not isinstance(execution, str):
            return False
        group = group_of(execution)
        return group in self._whole or execution in self._partial.get(group, ())

    def add(self, executions: Iterable[str], sizes: Mapping[str, int]) -> None:
        """`sizes`: executions of each group in all."""
        for execution in executions:
            group = group_of(execution)
            if group in self._whole:
                continue
            found = self._partial.setdefault(group, set())
            found.add(execution)
            if len(found) >= sizes[group]:
                self._whole.add(group)
                del self._partial[group]

    @property
    def whole(self) -> tuple[str, ...]:
        """Groups that are through, sorted."""
        return tuple(sorted(self._whole))

    @property
    def partial(self) -> tuple[str, ...]:
        """Executions of the other groups, sorted."""
        return tuple(sorted(execution for found in self._partial.values() for execution in found))
