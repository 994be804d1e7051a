"""The wire shapes of OpenAI's chat completions: requests, answers, streams, errors. Pure.

What the policy and its harness decide (temperature, seed, the number of choices) is not the client's to choose:
training needs samples of the policy as it is. Fields that would change the meaning of an answer and that we do not
serve are refused by name; all others are ignored, as OpenAI-compatible servers do.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from opengyre.proto.traj import Call


class ApiError(Exception):
    """An error in OpenAI's shape. `retry` is what the client's automatic retry is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param
        self.retry = retry

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return _encoder.encode({"error": error})


def context_exceeded(tokens: int, limit: int) -> ApiError:
    """The prompt leaves no room for a completion."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


def budget_spent(what: str) -> ApiError:
    """The episode may make no further calls."""
    return ApiError(
        429, f"The {what} of this execution is spent.", code="insufficient_quota", kind="insufficient_quota"
    )


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The fields of a request that matter here."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Any = None
    tools: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def wished_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(ChatRequest)


def parse(body: bytes) -> ChatRequest:
    """Read a request; raises `ApiError` naming the field and what is allowed."""
    try:
        request = _requests.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The request cannot be read: {error}.") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.") from error
    wished = request.wished_tokens
    refusals = (
        ("messages", not request.messages, "must hold at least one message"),
        ("n", request.n not in (None, 1), "must be 1: each answer is one call"),
        ("stop", bool(request.stop), "is not served; the model's own end of turn stops it"),
        ("tools", bool(request.tools), "are not served by this model; send the messages without them"),
        ("top_logprobs", bool(request.top_logprobs), "must be 0: only the sampled token's log-prob is kept"),
        (
            "response_format",
            (request.response_format or {}).get("type", "text") != "text",
            'must be {"type": "text"}',
        ),
        ("max_tokens", wished is not None and wished < 1, "must be at least 1"),
    )
    for name, refused, allowed in refusals:
        if refused:
            raise ApiError(400, f"{name} {allowed}.", param=name)
    return request


def _usage(call: Call) -> dict[str, int]:
    prompt = call.prefix_tokens + len(call.prompt_ids)
    completion = len(call.sampled_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(call: Call, tokens: Sequence[str]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(tokens, call.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion(call: Call, model: str, tokens: Sequence[str] | None) -> bytes:
    """The answer to a request that is not streamed; `tokens` are the sampled tokens' texts where log-probs were
    asked for."""
    return _encoder.encode(
        {
            "id": f"chatcmpl-{call.execution}-{call.call}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": call.text, "refusal": None},
                    "logprobs": _logprobs(call, tokens) if tokens is not None else None,
                    "finish_reason": call.finish_reason,
                }
            ],
            "usage": _usage(call),
        }
    )


def stream(call: Call, model: str, tokens: Sequence[str] | None, *, usage: bool) -> Iterator[bytes]:
    """Server-sent events of a call that is complete: it is recorded before its first byte leaves."""
    head: dict[str, Any] = {
        "id": f"chatcmpl-{call.execution}-{call.call}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _sse({**head, "choices": [choice], **({"usage": None} if usage else {})})

    yield event({"role": "assistant", "content": ""}, None)
    yield event({"content": call.text}, None, _logprobs(call, tokens) if tokens is not None else None)
    yield event({}, call.finish_reason)
    if usage:
        yield _sse({**head, "choices": [], "usage": _usage(call)})
    yield b"data: [DONE]\n\n"


def stream_error(error: ApiError) -> Iterator[bytes]:
    """An error after the stream has begun."""
    yield b"data: " + error.body() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(document) + b"\n\n"


def models(name: str) -> bytes:
    """The answer of `/v1/models`."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "opengyre"}
    return _encoder.encode({"object": "list", "data": [entry]})
