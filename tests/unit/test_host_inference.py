"""Requests and answers of the inference endpoint, without HTTP; the door."""

import asyncio

import msgspec
import pytest

from opengyre.host.door import Door, FullError, NotServingError
from opengyre.host.inference import GenerateBody, to_answer, to_request
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.core import Core
from opengyre.tiny.types import EngineSettings, GenerateResult, InvalidRequestError, VersionSpan

BODY = {
    "request_id": "a",
    "token_ids": [1, 2],
    "model": "m",
    "sampling_params": {"max_tokens": 4, "temperature": 0.7, "seed": 2**62, "stop_token_ids": [1], "logprobs": 0},
}


def read(change: dict[str, object]) -> GenerateBody:
    return msgspec.json.decode(msgspec.json.encode(BODY | change), type=GenerateBody)


def test_a_request_reaches_the_engine_as_it_was_sent() -> None:
    request = to_request(read({}), "7:a", seed=5)
    assert (request.request_id, request.token_ids, request.max_tokens) == ("7:a", (1, 2), 4)
    assert (request.temperature, request.seed, request.stop_token_ids) == (0.7, 2**62, (1,))
    assert to_request(read({"sampling_params": {"max_tokens": 4}}), "7:a", seed=5).seed == 5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [64]}, "token_ids"),
        ({"stream": True}, "stream"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 4, "temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": 4, "logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"max_tokens": 4, "top_p": 0.5}}, "top_p"),
        ({"sampling_params": None}, "sampling_params"),
        ({"token_ids": "x"}, "token_ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(change: dict[str, object], word: str) -> None:
    core = Core(TinyConfig(vocab_size=64, hidden_size=32), EngineSettings(max_batch=2))
    with pytest.raises((InvalidRequestError, msgspec.ValidationError), match=word):
        core.check(to_request(read(change), "1:a", 0))


def test_an_answer_has_the_shape_of_vllms() -> None:
    result = GenerateResult((4, 5, 6), (-0.1, -0.2, -0.3), "abort", (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))
    assert msgspec.json.decode(msgspec.json.encode(to_answer("a", result, 0.25))) == {
        "request_id": "a",
        "engine_s": 0.25,
        "choices": [
            {
                "index": 0,
                "token_ids": [4, 5, 6],
                "logprobs": {
                    "content": [
                        {"token_id": 4, "logprob": -0.1},
                        {"token_id": 5, "logprob": -0.2},
                        {"token_id": 6, "logprob": -0.3},
                    ]
                },
                "finish_reason": "abort",
                "weight_versions": [
                    {"version": "3", "start": 0, "end": 2},
                    {"version": "4", "start": 2, "end": 3},
                ],
            }
        ],
    }


async def test_the_door_is_shut_at_first_counts_and_is_bounded() -> None:
    door = Door(2)
    with pytest.raises(NotServingError), door.inside():
        pass
    door.admit()
    with door.inside(), door.inside():
        assert door.live == 2
        with pytest.raises(FullError), door.inside():
            pass
        door.refuse()
        with pytest.raises(NotServingError), door.inside():
            pass
        assert not await door.empty(0.001)
    assert door.live == 0
    assert await door.empty(0.001)


async def test_the_last_call_that_leaves_wakes_who_waits_for_an_empty_door() -> None:
    door = Door(2)
    door.admit()
    place = door.inside()
    place.__enter__()
    waiting = asyncio.create_task(door.empty(10))
    await asyncio.sleep(0)
    place.__exit__(None, None, None)
    assert await asyncio.wait_for(waiting, 1)
