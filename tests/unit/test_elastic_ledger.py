"""Laws 2, 4 and 5 on the pure ledger: the books balance, d is predicted, events may come in any order and twice."""

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.elastic.admission import TaskQueue, dispatches, made_of, new_entry, seed_of
from opengyre.elastic.ledger import LawBrokenError, Ledger, predicted, report
from opengyre.elastic.progress import Progress
from opengyre.proto.base import Event
from opengyre.proto.run import Dispatch, RunSpec
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSpec, TaskSubmitted
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed, Contributed, Opened, RunFinished, UpdateStats
from opengyre.proto.weights import Manifest, WeightsPublished


def run_spec(phi: float = 0.5, mu: int = 2, batch: int = 2, size: int = 2, updates: int | None = None) -> RunSpec:
    dispatch = Dispatch(phi=phi, mu=mu, batch_groups=batch, group_size=size)
    return RunSpec(run="r", model="m", updates=updates, dispatch=dispatch)


def task(name: str = "t", **fields) -> TaskSpec:
    return TaskSpec(task=name, instruction="x", **fields)


def submitted(spec: TaskSpec) -> TaskSubmitted:
    return TaskSubmitted(run="r", task=spec.task, spec=spec)


def published(version: int) -> WeightsPublished:
    manifest = Manifest(run="r", version=version, parent=None, step=version, directory="d", files=())
    return WeightsPublished(run="r", manifest=manifest)


def scored(
    group: str, outcome: Any = "ready", reason: str | None = None, unscored: dict[str, str] | None = None
) -> GroupScored:
    return GroupScored(
        run="r", task="t", group=group, outcome=outcome, reason=reason, scores={}, unscored=unscored or {},
        sampled_version_min=0, sampled_version_max=0, tokens=1,
    )  # fmt: skip


def consumed(group: str, version: int, outcome: Any = "trained", reason: str | None = None) -> GroupConsumed:
    return GroupConsumed(run="r", task="t", group=group, outcome=outcome, reason=reason, version=version)


def contributed(*groups: str, update: int = 1, attempt: str = "a") -> Contributed:
    return Contributed(
        run="r", update=update, attempt=attempt, host="h", contribution=groups[0], groups=groups, gradient="sha256:0",
        stats=UpdateStats(),
    )  # fmt: skip


def committed(*groups: str, update: int = 1) -> Committed:
    return Committed(
        run="r", update=update, attempt="a", version=update, published=False, groups=groups, executions=(),
        staleness=(), score=0.0, gradient_norm=0.0, stats=UpdateStats(),
    )  # fmt: skip


def admit(progress: Progress) -> int:
    """What the service does at every turn, without the writing."""
    chosen = progress.queue.take("evaluate", 64) if progress.published >= 0 else []
    chosen += progress.queue.take("train", progress.room)
    for spec in chosen:
        progress.adopt(new_entry(progress.spec, spec, progress.ledger.next_sequence, progress.published))
    return len(chosen)


def balanced(ledger: Ledger) -> bool:
    return ledger.groups_book().balances and ledger.executions_book().balances


@pytest.mark.parametrize(("phi", "mu"), list(itertools.product([0, 0.5, 1, 2], [1, 2, 3, 4])))
def test_measured_staleness_is_the_predicted_one(phi: float, mu: int) -> None:
    """Boundary dispatch with groups consumed first in, first out: E[d] = phi + (mu - 1) / 2, exactly."""
    batch, bursts = 4, 12
    progress = Progress(run_spec(phi, mu, batch))
    for number in range(2000):
        progress.apply(submitted(task(f"t{number}")))
    progress.apply(published(0))
    fifo: deque[str] = deque()
    warm = 6
    measured: list[int] = []
    for version in range(bursts * mu):
        before = progress.ledger.next_sequence
        admit(progress)
        fifo.extend(f"r-g{n:06d}" for n in range(before, progress.ledger.next_sequence))
        assert progress.ledger.unconsumed <= (phi + mu) * batch
        for _ in range(batch):
            group = fifo.popleft()
            progress.apply(scored(group))
            entry = progress.apply(consumed(group, version))
            assert entry is not None
            if version >= warm * mu:
                measured.append(version - entry.admitted_version)
        assert balanced(progress.ledger)
        if (version + 1) % mu == 0:
            progress.apply(published(version + 1))
    assert sum(measured) / len(measured) == pytest.approx(phi + (mu - 1) / 2)
    made = report("r", progress.spec.dispatch, progress.ledger, progress.published)
    assert made.predicted == predicted(progress.spec.dispatch) == pytest.approx(made.window_mean)


class _World:
    """Everything that may be said of a run, said in some order."""

    def __init__(self, spec: RunSpec) -> None:
        self.progress = Progress(spec)
        self.said: list[Event] = []
        for number in range(60):
            self.say(submitted(task(f"t{number}", purpose="evaluate" if number % 7 == 3 else "train")))

    def say(self, event: Event) -> None:
        self.said.append(event)
        self.progress.apply(event)


@given(
    st.sampled_from([(0, 1), (0.5, 2), (1, 1), (0, 3)]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1000)), max_size=120),
    st.randoms(use_true_random=False),
)
@settings(max_examples=120, deadline=None)
def test_the_books_balance_whatever_happens_and_any_order_gives_the_same(shape, steps, random) -> None:
    phi, mu = shape
    world = _World(run_spec(phi, mu, batch=2, size=3))
    progress = world.progress
    world.say(published(0))
    version = taken = 0
    for action, pick in steps:
        admit(progress)
        live = sorted(entry.group for entry in progress.ledger.live())
        ready = sorted(entry.group for entry in progress.ledger if entry.state == "ready")
        if action < 5 and live:
            group = live[pick % len(live)]
            entry = progress.ledger.get(group)
            assert entry is not None
            if entry.purpose == "evaluate":
                world.say(scored(group, "evaluated"))
            elif action == 0:
                world.say(scored(group, "dropped", "infra", {entry.executions[0]: "infra"}))
            else:
                world.say(scored(group, "ready", None, {entry.executions[1]: "overflow"} if action == 1 else {}))
        elif action < 9 and ready:
            outcome = "dropped" if action == 8 else "trained"
            world.say(consumed(ready[0], version, outcome, "non_finite_gradient" if action == 8 else None))
            taken += 1
            if taken % 2 == 0:
                version += 1
                if version % mu == 0:
                    world.say(published(version))
        elif world.said:
            progress.apply(world.said[pick % len(world.said)])
        assert balanced(progress.ledger)
        assert progress.ledger.unconsumed <= (phi + mu) * 2
    entries = list(progress.ledger)
    begun = [new_entry(progress.spec, task(e.task, purpose=e.purpose), e.sequence, e.admitted_version) for e in entries]
    shuffled = [event for event in world.said for _ in range(random.randint(1, 2))]
    random.shuffle(shuffled)
    again = Progress(progress.spec, begun)
    for event in shuffled:
        again.apply(event)
    assert {e.group: e for e in again.ledger} == {e.group: e for e in entries}
    assert again.published == progress.published
    assert again.ledger.groups_book() == progress.ledger.groups_book()
    assert again.ledger.executions_book() == progress.ledger.executions_book()
    assert again.live_executions == progress.live_executions
    restarted = Progress(progress.spec, entries)
    assert restarted.ledger.groups_book() == progress.ledger.groups_book()
    restarted.apply(published(progress.published))
    assert restarted.admission(9) == progress.admission(9)


def test_executions_without_a_score_are_dropped_with_their_group() -> None:
    progress = Progress(run_spec(size=3))
    progress.apply(submitted(task()))
    progress.apply(published(0))
    admit(progress)
    group = "r-g000000"
    progress.apply(scored(group, unscored={f"{group}-e02": "infra"}))
    assert progress.ledger.executions_book().ready == 3
    progress.apply(consumed(group, 0))
    book = progress.ledger.executions_book()
    assert (book.trained, book.dropped, book.balances) == (2, {"infra": 1}, True)


def test_negative_staleness_and_training_twice_are_fatal() -> None:
    progress = Progress(run_spec())
    progress.apply(submitted(task(repeat=9)))
    progress.apply(published(4))
    admit(progress)
    with pytest.raises(LawBrokenError, match="r-g000000 is negative: admitted at version 4, consumed at version 3"):
        progress.apply(consumed("r-g000000", 3))
    progress.apply(consumed("r-g000001", 4))
    assert progress.apply(consumed("r-g000001", 4)) is None, "a repeat is nothing new"
    with pytest.raises(LawBrokenError, match="twice, at versions 4 and 5"):
        progress.apply(consumed("r-g000001", 5))


def test_a_dropped_group_is_made_up_for_at_once_or_a_full_batch_never_comes() -> None:
    progress = Progress(run_spec(phi=0, mu=1, batch=2))
    progress.apply(submitted(task(repeat=9)))
    progress.apply(published(0))
    assert admit(progress) == 2
    assert admit(progress) == 0
    progress.apply(scored("r-g000001", "dropped", "infra"))
    assert admit(progress) == 1
    progress.apply(scored("r-g000000"))
    progress.apply(consumed("r-g000000", 0, "dropped", "invalid_group"))
    assert admit(progress) == 1, "the trainer refused it before it was in an update"
    assert progress.ledger.groups_book().dropped == {"infra": 1, "invalid_group": 1}


def test_groups_of_an_update_that_did_not_step_were_its_batch_and_are_not_made_up_for() -> None:
    progress = Progress(run_spec(phi=0, mu=2, batch=2))
    progress.apply(submitted(task(repeat=9)))
    progress.apply(published(0))
    assert admit(progress) == 4
    for group in ("r-g000000", "r-g000001"):
        progress.apply(consumed(group, 0, "dropped", "non_finite_gradient"))
    assert admit(progress) == 0
    progress.apply(published(2))
    assert admit(progress) == 2


def test_a_version_heard_of_before_the_consumption_it_follows_admits_no_more_than_the_depth() -> None:
    progress = Progress(run_spec(phi=0, mu=1, batch=2))
    progress.apply(submitted(task(repeat=9)))
    progress.apply(published(0))
    admit(progress)
    progress.apply(published(1))
    assert admit(progress) == 0
    progress.apply(consumed("r-g000000", 0))
    assert admit(progress) == 1
    progress.apply(consumed("r-g000001", 0))
    assert admit(progress) == 1
    assert [entry.admitted_version for entry in progress.ledger] == [0, 0, 1, 1]


def test_a_run_with_an_end_admits_no_more_than_it_trains() -> None:
    progress = Progress(run_spec(phi=1, mu=2, batch=2, updates=2))
    progress.apply(submitted(task(repeat=99)))
    assert admit(progress) == 0, "no version is published"
    progress.apply(published(0))
    assert admit(progress) == 4
    for number in range(4):
        progress.apply(consumed(f"r-g{number:06d}", number // 2))
    progress.apply(published(2))
    assert admit(progress) == 0


def test_tasks_are_taken_in_order_as_often_as_they_repeat_and_evaluations_apart() -> None:
    queue = TaskQueue({"a": 1})
    for spec in (task("a", repeat=3), task("e", purpose="evaluate"), task("b"), task("a", repeat=3)):
        queue.submit(spec)
    assert queue.waiting("train") == 3
    assert [spec.task for spec in queue.take("train", 2)] == ["a", "a"]
    assert [spec.task for spec in queue.take("train", 5)] == ["b"]
    assert [spec.task for spec in queue.take("evaluate", 5)] == ["e"]
    assert queue.tasks_waiting == 0


def test_a_task_that_evaluates_a_version_waits_for_it() -> None:
    queue = TaskQueue()
    for name, version in (("second", 4), ("first", 2), ("now", 0), ("also_first", 2)):
        queue.submit(task(name, purpose="evaluate", from_version=version))
    queue.forget_made()
    assert queue.tasks_waiting == 4

    def taken(published: int) -> list[str]:
        return [spec.task for spec in queue.take("evaluate", 9, published)]

    assert taken(1) == ["now"]
    assert taken(3) == ["first", "also_first"], "in the order of submission, and no version is passed over"
    assert queue.get("second") is not None
    assert (taken(3), taken(4), taken(5)) == ([], ["second"], [])
    assert queue.tasks_waiting == 0


def test_a_task_of_which_all_groups_were_made_is_not_kept_whole() -> None:
    """A run of weeks must not hold the files of every task it ever saw."""
    queue = TaskQueue({"made": 1})
    made, waits, later = task("made"), task("waits"), task("later")
    queue.submit(made)
    queue.submit(waits)
    assert queue.get("made") is made, "a former leader may have left its group undispatched"
    queue.forget_made()
    queue.submit(later)
    assert (queue.get("made"), queue.get("waits"), queue.get("later")) == (None, waits, later)
    assert queue.take("train", 5) == [waits, later]
    assert (queue.get("waits"), queue.get("later")) == (None, None)
    queue.submit(made)
    queue.submit(waits)
    assert queue.take("train", 5) == [], "known by name"


def test_episodes_of_a_group_are_the_same_each_time_and_differ_among_members() -> None:
    spec = run_spec(size=4)
    entry = new_entry(spec, task(), 7, 3)
    events = dispatches(spec, task(), entry)
    assert events == dispatches(spec, task(), entry)
    assert [event.execution for event in events] == [f"r-g000007-e{n:02d}" for n in range(4)]
    assert len({event.seed for event in events}) == 4
    assert all(0 <= event.seed < 2**63 and event.version == 3 for event in events)
    assert seed_of(0, 7, 1) == events[1].seed == 2008694181131239226
    single = new_entry(spec, task(purpose="evaluate"), 8, 3)
    assert [e.min_members for e in dispatches(spec, task(purpose="evaluate"), single)] == [1]
    assert made_of([entry, single]) == {"t": 2}


def test_demand_is_measured_by_ends_and_work_by_contributions() -> None:
    progress = Progress(run_spec(phi=0, mu=2, batch=2, size=2))
    progress.apply(submitted(task(repeat=4)))
    progress.apply(published(0))
    admit(progress)
    groups = [f"r-g{number:06d}" for number in range(4)]
    assert progress.live_executions == 8

    def ended(execution: str) -> Ended:
        return Ended(
            run="r", group=execution[:9], execution=execution, index=1, attempt=0, reason="done", turns=1,
            sampled_tokens=1, duration_s=1.0, members=(),
        )  # fmt: skip

    for execution in ("r-g000000-e00", "r-g000000-e00", "r-g000001-e01"):
        progress.apply(ended(execution))
    assert progress.live_executions == 6
    for group in groups[:3]:
        progress.apply(scored(group))
    assert (progress.live_executions, progress.waiting_groups) == (2, 3)
    progress.apply(Opened(run="r", update=1, attempt="a", groups=2))
    progress.apply(contributed(groups[0]))
    progress.apply(contributed(groups[1], attempt="old"))
    assert progress.waiting_groups == 2
    progress.apply(Opened(run="r", update=1, attempt="b", groups=2))
    assert progress.waiting_groups == 3, "a new attempt has nothing yet"
    progress.apply(contributed(*groups[:2], attempt="b"))
    progress.apply(committed(*groups[:2]))
    progress.apply(Opened(run="r", update=2, attempt="b", groups=2))
    assert progress.waiting_groups == 1, "the consumption is not heard of yet"
    for group in groups[:2]:
        progress.apply(consumed(group, 0))
    assert progress.waiting_groups == 1
    progress.apply(RunFinished(run="r", update=2, version=2))
    assert progress.finished
    assert progress.room == 0
