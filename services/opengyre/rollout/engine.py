"""A host's generation endpoint (`POST <url>/inference/v1/generate`, vLLM's own shape) as seen by its caller.

What a host answers is one of: a completion (whole, or the part it had when it was stopped); `NotServedError` (it
drains, is gone, does not answer in time, answers nonsense: try elsewhere); `RefusedError` (the request can never be
served).

The answer comes in increments, at most one an interval, and as one object where it is whole before the first is due.
What came so far is kept by `Received`, whatever becomes of the host.

Awaits: `generate` is woken by the host's answer, the loss of the connection, or `timeout_s`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec

from opengyre.proto.traj import VersionSpan

FinishReason = Literal["stop", "length", "abort"]
MAX_EVENT = 16 << 20


class NotServedError(Exception):
    """This host did not serve the call; another one, or the same one later, may. `draining`: it said so itself."""

    def __init__(self, message: str, *, draining: bool = False) -> None:
        super().__init__(message)
        self.draining = draining


class RefusedError(Exception):
    """The host refuses this request for what it is; the message is the host's."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Part:
    """Tokens that one host sampled."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    """They cover `tokens` in order."""
    finish: FinishReason
    engine_s: float = 0.0
    """How long the host's engine had it; what is above that was the way."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    logprobs: int = 0
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    token_ids: Sequence[int]
    model: str
    sampling_params: SamplingParams
    priority: int = 0
    """Of the calls that wait at the host the least comes first."""
    stream: bool = True
    stream_interval_s: float = 1.0


class _Token(msgspec.Struct):
    logprob: float
    token_id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason
    weight_versions: list[_Span]


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    engine_s: float = 0.0


class _NewChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason | None = None
    weight_versions: list[_Span] = []


class _Event(msgspec.Struct):
    choices: list[_NewChoice] = []
    engine_s: float = 0.0
    error: "_Error | None" = None


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Failure(msgspec.Struct):
    error: _Error | str | None = None


_encoder = msgspec.json.Encoder()
_answers = msgspec.json.Decoder(_Answer)
_events = msgspec.json.Decoder(_Event)
_failures = msgspec.json.Decoder(_Failure)


def read_answer(body: bytes) -> Part:
    """The completion in a host's answer; raises `NotServedError` when it cannot be what was asked for."""
    try:
        answer = _answers.decode(body)
        choice = answer.choices[0]
        versions = tuple(
            VersionSpan(version=int(span.version), start=span.start, end=span.end) for span in choice.weight_versions
        )
    except (msgspec.DecodeError, IndexError, ValueError) as error:
        raise NotServedError(f"its answer cannot be read: {error}") from error
    count = len(choice.token_ids)
    if len(choice.logprobs.content) != count:
        raise NotServedError(f"its answer has {count} tokens and {len(choice.logprobs.content)} log-probs")
    edges = [0, *(span.end for span in versions)]
    if [span.start for span in versions] != edges[:-1] or edges[-1] != count:
        raise NotServedError("its weight versions do not cover the tokens")
    return Part(
        tuple(choice.token_ids),
        tuple(token.logprob for token in choice.logprobs.content),
        versions,
        choice.finish_reason,
        answer.engine_s,
    )


def read_failure(status: int, body: bytes) -> NotServedError | RefusedError:
    """What an answer that is not 200 means."""
    try:
        error = _failures.decode(body).error
    except msgspec.DecodeError:
        error = None
    detail = error if isinstance(error, _Error) else _Error(message=error or body[:200].decode("utf-8", "replace"))
    if status < 500 and status not in (404, 408, 409, 425, 429):
        return RefusedError(detail.message or f"HTTP {status}", str(detail.code) if detail.code else detail.type)
    return NotServedError(detail.message or f"HTTP {status}", draining=detail.type == "not_serving")


Hear = Callable[[Sequence[int], Sequence[float]], bool]
"""Told of each token and its log-prob once, in order; true: there is no need of more."""


@dataclass
class Received:
    """What a host has given of a completion so far. Only tokens whose version is known count."""

    hear: Hear | None = None
    enough: bool = False
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)
    _told: int = 0
    _engine_s: float = 0.0
    _finish: FinishReason | None = None

    def take(self, event: bytes) -> None:
        """Add an event; raises `NotServedError` when it cannot be what was asked for, `RefusedError` where the host
        refuses that."""
        try:
            document = _events.decode(event)
            if document.error is not None and document.error.type == "invalid_request":
                raise RefusedError(document.error.message, document.error.type)
            if document.error is not None:
                raise NotServedError(document.error.message, draining=document.error.type == "not_serving")
            [choice] = document.choices
            spans = [
                VersionSpan(version=int(span.version), start=span.start, end=span.end)
                for span in choice.weight_versions
            ]
        except (msgspec.DecodeError, ValueError) as error:
            raise NotServedError(f"an event of its answer cannot be read: {error}") from error
        if self._finish is not None:
            raise NotServedError("its answer goes on after its end")
        count = len(choice.token_ids)
        if len(choice.logprobs.content) != count:
            raise NotServedError(f"an event has {count} tokens and {len(choice.logprobs.content)} log-probs")
        # vLLM gives the spans of the whole completion with the last event.
        before = [] if spans and spans[0].start == 0 else self._spans
        edges = [before[-1].end if before else 0, *(span.end for span in spans)]
        whole = choice.finish_reason is None or edges[-1] == len(self._tokens) + count
        if [span.start for span in spans] != edges[:-1] or edges[-1] > len(self._tokens) + count or not whole:
            raise NotServedError("its weight versions do not cover the tokens")
        self._tokens += choice.token_ids
        self._logprobs += [token.logprob for token in choice.logprobs.content]
        self._spans = [*before, *spans]
        self._engine_s = document.engine_s
        self._finish = choice.finish_reason
        self._tell()

    def whole(self, part: Part) -> Part:
        """An answer that came as one object."""
        self._tokens, self._logprobs = list(part.tokens), list(part.logprobs)
        self._spans, self._finish = list(part.versions), part.finish
        self._engine_s = part.engine_s
        self._tell()
        return part

    @property
    def ended(self) -> bool:
        """Whether the last event was there."""
        return self._finish is not None

    def part(self) -> Part:
        """What there is; one that has not ended was stopped."""
        count = self._spans[-1].end if self._spans else 0
        finish = self._finish or "abort"
        spans = tuple(self._spans)
        return Part(tuple(self._tokens[:count]), tuple(self._logprobs[:count]), spans, finish, self._engine_s)

    def _tell(self) -> None:
        count = self._spans[-1].end if self._spans else 0
        if self.hear is not None and count > self._told:
            self.enough = self.hear(self._tokens[self._told : count], self._logprobs[self._told : count])
            self._told = count


async def generate(
    session: aiohttp.ClientSession, url: str, request: GenerateRequest, timeout_s: float, received: Received
) -> Part:
    """Ask the host at `url` until it has answered or `received` has enough; raises `NotServedError` or
    `RefusedError`, and `received` then has what came before."""
    try:
        async with session.post(
            f"{url}/inference/v1/generate",
            data=_encoder.encode(request),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=5),
        ) as response:
            if response.status == 200 and response.content_type == "text/event-stream":
                await _read_events(response, received)
                return received.part()
            body = await response.read()
            if response.status == 200:
                return received.whole(read_answer(body))
            raise read_failure(response.status, body)
    except TimeoutError as error:
        raise NotServedError(f"no answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise NotServedError(f"the connection failed: {error!r}") from error


async def _read_events(response: aiohttp.ClientResponse, received: Received) -> None:
    buffer = b""
    async for chunk in response.content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                received.take(data)
        if received.enough and not received.ended:
            response.close()  # which frees the call's place at its host
            return
        if len(buffer) > MAX_EVENT:
            raise NotServedError("an event of its answer does not end")
    if not received.ended:
        raise NotServedError("its answer ended before the last event")


async def recall(session: aiohttp.ClientSession, url: str, requests: Sequence[str], timeout_s: float) -> None:
    """Ask the host at `url` to stop these requests, which it then answers with their partial tokens.

    Raises `NotServedError` when it does not take the wish.
    """
    try:
        async with session.post(
            f"{url}/inference/v1/abort_requests",
            data=_encoder.encode({"request_ids": requests}),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=5),
        ) as response:
            body = await response.read()
            if response.status != 200:
                raise NotServedError(str(read_failure(response.status, body)))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NotServedError(f"the connection failed: {error!r}") from error
