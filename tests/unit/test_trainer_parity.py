"""What makes trainer and engine differ is told by their log-probs alone: tokens are drawn from engines of each kind."""

import random

import pytest
import torch
from torch import Tensor

from opengyre.learn.events import Events
from opengyre.learn.objective import objective
from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats
from opengyre.trainer.parity import alarm, likely

PLACES, VOCABULARY = 4000, 100


def stats_of(sampled: Tensor, said: Tensor, trainer: Tensor) -> UpdateStats:
    """Of tokens drawn from `sampled`, with log-probs as `said` and as the trainer's: each `[places, vocabulary]`."""
    tokens = torch.multinomial(sampled.exp(), 1)
    behaviour, logp = (logprobs.gather(-1, tokens)[:, 0] for logprobs in (said, trainer))
    ones = torch.ones_like(behaviour)
    events = Events(behaviour=behaviour, advantage=ones, weight=ones, age=torch.zeros(len(tokens), dtype=torch.int64))
    found = objective(Optimization(loss="reinforce"))(logp, events)[1]
    return UpdateStats(**{
        name: getattr(found, name) for name in UpdateStats.__struct_fields__ if hasattr(found, name)
    })  # fmt: skip


def logits(spread: tuple[float, float]) -> Tensor:
    """Of places from nearly sure to quite unsure ones."""
    return torch.randn(PLACES, VOCABULARY) * torch.empty(PLACES, 1).uniform_(*spread)


def truncated(logprobs: Tensor, share: float) -> Tensor:
    """Top-p, as engines have it: the fewest tokens with at least `share`, which are all there is then."""
    ordered, index = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.where(before > share, -torch.inf, ordered)
    return torch.log_softmax(torch.empty_like(kept).scatter(-1, index, kept), -1)


def at(values: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(values / temperature, -1)


@pytest.mark.torch
@pytest.mark.parametrize("spread", [(0.5, 6.0), (3.0, 8.0), (0.3, 1.5)], ids=["mixed", "sure", "unsure"])
@pytest.mark.parametrize("seed", range(3))
def test_each_kind_of_engine_is_told_from_the_others(spread: tuple[float, float], seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        values = logits(spread)
        right = at(values, 1.0)
        for temperature, word in ((0.5, "lower"), (0.9, "lower"), (1.1, "higher"), (1.5, "higher")):
            engine = at(values, temperature)
            said = likely(stats_of(engine, engine, right))
            assert said is not None
            assert f"at a {word} temperature" in said, temperature
        for temperature in (0.5, 0.7, 1.3):
            engine = at(values, temperature)
            assert "raw ones" in str(likely(stats_of(engine, right, engine))), temperature
        for share in (0.5, 0.9):
            engine = truncated(right, share)
            assert "top-p" in str(likely(stats_of(engine, engine, right))), share
        rounded = at(values + 0.05 * torch.randn_like(values), 1.0)
        assert "another precision" in str(likely(stats_of(rounded, rounded, right)))
        assert likely(stats_of(right, right, right)) is None


@pytest.mark.torch
def test_weights_of_another_version_are_no_rounding() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values = logits((3.0, 8.0))
        other = at(values + 2 * torch.randn_like(values), 1.0)
        assert "other weights" in str(likely(stats_of(other, other, at(values, 1.0))))


@pytest.mark.torch
def test_an_engine_at_another_temperature_is_an_alarm_and_one_that_rounds_is_none() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values = logits((0.5, 6.0))
        right = at(values, 1.0)
        other, rounded = at(values, 0.8), at(values + 1e-4 * torch.randn_like(values), 1.0)
        said = alarm(Optimization(), stats_of(other, other, right))
        assert said is not None
        assert "optimization.logprob_gap_alarm is 0.05; likely the engine samples at a lower temperature" in said
        assert alarm(Optimization(), stats_of(rounded, rounded, right)) is None


def test_figures_of_parts_are_those_of_the_whole_in_whatever_order() -> None:
    parts = [
        UpdateStats(tokens=3, token_versions={1: 2, 2: 1}, version_gaps={1: 0.5, 2: 0.25}, logprob_gap_max=0.25,
                    logprob_gap_sum=0.25, logprob_gap_tokens=1),
        UpdateStats(tokens=2, token_versions={0: 1, 2: 1}, version_gaps={0: 1.0, 2: 0.5}, logprob_gap_max=0.5,
                    logprob_gap_sum=0.5, logprob_gap_tokens=1),
        UpdateStats(),
    ]  # fmt: skip
    for seed in range(6):
        order = random.Random(seed).sample(parts, 3)
        whole = order[0] + order[1] + order[2]
        assert whole.logprob_gap_by_version == {0: 1.0, 1: 0.25, 2: 0.375}
        assert list(whole.version_gaps) == [0, 1, 2]
        assert (whole.logprob_gap, whole.logprob_gap_max, whole.tokens) == (0.375, 0.5, 5)
    assert UpdateStats().logprob_gap is None
