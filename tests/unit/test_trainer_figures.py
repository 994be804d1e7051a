"""Figures of a commit, and the alarm among the waits."""

import math

import msgspec
import pytest
from prometheus_client import REGISTRY

from opengyre.proto.update import Committed, UpdateStats
from opengyre.shared.waits import Waits
from opengyre.trainer.figures import Alarm, commit

STATS = UpdateStats(
    tokens=10, masked_tokens=2, clipped_tokens=4, kl_sum=0.8, reference_kl_sum=1.6, entropy_sum=5.0, ratio_sum=8.0,
    ratio_square_sum=16.0, logprob_gap_sum=0.3, logprob_gap_tokens=3, unique_tokens=30, path_tokens=90,
    token_versions={20: 3, 4: 5, 3: 2},
)  # fmt: skip


def committed(run: str, alarm: str | None = None) -> Committed:
    return Committed(
        run=run, update=21, attempt="t", version=21, published=True, groups=("g1",), executions=("g1-e0",),
        staleness=(2,), score=0.5, gradient_norm=1.5, learning_rate=0.01, stats=STATS, alarm=alarm, opened_s=2.0,
    )  # fmt: skip


def value(name: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_means_are_over_the_tokens_that_have_a_loss() -> None:
    found = commit(committed("means", "they disagree"))
    assert found["kl"] == pytest.approx(0.1)
    assert found["reference_kl"] == pytest.approx(0.2)
    assert (found["clip_fraction"], found["entropy"], found["effective_share"]) == (0.5, 0.5, 0.5)
    assert (found["logprob_gap"], found["logprob_gap_alarm"]) == (pytest.approx(0.1), 1.0)
    assert (found["masked_tokens"], found["unique_tokens"], found["path_tokens"]) == (2, 30, 90)
    assert value("gyre_trained_tokens_total", run="means") == 8
    assert value("gyre_update_learning_rate", run="means") == 0.01
    assert value("gyre_update_logprob_gap_alarm", run="means") == 1
    commit(committed("means"))
    assert value("gyre_update_logprob_gap_alarm", run="means") == 0


def test_tokens_are_counted_by_age() -> None:
    commit(committed("ages"))
    found = {age: value("gyre_tokens_by_age_total", run="ages", age=age) for age in ("0", "16+")}
    assert found == {"0": 3, "16+": 7}


def test_a_gap_that_was_not_measured_is_not_none() -> None:
    commit(committed("gap"))
    unmeasured = msgspec.structs.replace(committed("gap"), stats=UpdateStats(tokens=10))
    assert "logprob_gap" not in commit(unmeasured)
    assert value("gyre_update_logprob_gap", run="gap") == pytest.approx(0.1)


def test_an_update_without_tokens_has_figures() -> None:
    assert UpdateStats().effective_share == 0.0
    assert UpdateStats(tokens=3, masked_tokens=3).effective_share == 0.0
    assert all(map(math.isfinite, commit(committed("none")).values()))


async def test_an_alarm_is_a_wait_until_it_is_over() -> None:
    waits = Waits()
    alarm = Alarm(waits)
    alarm.show(None)
    assert waits.report() == ()
    alarm.show("0.2 nats apart")
    alarm.show("0.2 nats apart")
    assert [wait.what for wait in waits.report()] == ["an update without an alarm: 0.2 nats apart"]
    alarm.show("0.3 nats apart")
    assert [wait.what for wait in waits.report()] == ["an update without an alarm: 0.3 nats apart"]
    alarm.show(None)
    assert waits.report() == ()
