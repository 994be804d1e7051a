"""Laws 2 and 3 by execution: whatever is said of a group's executions, in any order and any number of times."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.elastic.admission import new_entry, room
from opengyre.elastic.entries import LawBrokenError, consumed, executions, scored
from opengyre.elastic.ledger import Ledger, report
from opengyre.elastic.progress import Progress
from opengyre.proto.decision import AdmissionInput, GroupEntry
from opengyre.proto.run import Dispatch, Elastic, RunSpec
from opengyre.proto.task import GroupConsumed, GroupScored, TaskSpec
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed, Contributed, Opened, UpdateStats
from opengyre.proto.weights import Manifest, WeightsPublished

SIZE = 4
SPEC = RunSpec(
    run="r", model="m", dispatch=Dispatch(phi=0, mu=2, batch_groups=2, group_size=SIZE, close_at=2, min_members=1)
)
TASK = TaskSpec(task="t", instruction="x")
Said = GroupScored | GroupConsumed


def entry(sequence: int = 0, version: int = 1) -> GroupEntry:
    return new_entry(SPEC, TASK, sequence, version)


def names(sequence: int = 0) -> tuple[str, ...]:
    return entry(sequence).executions


def told(*about: str, unscored: tuple[str, ...] = (), late: bool = False) -> GroupScored:
    return GroupScored(
        run="r", task="t", group=about[0].rpartition("-")[0], outcome="ready", scores={}, executions=about, late=late,
        unscored=dict.fromkeys(unscored, "infra"), sampled_version_min=0, sampled_version_max=0, tokens=0,
        tokens_by={name: 10 * (1 + int(name[-2:])) for name in about},
    )  # fmt: skip


def took(version: int, *about: str, outcome: Any = "trained", reason: str | None = None) -> GroupConsumed:
    group = about[0].rpartition("-")[0]
    return GroupConsumed(
        run="r", task="t", group=group, outcome=outcome, reason=reason, version=version, executions=about
    )


def after(event: Said, before: GroupEntry) -> GroupEntry:
    return scored(before, event) if isinstance(event, GroupScored) else consumed(before, event)


@st.composite
def histories(draw: st.DrawFn) -> list[Said]:
    """All that is said of a group: how it closed, who came late, what became of each execution."""
    order = draw(st.permutations(names()))
    closing = draw(st.integers(1, SIZE))
    bad = tuple(name for name in order if draw(st.booleans()))
    parts = [tuple(order[:closing]), *((name,) for name in order[closing:])]
    events: list[Said] = []
    for number, part in enumerate(parts):
        unscored = tuple(name for name in part if name in bad)
        events.append(told(*part, unscored=unscored, late=number > 0))
        at = draw(st.integers(0, len(part)))
        for piece, version in ((part[:at], draw(st.integers(1, 4))), (part[at:], draw(st.integers(1, 4)))):
            fate = draw(st.sampled_from(["trained", "stale", "non_finite_gradient", "none"]))
            if piece and fate == "trained":
                events.append(took(version, *piece))
            elif piece and fate != "none":
                events.append(took(version, *piece, outcome="dropped", reason=fate))
    return events


@given(histories(), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_entry_and_the_books_balance_at_each_step(events: list[Said], random) -> None:
    first = entry()
    for event in events:
        first = after(event, first)
    shuffled = [event for event in events for _ in range(random.randint(1, 2))]
    random.shuffle(shuffled)
    again, ledger = entry(), Ledger([entry()])
    for event in shuffled:
        again = after(event, again)
        ledger.put(again)
        groups, members = ledger.groups_book(), ledger.executions_book()
        assert groups.balances
        assert members.balances
        assert members.dispatched == SIZE
        assert ledger.kept_executions == SIZE - ledger.replaceable
        assert ledger.unconsumed_executions + ledger.taken + ledger.replaceable == SIZE
        assert (ledger.oldest_version is None) == (ledger.unconsumed_executions == 0)
    assert again == first
    states = {execution.name: execution for execution in executions(first)}
    for event in events:
        if isinstance(event, GroupConsumed):
            for name in event.executions:
                bad = name in first.unscored
                assert states[name].state == ("dropped" if bad or event.outcome == "dropped" else "trained")
                skipped = event.reason == "non_finite_gradient"
                assert states[name].took_place == (event.outcome == "trained" or skipped)
    rebuilt = Ledger([first])
    assert rebuilt.executions_book() == ledger.executions_book()
    assert rebuilt.groups_book() == ledger.groups_book()
    assert rebuilt.by_execution == +ledger.by_execution
    assert rebuilt.ready_executions == ledger.ready_executions


def test_an_execution_is_trained_once_and_never_before_its_group_was_admitted() -> None:
    first, second = names()[:2]
    known = consumed(entry(), took(2, first))
    assert consumed(known, took(3, second)).trained == {first: 2, second: 3}
    with pytest.raises(LawBrokenError, match=f"{first} of group r-g000000 was trained twice, at versions 2 and 3"):
        consumed(known, took(3, first))
    with pytest.raises(LawBrokenError, match="r-g000000 is negative"):
        consumed(entry(), took(0, first))


def test_staleness_is_told_by_group_by_execution_and_by_token_and_discards_with_their_length() -> None:
    a, b, c, d = names()
    progress = Progress(SPEC, [entry()])
    for event in (told(a, b), told(c, late=True), told(d, late=True), took(1, a, b), took(3, c)):
        progress.apply(event)
    progress.apply(took(5, d, outcome="dropped", reason="stale"))
    for update, tokens in ((1, 10), (2, 30), (2, 30)):
        stats = UpdateStats(tokens=tokens, token_staleness_sum=tokens * update)
        progress.apply(
            Committed(
                run="r", update=update, attempt="a", version=update, published=False, groups=(), executions=(),
                staleness=(), score=0, gradient_norm=0, stats=stats,
            )
        )  # fmt: skip
    made = report("r", SPEC.dispatch, progress.ledger, 4, progress.by_token_mean)
    assert (made.mean, made.maximum) == (0, 0), "of the closing part"
    assert (made.by_execution, made.by_execution_maximum) == ({0: 2, 2: 1}, 2)
    assert made.by_execution_mean == made.by_execution_window_mean == pytest.approx(2 / 3)
    assert made.by_token_mean == (10 + 60) / 40
    assert made.trained_mean_tokens == 20
    assert made.discards["stale"].executions == 1
    assert made.discards["stale"].mean_tokens == 40
    assert made.executions.dropped == {"stale": 1}


def asked(dispatch: Dispatch = SPEC.dispatch, **fields: Any) -> AdmissionInput:
    base: dict[str, Any] = {
        "updates": None, "state": "active", "finished": False, "published": 0, "kept_executions": 0,
        "unconsumed_executions": 0, "waiting": 99, "most": 99,
    }  # fmt: skip
    return AdmissionInput(dispatch=dispatch, **{**base, **fields})


def test_less_than_a_group_that_is_lacking_is_made_up_for_by_one() -> None:
    assert room(asked(kept_executions=16, unconsumed_executions=16)) == 0
    assert room(asked(kept_executions=13, unconsumed_executions=13)) == 1, "or the burst would never be full"
    assert room(asked(kept_executions=17, unconsumed_executions=17)) == 0
    assert room(asked(kept_executions=13, unconsumed_executions=13, updates=2)) == 1
    assert room(asked(kept_executions=16, unconsumed_executions=0, updates=2)) == 0


def test_a_smaller_depth_admits_nothing_until_it_is_reached() -> None:
    dispatch = Dispatch(phi=0, mu=1, batch_groups=2, group_size=SIZE)
    assert room(asked(dispatch, kept_executions=48, unconsumed_executions=48)) == 0
    assert room(asked(dispatch, published=5, kept_executions=48, unconsumed_executions=8)) == 0
    assert room(asked(dispatch, published=6, kept_executions=48, unconsumed_executions=0)) == 2


def test_continuous_dispatch_keeps_so_many_groups_open() -> None:
    dispatch = Dispatch(phi=0, mu=1, batch_groups=2, group_size=SIZE, continuous=5)
    assert room(asked(dispatch, kept_executions=400, unconsumed_executions=400, live_groups=2)) == 3
    assert room(asked(dispatch, kept_executions=400, live_groups=7)) == 0
    assert room(asked(dispatch, kept_executions=76, live_groups=1, updates=10)) == 1


def test_pacing_admits_no_more_than_the_updates_in_which_the_oldest_has_to_be() -> None:
    dispatch = Dispatch(phi=2, mu=1, batch_groups=2, group_size=SIZE, d_max=1)
    assert room(asked(dispatch)) == 4
    some = {"kept_executions": 24, "unconsumed_executions": 4, "published": 2}
    assert room(asked(dispatch, **some, oldest_version=1)) == 0
    assert room(asked(dispatch, **some, oldest_version=2)) == 2


def progress_of_burst(*, stream: bool) -> Progress:
    progress = Progress(RunSpec(run="r", model="m", dispatch=SPEC.dispatch, elastic=Elastic(stream=stream)))
    for sequence in range(4):
        progress.adopt(entry(sequence, 0))
    manifest = Manifest(run="r", version=0, parent=None, step=0, directory="d", files=())
    progress.apply(WeightsPublished(run="r", manifest=manifest))
    progress.apply(Opened(run="r", update=1, attempt="a", groups=2, executions=8))
    return progress


def test_without_streaming_nothing_waits_before_the_burst_is_complete() -> None:
    progress = progress_of_burst(stream=False)
    for sequence in range(3):
        progress.apply(told(*names(sequence)))
    assert progress.waiting_groups == 0
    progress.apply(told(*names(3)[:3]))
    assert progress.waiting_groups == 0
    progress.apply(told(names(3)[3], unscored=(names(3)[3],), late=True))
    assert progress.waiting_groups == 4, "an execution without a score completes it too"
    contributed = Contributed(
        run="r", update=1, attempt="a", host="h", contribution="c", groups=(), gradient="g", executions=names(0)[:2],
        stats=UpdateStats(executions=2, busy_s=3.0),
    )  # fmt: skip
    progress.apply(contributed)
    progress.apply(contributed)
    assert progress.waiting_groups == 3.5
    assert progress.policy_input(()).train_s == pytest.approx(6.0), "of a group"
    streaming = progress_of_burst(stream=True)
    streaming.apply(told(*names(0)[:3]))
    assert streaming.waiting_groups == 0.75


def test_late_members_are_live_until_they_end() -> None:
    progress = progress_of_burst(stream=True)
    a, b, c, d = names()
    for name in (a, b, c):
        progress.apply(
            Ended(
                run="r", group="r-g000000", execution=name, index=1, attempt=0, reason="done", turns=1,
                sampled_tokens=1, duration_s=1.0, members=(),
            )
        )  # fmt: skip
    assert progress.live_executions == 13
    progress.apply(told(a, b))
    assert progress.live_executions == 13
    assert "r-g000000" in progress.ledger.unfinished()
    progress.apply(took(0, a, b))
    progress.apply(told(c, late=True))
    assert progress.live_executions == 13, "of d nothing is known yet"
    progress.apply(told(d, late=True))
    assert progress.live_executions == 12
    assert "r-g000000" not in progress.ledger.unfinished()
