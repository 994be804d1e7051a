"""A host's generation endpoint (`POST <url>/inference/v1/generate`, vLLM's own shape) as seen by its caller.

What a host answers is one of: a completion (whole, or the part it had when it was stopped); `NotServedError` (it
drains, is gone, does not answer in time, answers nonsense: try elsewhere); `RefusedError` (the request can never be
served).

Awaits: `generate` is woken by the host's answer, the loss of the connection, or `timeout_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
import msgspec

from opengyre.proto.traj import VersionSpan

FinishReason = Literal["stop", "length", "abort"]


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


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Failure(msgspec.Struct):
    error: _Error | str | None = None


_encoder = msgspec.json.Encoder()
_answers = msgspec.json.Decoder(_Answer)
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


async def generate(session: aiohttp.ClientSession, url: str, request: GenerateRequest, timeout_s: float) -> Part:
    """Ask the host at `url`; raises `NotServedError` or `RefusedError`."""
    try:
        async with session.post(
            f"{url}/inference/v1/generate",
            data=_encoder.encode(request),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s, connect=5),
        ) as response:
            body = await response.read()
            if response.status == 200:
                return read_answer(body)
            raise read_failure(response.status, body)
    except TimeoutError as error:
        raise NotServedError(f"no answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise NotServedError(f"the connection failed: {error!r}") from error


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
