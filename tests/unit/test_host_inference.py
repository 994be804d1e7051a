"""Requests and answers of the inference endpoint, without HTTP; the door."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from opengyre.host.door import Door, FullError, NotServingError
from opengyre.host.increments import Increments
from opengyre.host.inference import GenerateBody, to_answer, to_request
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.core import Core
from opengyre.tiny.types import (
    EngineClosedError,
    EngineError,
    EngineSettings,
    GenerateResult,
    Increment,
    InvalidRequestError,
    VersionSpan,
    spans_from,
)

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
        ({"stream_interval_s": 0}, "stream_interval_s"),
        ({"stream_interval_s": 61}, "stream_interval_s"),
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
    assert await asyncio.wait_for(waiting, 30)


WHOLE = GenerateResult(
    tuple(range(20, 30)), tuple(-0.1 * n for n in range(10)), "length", (VersionSpan(3, 0, 4), VersionSpan(4, 4, 10))
)


class Slow:
    """An engine whose one call has two tokens more each time somebody looks, and ends after `WHOLE`."""

    def __init__(self, answer: "asyncio.Future[GenerateResult]", fails: type[EngineError] | None = None) -> None:
        self.answer = answer
        self.fails = fails
        self.looks = 0

    def sampled(self, request_id: str, after: int) -> Increment:
        assert request_id == "1:a"
        self.looks += 1
        count = 2 * self.looks
        if self.looks == 4 and self.fails:
            self.answer.set_exception(self.fails("the engine is closed"))
        elif self.looks == 4:
            self.answer.set_result(WHOLE)
        return Increment(
            WHOLE.token_ids[after:count], WHOLE.logprobs[after:count], spans_from(WHOLE.weight_versions, after, count)
        )


async def increments(
    *, fails: type[EngineError] | None = None, leave_after: int = 99
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The events of a response, what was done with its place, and whether it was closed."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[GenerateResult] = loop.create_future()
    gone: asyncio.Future[None] = loop.create_future()
    left: list[str] = []
    bodies: list[bytes] = []
    closed = False

    async def send(message: Any) -> None:
        nonlocal closed
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            left.append("sent")
            closed = not message["more_body"]
            if len(bodies) == leave_after:
                gone.set_result(None)

    async def receive() -> Any:
        raise AssertionError("the response does not read")

    place = contextlib.ExitStack()
    place.callback(left.append, "left")
    engine: Any = Slow(answer, fails)
    response = Increments("a", engine, "1:a", answer, gone, 0.001, 60, lambda _: 0.5, place)
    assert b"content-length" not in dict(response.raw_headers)
    await response({}, receive, send)
    lines = b"".join(bodies).decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    return [msgspec.json.decode(event) for event in events if event != "[DONE]"], left, closed


async def test_increments_are_the_answer_in_parts_and_the_place_is_free_before_the_last() -> None:
    events, left, closed = await increments()
    parts = [event["choices"][0] for event in events]
    assert [len(part["token_ids"]) for part in parts] == [2, 2, 2, 2, 2]
    assert [token for part in parts for token in part["token_ids"]] == list(WHOLE.token_ids)
    versions = [span for part in parts for span in part["weight_versions"]]
    assert [(span["start"], span["end"]) for span in versions] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert [span["version"] for span in versions] == ["3", "3", "4", "4", "4"]
    assert [part["finish_reason"] for part in parts] == [None, None, None, None, "length"]
    assert events[-1]["engine_s"] == 0.5
    assert left == ["sent"] * 4 + ["left", "sent"]
    assert closed


@pytest.mark.parametrize(
    ("kind", "said"), [(EngineClosedError, "engine_failed"), (InvalidRequestError, "invalid_request")]
)
async def test_an_engine_that_fails_ends_the_increments_with_an_error(kind: type[EngineError], said: str) -> None:
    events, left, _ = await increments(fails=kind)
    assert events[-1]["error"]["type"] == said
    assert "left" in left


async def test_a_client_that_goes_away_frees_the_place_of_its_increments() -> None:
    events, left, closed = await increments(leave_after=2)
    assert len(events) == 2
    assert left[-1] == "left"
    assert not closed
