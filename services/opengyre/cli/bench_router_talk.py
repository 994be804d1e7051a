"""Conversations with an engine, by each of the ways that `gyre bench router` compares.

A turn says something new and goes on with what was answered; turns are of different lengths, the same ones by each way,
since agents do not walk in step. By token ids the client keeps the tokens itself; through
an execution's endpoint it sends messages, as any agent does. What a client does before it sends and after it has the
answer is no part of a turn's time.
"""

import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
import msgspec

from opengyre.cli.bench_model import TEXT
from opengyre.cli.bench_router_facts import Turn, read_spans
from opengyre.cli.bench_router_stack import RUN, Where
from opengyre.rollout.spans import HEADER

BOUND_S = 300.0
_encoder = msgspec.json.Encoder()
JSON = {"Content-Type": "application/json"}


class TalkError(Exception):
    """A call was not answered; one sentence."""


class Talk(Protocol):
    """A conversation; one turn after the other."""

    async def turn(self, length: int) -> Turn:
        """`length`: tokens that are sampled at most."""
        ...


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_answers = msgspec.json.Decoder(_Answer)


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]
) -> tuple[float, bytes, str]:
    """Seconds, body and spans of an answer."""
    began = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=headers) as response:
            content = await response.read()
            seconds = time.perf_counter() - began
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TalkError(f"{url} does not answer: {error!r}") from error
    if response.status != 200:
        raise TalkError(f"{url} answers {response.status}: {content[:300].decode('utf-8', 'replace')}")
    return seconds, content, response.headers.get(HEADER, "")


class Tokens:
    """By token ids; `stream`: the answer is asked for as it is sampled."""

    def __init__(
        self, where: Where, session: aiohttp.ClientSession, url: str, fields: dict[str, Any], name: str
    ) -> None:
        self._where = where
        self._session = session
        self._url = f"{url}/inference/v1/generate"
        self._fields = fields
        self._name = name
        self._tokens: list[int] = []
        self._turns = 0

    async def turn(self, length: int) -> Turn:
        render = self._where.renderer
        message = [{"role": "user", "content": f"{self._name} {self._turns}: {TEXT}"}]
        if self._tokens:
            closed = self._tokens[-1] in render.stop_token_ids
            self._tokens += render.render_suffix(message, closed=closed) or []
        else:
            self._tokens = render.render(message)
        params = {
            "max_tokens": length, "temperature": 1.0, "logprobs": 0, "ignore_eos": True,
            "stop_token_ids": render.stop_token_ids, **self._fields.get("sampling_params", {}),
        }  # fmt: skip
        body = _encoder.encode(
            {
                "stream": False, **self._fields, "request_id": f"{self._name}-{self._turns}",
                "token_ids": self._tokens, "sampling_params": params,
            }
        )  # fmt: skip
        prompt = len(self._tokens)
        self._turns += 1
        seconds, content, _ = await _post(self._session, self._url, body, JSON)
        sampled = _sampled(content)
        self._tokens += sampled
        return Turn(seconds, prompt, len(sampled))


def _sampled(content: bytes) -> list[int]:
    """Token ids of an answer that came whole or as events."""
    parts = [content]
    if content.startswith(b"data:"):
        parts = [event[5:].strip() for event in content.split(b"\n\n") if event.startswith(b"data:")]
    return [
        token
        for part in parts
        if part != b"[DONE]"
        for choice in _answers.decode(part).choices[:1]
        for token in choice.token_ids
    ]


class Chat:
    """Messages, through an execution's endpoint."""

    def __init__(self, where: Where, session: aiohttp.ClientSession, execution: str) -> None:
        self._session = session
        self._url = f"{where.rollout}/x/{execution}/v1/chat/completions"
        self._headers = {**JSON, "Authorization": f"Bearer {where.endpoints.key(execution)}"}
        self._name = execution
        self._messages: list[dict[str, Any]] = []

    async def turn(self, length: int) -> Turn:
        self._messages.append({"role": "user", "content": f"{self._name} {len(self._messages) // 2}: {TEXT}"})
        body = _encoder.encode({"model": RUN, "messages": self._messages, "max_tokens": length})
        seconds, content, spans = await _post(self._session, self._url, body, self._headers)
        answer = msgspec.json.decode(content)
        self._messages.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        return Turn(seconds, usage["prompt_tokens"], usage["completion_tokens"], read_spans(spans))


Way = Callable[[aiohttp.ClientSession, str], Talk]
"""From the conversation's name, for `via` its execution."""


def lengths(tokens: int, client: int, turns: int) -> list[int]:
    """Tokens of each turn of a client, `tokens` on average, from half of it to half as much again."""
    drawn = random.Random(client)  # noqa: S311 - a load, no secret
    return [max(1, round(tokens * drawn.uniform(0.5, 1.5))) for _ in range(turns)]


def ways(where: Where, *, vllm: bool) -> dict[str, Way]:
    """`direct`: the engine's own endpoint. With vLLM also `streamed`: the same, each token as it is sampled, which is
    how a host asks; and `host`: the host's endpoint. `via`: through an execution's endpoint, recorded."""

    def tokens(url: str, **fields: Any) -> Way:
        return lambda session, name: Tokens(where, session, url, fields, name)

    own = {"model": where.model, "sampling_params": {"detokenize": False}} if vllm else {"model": where.model}
    found = {"direct": tokens(where.engine, **own)}
    if vllm:
        found["streamed"] = tokens(where.engine, **own, stream=True)
        found["host"] = tokens(where.host, model=RUN, stream=True, stream_interval_s=1.0)
    found["via"] = lambda session, name: Chat(where, session, name)
    return found
