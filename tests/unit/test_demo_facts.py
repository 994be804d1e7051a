"""The demo's account of a run: what counts as a switch, an interruption, a promise kept."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opengyre.cli.demo_facts import Facts, account, balances, rise, shortfalls, summary
from opengyre.cli.demo_plan import DemoOptions
from opengyre.cli.demo_view import Shown, closing, ending, line, panel, sparkline
from opengyre.proto.base import Event
from opengyre.proto.decision import Book, StalenessReport
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import HostState, HostStateChanged
from opengyre.proto.run import Harness
from opengyre.proto.task import GroupScored, TaskSpec
from opengyre.proto.traj import Ended, EndReason, Resumed, Started, Suspended
from opengyre.proto.update import Committed, RunFinished, UpdateStats
from opengyre.proto.weights import Manifest, WeightsApplied, WeightsPublished


def started(execution: str) -> Started:
    dispatch = EpisodeDispatch(
        run="demo", group="demo-g000000", execution=execution, members=(execution,), version=0, seed=1,
        task=TaskSpec(task="t", instruction="x"), harness=Harness(), min_members=1,
    )  # fmt: skip
    return Started(
        run="demo", group="demo-g000000", execution=execution, index=0, attempt=0, dispatch=dispatch, replica="r"
    )


def ended(execution: str, reason: EndReason = "done") -> Ended:
    return Ended(
        run="demo", group="demo-g000000", execution=execution, index=9, attempt=0, reason=reason, turns=1,
        sampled_tokens=1, duration_s=0.1, members=(execution,),
    )  # fmt: skip


def moved(host: str, after: HostState, sequence: int) -> HostStateChanged:
    return HostStateChanged(
        host=host, cell=host, boot="b", sequence=sequence, before=HostState.JOINING, after=after, epoch=1, version=0,
        live_calls=0,
    )  # fmt: skip


def committed(update: int, score: float) -> Committed:
    return Committed(
        run="demo", update=update, attempt="a", version=update, published=True, groups=(), executions=(),
        staleness=(1,), score=score, gradient_norm=1.0, stats=UpdateStats(),
    )  # fmt: skip


def book(**terms: Any) -> Book:
    return Book(**{"dispatched": 8, "trained": 8, "dropped": {}, "ready": 0, "live": 0, "balances": True, **terms})


def report(**more: Any) -> StalenessReport:
    values: dict[str, Any] = {
        "run": "demo", "phi": 0.5, "mu": 2, "predicted": 1.0, "mean": 0.9, "maximum": 2, "distribution": {1: 8},
        "window_mean": 0.9, "window": 8, "published_version": 1, "trainer_version": 1, "groups": book(),
        "executions": book(),
    }  # fmt: skip
    return StalenessReport(**{**values, **more})


def good(updates: int = 32) -> Facts:
    facts = Facts()
    for update in range(1, updates + 1):
        facts.take(committed(update, 0.4 + 0.5 * update / updates))
    for version in range(10):
        manifest = Manifest(run="demo", version=version, parent=None, step=version, directory="d", files=())
        facts.take(WeightsPublished(run="demo", manifest=manifest))
        facts.take(WeightsApplied(run="demo", version=version, host="host0", boot="b", duration_s=0.1))
    facts.take(started("e"))
    for number in range(8):
        facts.take(moved("host0", HostState.TRAIN if number % 2 else HostState.ROLLOUT, number))
    facts.take(ended("e"))
    facts.take(RunFinished(run="demo", update=updates, version=updates))
    return facts


def test_a_switch_is_a_settled_change_of_role_and_counts_when_episodes_live() -> None:
    facts = Facts()
    for number, state in enumerate([HostState.JOINING, HostState.ROLLOUT, HostState.DRAINING, HostState.TRAIN]):
        facts.take(moved("host0", state, number))
    assert (facts.switches, facts.switches_live) == (1, 0)
    facts.take(started("e"))
    facts.take(moved("host0", HostState.TRAIN, 5))  # the same role again, after a restart
    facts.take(moved("host0", HostState.ROLLOUT, 6))
    assert (facts.switches, facts.switches_live) == (2, 1)
    facts.take(ended("e"))
    facts.take(moved("host0", HostState.TRAIN, 7))
    assert (facts.switches, facts.switches_live) == (3, 1)


def test_an_episode_is_interrupted_only_by_our_own_faults() -> None:
    facts = Facts()
    for number, reason in enumerate(("done", "turn_budget", "time_budget", "agent_error", "infra")):
        facts.take(started(f"e{number}"))
        facts.take(ended(f"e{number}", reason))
    assert facts.interrupted == 1
    assert not facts.live


def test_suspended_episodes_are_live_until_they_end() -> None:
    facts = Facts()
    ids = {"run": "demo", "group": "g", "execution": "e", "attempt": 0}
    facts.take(started("e"))
    facts.take(Suspended(**ids, index=1, turn=0))
    assert facts.suspended == facts.live == {"e"}
    facts.take(Resumed(**ids, index=2, turn=0, waited_s=1.0))
    assert (facts.suspended, facts.live, facts.suspensions) == (set(), {"e"}, 1)


@given(st.randoms(use_true_random=False))
def test_the_account_does_not_depend_on_the_order_of_reading(rng: random.Random) -> None:
    events: list[tuple[float, Event]] = [
        (1.0, started("a")), (2.0, moved("h", HostState.ROLLOUT, 0)), (3.0, moved("h", HostState.TRAIN, 1)),
        (4.0, ended("a")), (5.0, committed(1, 0.5)), (6.0, moved("h", HostState.ROLLOUT, 2)),
    ]  # fmt: skip
    wanted = account(events)
    rng.shuffle(events)
    assert account(events) == wanted
    assert (wanted.switches, wanted.switches_live) == (2, 1)


def test_evaluations_are_told_apart_by_their_phase() -> None:
    facts = Facts()
    for task, score in (("before_1", 0.25), ("before_2", 0.75), ("after_1", 1.0)):
        facts.take(
            GroupScored(
                run="demo",
                task=task,
                group="g",
                outcome="evaluated",
                scores={"e": score},
                sampled_version_min=0,
                sampled_version_max=0,
                tokens=3,
            )
        )
    assert (facts.evaluation("before"), facts.evaluation("after")) == (0.5, 1.0)
    assert facts.evaluation("during") is None


def test_a_good_run_keeps_every_promise() -> None:
    assert shortfalls(good(), report(), 32) == []


def test_each_broken_promise_is_named() -> None:
    def broken(facts: Facts, staleness: StalenessReport | None = None, updates: int = 32) -> str:
        return "; ".join(shortfalls(facts, staleness or report(), updates))

    flat = good()
    for update in range(1, 33):
        flat.take(committed(update, 0.5))
    assert "the score rose by 0.000" in broken(flat)
    facts = good()
    facts.applied.clear()
    assert "0 versions were published and applied" in broken(facts)
    facts = good()
    facts.switches_live = 5
    assert "5 role switches" in broken(facts)
    facts = good()
    facts.take(ended("x", "infra"))
    assert "1 episodes were interrupted" in broken(facts)
    assert "32 of 40 updates" in broken(good(), updates=40)
    assert "books of groups do not balance" in broken(good(), report(groups=book(trained=7)))
    assert shortfalls(good(), None, 32) == ["the ledger could not be read"]


def test_books_are_added_up_and_not_believed() -> None:
    assert balances(book(trained=5, dropped={"infra": 1}, ready=1, live=1))
    assert not balances(book(trained=7))
    assert not balances(book(balances=False))


@given(st.lists(st.floats(0, 1), max_size=40))
def test_the_rise_compares_quarters(scores: list[float]) -> None:
    gain = rise(scores)
    if len(scores) < 4:
        assert gain is None
    else:
        assert gain is not None
        assert -1 <= gain <= 1
        assert abs((rise(scores[::-1]) or 0.0) + gain) < 1e-9


def test_the_summary_holds_what_was_promised() -> None:
    facts = good()
    document = summary(facts, report(), {"train": 1.234}, {"seed": 1}, [])
    assert document["curve"][0] == {"update": 1, "version": 1, "score": 0.4156}
    assert document["weight_versions"] == {"published": 10, "applied": 10, "refused": 0}
    assert document["role_switches"] == 7
    assert document["episodes_interrupted"] == 0
    assert document["staleness"]["predicted"] == 1.0
    assert document["accounting"]["balances"]
    assert document["wall_s"] == {"train": 1.23}


def test_every_view_can_be_drawn_from_nothing_and_from_everything() -> None:
    for shown in (Shown(), Shown(facts=good(), staleness=report(), cells={"host0": "train"}, waits=["a: b"])):
        assert "update" in line(shown)
        assert panel(shown)
    assert closing(summary(good(), report(), {}, {}, ["x"])).row_count > 8
    assert closing(summary(Facts(), None, {}, {}, ["x"])).row_count > 4


def test_a_sparkline_is_one_bar_a_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 100, 10)) == 10


def test_a_demo_that_was_stopped_says_what_there_still_is() -> None:
    assert ending(DemoOptions(), left=False) == "stopped; nothing runs any more"
    assert "runs/demo/state, and the same command with --keep goes on" in ending(DemoOptions(), left=True)
    attached = ending(DemoOptions(attach="http://127.0.0.1:1"), left=False)
    assert "the stack at http://127.0.0.1:1 goes on" in attached
