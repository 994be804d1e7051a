"""What a recorder holds back for the calls under way."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from opengyre.proto.traj import AnyTrajEvent, Call, VersionSpan
from opengyre.rollout.ask import Ask
from opengyre.rollout.budget import TimeBudget
from opengyre.rollout.history import History
from opengyre.rollout.live import Live
from opengyre.rollout.recorder import Recorder
from opengyre.rollout.router import Completion
from opengyre.tiny.tokenizer import TinyTokenizer
from support.rollout_fakes import TEXTS, dispatch


class OneToken:
    """A router whose calls are answered at once."""

    calls_in_flight = 0

    async def complete(self, _call: Any, _parking: Any) -> Completion:
        span = VersionSpan(version=0, start=0, end=1)
        return Completion(tokens=(5,), logprobs=(-1.0,), versions=(span,), finish="stop", hosts=("h0",))


@pytest.mark.parametrize("harness", [{"max_turns": 2}, {"max_turns": 9, "token_budget": 101, "max_tokens": 100}])
async def test_a_request_beside_a_call_that_was_just_recorded_finds_it_counted_once(harness: dict[str, Any]) -> None:
    """It was both in the log and under way until its task's end was heard of: the last turn was refused, or got none of
    the tokens that were left."""
    episode = dispatch(agent="program", context_tokens=2000, **harness)
    history = History()
    second: list[asyncio.Task[list[Call | Live]]] = []

    def ask(text: str) -> Ask:
        return Ask(api="chat", digest=text, messages=({"role": "user", "content": text},))

    async def record(kind: Callable[..., AnyTrajEvent], /, **fields: Any) -> AnyTrajEvent:
        names = {"run": episode.run, "group": episode.group, "execution": episode.execution}
        event = kind(**names, index=len(history.calls), attempt=0, **fields)
        history.take(event)
        if not second:  # it has come already, and is next
            second.append(asyncio.create_task(recorder.begin(ask("two"))))
        return event

    router: Any = OneToken()
    tokenizer = TinyTokenizer.train(TEXTS, 300)
    recorder = Recorder(episode, 0, history, tokenizer, router, record, TimeBudget(60.0))
    [first] = await recorder.answer(ask("one"))
    assert len(first.sampled_ids) == 1
    [beside] = await second[0]
    assert isinstance(beside, Live)
    assert beside.most == min(episode.harness.max_tokens, 100)
    await beside.task_of
    assert len(history.calls) == 2
    assert recorder.refused is None
