"""How many groups are admitted now, of which tasks, and what their episodes are. Pure.

Boundary dispatch: while version `v` is the published one, groups are admitted until `(v + phi + mu) * B` groups have
been or will be consumed; `v * B` of them are consumed by then, so `(phi + mu) * B` are unconsumed at the boundary and
ever fewer until the next. The target is a level: asking again admits nothing more, whatever was lost or repeated, and
a smaller depth admits nothing until it is reached. Continuous dispatch keeps `Q_c` groups open instead.

It is counted in executions, because members of a group may be consumed and dropped one by one. What is dropped before
an update takes it is made up for at once, or a full batch might never come; where less than a group is lacking for the
updates of a burst, one is admitted.

`d_max` by `wait`: all that is admitted is consumed by update `oldest + d_max + 1`, `oldest` being the version at which
the oldest unconsumed group was admitted, as long as no more is admitted than these updates hold. Without streaming a
burst has to be complete before any of it is trained, so it is admitted whole; what would be too old then is dropped.

Tasks are taken in the order of submission, `repeat` times each. Groups that evaluate are no part of the depth: they
are admitted as they come, or once the version is published that they are to evaluate, with one execution each.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from opengyre.proto import ids
from opengyre.proto.decision import AdmissionInput, GroupEntry
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import RunSpec
from opengyre.proto.task import TaskAdmitted, TaskSpec


def room(given: AdmissionInput) -> int:
    """How many train groups may be admitted now."""
    if given.published < 0 or given.state != "active" or given.finished:
        return 0
    dispatch = given.dispatch
    size, batch = dispatch.group_size, dispatch.update_executions
    # Levels of the executions that updates have taken or will take.
    burst = (given.published + dispatch.mu) * batch
    bounds = []
    if given.updates is not None:
        bounds.append(given.updates * batch)
        burst = min(burst, given.updates * batch)
    if dispatch.d_max is not None and dispatch.on_stale == "wait":
        oldest = given.published if given.oldest_version is None else min(given.oldest_version, given.published)
        bounds.append(max((oldest + dispatch.d_max + 1) * batch, 0 if given.stream else burst))
    if dispatch.continuous is None:
        depth = round((dispatch.phi + dispatch.mu) * batch)
        bounds.append(given.published * batch + depth)
        # Both hold at once: the consumption of a batch may be heard of before or after the version it made.
        free = min((depth - given.unconsumed_executions) // size, *(_groups(given, bound) for bound in bounds))
        some = given.unconsumed_executions < depth
    else:
        free = min(dispatch.continuous - given.live_groups, *(_groups(given, bound) for bound in bounds), given.most)
        some = given.live_groups < dispatch.continuous
    if free <= 0 and some and 0 < burst - given.kept_executions < size:
        free = 1
    return max(0, min(free, given.waiting, given.most))


def _groups(given: AdmissionInput, bound: int) -> int:
    """Whole groups until `bound` executions are kept."""
    return (bound - given.kept_executions) // given.dispatch.group_size


def seed_of(run_seed: int, sequence: int, member: int) -> int:
    """Seed of an execution: 63 bits, the same on every machine and at every time."""
    digest = hashlib.blake2b(f"{run_seed}:{sequence}:{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def new_entry(run: RunSpec, task: TaskSpec, sequence: int, version: int) -> GroupEntry:
    """The ledger's entry of a group that is about to be dispatched."""
    group = ids.group_id(run.run, sequence)
    size = run.dispatch.group_size if task.purpose == "train" else 1
    return GroupEntry(
        run=run.run,
        group=group,
        task=task.task,
        sequence=sequence,
        purpose=task.purpose,
        state="live",
        executions=tuple(ids.execution_id(group, member) for member in range(size)),
        admitted_version=version,
    )


def dispatches(run: RunSpec, task: TaskSpec, entry: GroupEntry) -> list[EpisodeDispatch]:
    """The episodes of a group; the same ones each time."""
    return [
        EpisodeDispatch(
            run=run.run,
            group=entry.group,
            execution=execution,
            members=entry.executions,
            version=entry.admitted_version,
            seed=seed_of(run.seed, entry.sequence, member),
            group_seed=seed_of(run.seed, entry.sequence, -1),
            task=task,
            harness=run.harness,
            min_members=min(run.dispatch.min_members, len(entry.executions)),
            advantage=run.optimization.advantage,
            sampling=run.sampling,
            scoring=run.scoring,
            close_at=min(close_at, len(entry.executions)) if (close_at := run.dispatch.close_at) is not None else None,
        )
        for member, execution in enumerate(entry.executions)
    ]


def admitted(entry: GroupEntry) -> TaskAdmitted:
    return TaskAdmitted(
        run=entry.run,
        task=entry.task,
        group=entry.group,
        executions=entry.executions,
        version=entry.admitted_version,
    )


@dataclass
class _Waiting:
    task: TaskSpec
    left: int


class TaskQueue:
    """Tasks that wait, in the order of submission: those that train and those that evaluate apart.

    After `forget_made` only those that wait are kept whole (a task may hold megabytes of files); of the others, their
    names.
    """

    def __init__(self, made: Mapping[str, int] | None = None) -> None:
        """`made`: how many groups were made of each task already."""
        self._made = made or {}
        self._known: set[str] = set()
        self._whole: dict[str, TaskSpec] = {}
        self._forgets = False
        self._waiting: dict[str, deque[_Waiting]] = {"train": deque(), "evaluate": deque()}
        self._later: list[tuple[int, int, _Waiting]] = []
        """A heap of those that evaluate a version that is not published: version, number, task."""

    def submit(self, task: TaskSpec) -> None:
        """A task that is known already is not taken again."""
        if task.task in self._known:
            return
        self._known.add(task.task)
        left = task.repeat - self._made.get(task.task, 0)
        if left > 0 and task.from_version > 0:
            heapq.heappush(self._later, (task.from_version, len(self._known), _Waiting(task, left)))
        elif left > 0:
            self._waiting[task.purpose].append(_Waiting(task, left))
        if left > 0 or not self._forgets:
            self._whole[task.task] = task

    def get(self, task: str) -> TaskSpec | None:
        """A task that was submitted and is still kept whole."""
        return self._whole.get(task)

    def forget_made(self) -> None:
        """From now on keep only tasks of which groups are still to be made."""
        self._forgets = True
        self._whole = {item.task.task: item.task for item in self._all()}

    def _all(self) -> Iterator[_Waiting]:
        for waiting in self._waiting.values():
            yield from waiting
        for _, _, item in self._later:
            yield item

    def take(self, purpose: str, most: int, published: int = 0) -> list[TaskSpec]:
        """The next tasks, `most` groups at most; a task comes as often as groups are made of it. Of those that evaluate
        none whose version is not `published`."""
        while self._later and self._later[0][0] <= published:
            self._waiting["evaluate"].append(heapq.heappop(self._later)[2])
        taken: list[TaskSpec] = []
        waiting = self._waiting[purpose]
        while waiting and len(taken) < most:
            first = waiting[0]
            taken.append(first.task)
            first.left -= 1
            if first.left == 0:
                waiting.popleft()
                if self._forgets:
                    del self._whole[first.task.task]
        return taken

    def waiting(self, purpose: str) -> int:
        """How many groups can be made now, as far as the tasks go."""
        return sum(item.left for item in self._waiting[purpose])

    @property
    def tasks_waiting(self) -> int:
        """Tasks of which not all groups were made."""
        return sum(map(len, self._waiting.values())) + len(self._later)


def made_of(entries: Iterable[GroupEntry]) -> dict[str, int]:
    """Task -> groups that were made of it."""
    made: dict[str, int] = {}
    for entry in entries:
        made[entry.task] = made.get(entry.task, 0) + 1
    return made
