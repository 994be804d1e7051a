"""What a version's canary is, and when an engine that scored it is off."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.weights.canary import DECIMALS, TOKENS, Canary, encode, gap, prompts_for

NATS = st.floats(-30, 0)


@given(st.integers(1, 200_000), st.integers(2, 4096))
def test_prompts_are_the_same_for_each_version_and_fit_the_model(vocabulary: int, context: int) -> None:
    prompts = prompts_for(vocabulary, context)
    assert prompts == prompts_for(vocabulary, context)
    assert {len(prompt) for prompt in prompts} == {min(TOKENS, context)}
    assert all(0 <= token < vocabulary for prompt in prompts for token in prompt)


@given(st.lists(st.lists(NATS, min_size=1, max_size=4), min_size=1, max_size=4), st.floats(-5, 5))
def test_a_shift_of_all_log_probs_is_the_gap(logprobs: list[list[float]], shift: float) -> None:
    prompts = [[0] * (len(one) + 1) for one in logprobs]
    content = encode(prompts, logprobs)
    assert content is not None
    canary = msgspec.json.decode(content, type=Canary)
    found = gap(canary, [[value + shift for value in one] for one in logprobs])
    near = 10**-DECIMALS
    assert found.mean == pytest.approx(abs(shift), abs=near)
    assert found.largest == pytest.approx(abs(shift), abs=near)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_near(value: float) -> None:
    canary = Canary(prompts=((1, 2, 3),), logprobs=((-1.0, -2.0),))
    assert gap(canary, [[-1.0, value]]).mean == math.inf
    assert encode([[1, 2, 3]], [[-1.0, value]]) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompts": [], "logprobs": []},
        {"prompts": [[1]], "logprobs": [[]]},
        {"prompts": [[1, 2, 3]], "logprobs": [[-1.0]]},
        {"prompts": [[1, 2]], "logprobs": [[-1.0], [-1.0]]},
        {"prompts": [[1, 2]], "logprobs": [[-1.0]], "more": 1},
    ],
)
def test_a_file_that_is_no_canary_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(fields), type=Canary)
