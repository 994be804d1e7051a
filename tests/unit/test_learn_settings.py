"""What a run may say of its losses, averages and optimizer, and the sentence that it gets otherwise."""

import re
from typing import Any, Literal

import pytest

from opengyre.gateway.models import RunIn
from opengyre.gateway.problems import Problem
from opengyre.proto.run import InvalidRunError, Optimization, RunSpec, validate

GOOD: tuple[dict[str, Any], ...] = (
    {"loss": "truncated", "truncate": 1.0},
    {"loss": "clip", "truncate": 1.28},
    {"loss": "sequence", "sequence_low": 0.99, "sequence_high": 1.01},
    {"average": "constant", "constant_tokens": 1},
    {"kl": 0.01, "kl_estimator": "k2", "max_age": 0},
    {"optimizer": "adafactor", "schedule": "cosine", "warmup_updates": 8},
    {"canary": True, "logprob_gap_alarm": 0.0},
)
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"truncate": 1.2}, "optimization.truncate is 1.2; allowed are values from 1.28 to 1000000"),
    ({"loss": "truncated", "truncate": 0.5}, "optimization.truncate is 0.5; allowed are values from 1 to 1000000"),
    ({"sequence_low": 1.1}, "optimization.sequence_low is 1.1; allowed are values from 0 to 1"),
    ({"sequence_high": 0.9}, "optimization.sequence_high is 0.9; allowed are values from 1 to 100"),
    ({"kl": -0.1}, "optimization.kl is -0.1; allowed are values from 0 to 100"),
    (
        {"average": "constant"},
        "optimization.constant_tokens is not set; optimization.average = constant needs it, from 1",
    ),
    ({"constant_tokens": 0}, "optimization.constant_tokens is 0; allowed are values from 1 to 1000000000"),
    ({"max_age": -1}, "optimization.max_age is -1; allowed are values from 0 to 10000"),
    ({"beta2": 1.0}, "optimization.beta2 is 1.0; allowed are values from 0 to 0.999999"),
    ({"warmup_updates": 9}, "optimization.warmup_updates is 9; allowed are values from 0 to 8"),
    *(
        (given, f"optimization.{name} is {given[name]}, but nothing reads it without optimization.{by}; leave it out")
        for given, name, by in (
            ({"constant_tokens": 5}, "constant_tokens", "average = constant"),
            ({"loss": "reinforce", "truncate": 2.0}, "truncate", "loss = clip or truncated"),
            ({"loss": "sequence", "truncate": 2.0}, "truncate", "loss = clip or truncated"),
            ({"loss": "truncated", "clip_low": 0.5}, "clip_low", "loss = clip"),
            ({"loss": "reinforce", "clip_high": 2.0}, "clip_high", "loss = clip"),
            ({"sequence_low": 0.5}, "sequence_low", "loss = sequence"),
            ({"sequence_high": 2.0}, "sequence_high", "loss = sequence"),
            ({"kl_estimator": "k2"}, "kl_estimator", "kl above 0"),
            ({"optimizer": "adafactor", "beta1": 0.8}, "beta1", "optimizer = adamw"),
            ({"optimizer": "adafactor", "beta2": 0.8}, "beta2", "optimizer = adamw"),
            ({"optimizer": "adafactor", "epsilon": 1e-6}, "epsilon", "optimizer = adamw"),
        )
    ),
    ({"logprob_gap_alarm": -1.0}, "optimization.logprob_gap_alarm is -1.0; allowed are values from 0 to 1000000"),
)


@pytest.mark.parametrize("given", GOOD)
def test_what_a_run_may_say(given: dict[str, Any]) -> None:
    asked = RunIn.model_validate({"run": "r", "model": "/m", "updates": 8, "optimization": given})
    assert asked.spec().optimization == Optimization(**given)


@pytest.mark.parametrize(("given", "sentence"), BAD)
def test_what_it_may_not_is_refused_by_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunError, match=f"^{re.escape(sentence)}$"):
        validate(RunSpec(run="r", model="m", updates=8, optimization=Optimization(**given)))
    with pytest.raises(Problem, match=re.escape(sentence)):
        RunIn.model_validate({"run": "r", "model": "/m", "updates": 8, "optimization": given}).spec()


def test_a_schedule_that_ends_needs_an_end() -> None:
    schedules: tuple[Literal["linear", "cosine"], ...] = ("linear", "cosine")
    for schedule in schedules:
        with pytest.raises(InvalidRunError, match=rf"^updates is not set; optimization\.schedule {schedule} needs it"):
            validate(RunSpec(run="r", model="m", optimization=Optimization(schedule=schedule)))
    assert validate(RunSpec(run="r", model="m", optimization=Optimization(warmup_updates=10)))
