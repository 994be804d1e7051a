"""Sampling by counter: deterministic, uniform, and the log-prob of what was sampled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opengyre.tiny.sampling import choose, uniform

pytestmark = pytest.mark.torch


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_noise_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)
    assert uniform(seed, position) != uniform(seed, position + 1)


def test_noise_is_uniform_and_uncorrelated() -> None:
    values = torch.tensor([[uniform(seed, position) for position in range(300)] for seed in range(300)])
    counts = torch.histc(values, bins=20, min=0, max=1) / values.numel()
    assert (counts - 0.05).abs().max() < 0.004
    centred = values - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert shifted.mean().abs() < 0.001


def test_tokens_follow_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -30.0]]).repeat(4000, 1)
    noise = [uniform(7, position) for position in range(4000)]
    tokens, logprobs = choose(logits, [0.5] * 4000, noise)
    wanted = torch.log_softmax(logits[0] / 0.5, -1)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    assert (shares - wanted.exp()).abs().max() < 0.02
    assert logprobs == pytest.approx([float(wanted[token]) for token in tokens])


def test_the_extremes_of_noise_choose_possible_tokens() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    tokens, _ = choose(logits, [1.0, 1.0], [0.0, 1 - 2**-53])
    assert tokens == [1, 2]


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    tokens, logprobs = choose(logits, [0.0, 1.0], [0.999999, 0.0])
    assert tokens == [1, 0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]))
