"""The wire shapes of OpenAI's text completions: requests, answers, streams. Pure."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from opengyre.proto.traj import Call
from opengyre.rollout.ask import MAX_CHOICES, ApiError, Ask, check, digest_of, stops_of
from opengyre.rollout.openai import StreamOptions, Tokens, pieces, read, sse, usage_of


class _Body(msgspec.Struct):
    prompt: Any
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    stop: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_encoder = msgspec.json.Encoder()
_bodies = msgspec.json.Decoder(_Body)


def parse(body: bytes, salt: str = "") -> Ask:
    """Read a request; raises `ApiError` naming the field and what is allowed."""
    request: _Body = read(body, _bodies)
    text, tokens = _prompt(request.prompt)
    n = request.n or 1
    check("n", 1 <= n <= MAX_CHOICES, f"must be 1 to {MAX_CHOICES}")
    check("best_of", request.best_of in (None, n), "must be n: every sample is an answer")
    check("logprobs", request.logprobs in (None, 0, 1), "must be 0 or 1: only the sampled token's log-prob is kept")
    check("echo", not request.echo, "must be false: the prompt has no log-probs")
    check("suffix", not request.suffix, "is not served")
    check("max_tokens", request.max_tokens is None or request.max_tokens >= 1, "must be at least 1")
    return Ask(
        api="completions",
        digest=digest_of("completions", body, salt),
        text=text,
        tokens=tokens,
        n=n,
        stops=stops_of(request.stop, "stop"),
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
        usage=request.stream_options is not None and request.stream_options.include_usage,
        logprobs=request.logprobs is not None,
    )


def _prompt(prompt: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """A text, or token ids; a list of one of these is the one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return None, tuple(prompt)
    raise ApiError(400, "prompt must be one text or one list of token ids, not empty.", param="prompt")


def _logprobs(call: Call, tokens: Sequence[str]) -> dict[str, Any]:
    offsets = itertools.accumulate((len(text) for text in tokens), initial=0)
    return {
        "tokens": list(tokens),
        "token_logprobs": list(call.logprobs),
        "top_logprobs": None,
        "text_offset": list(offsets)[: len(tokens)],
    }


def _choice(index: int, call: Call, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
    assert call.api == "completions"
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _head(calls: Sequence[Call], model: str) -> dict[str, Any]:
    name = f"cmpl-{calls[0].execution}-{calls[0].call}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}


def completion(calls: Sequence[Call], model: str, tokens: Tokens) -> bytes:
    """The answer to a request that is not streamed."""
    choices = [
        _choice(
            index,
            call,
            call.text,
            call.finish_reason,
            _logprobs(call, tokens[index]) if tokens is not None else None,
        )
        for index, call in enumerate(calls)
    ]
    return _encoder.encode({**_head(calls, model), "choices": choices, "usage": usage_of(calls)})


def stream(calls: Sequence[Call], model: str, tokens: Tokens, *, usage: bool) -> Iterator[bytes]:
    """Server-sent events of calls that are complete."""
    head = _head(calls, model)
    for index, call in enumerate(calls):
        for piece in pieces(call.text):
            yield sse({**head, "choices": [_choice(index, call, piece, None, None)]})
        logprobs = _logprobs(call, tokens[index]) if tokens is not None else None
        yield sse({**head, "choices": [_choice(index, call, "", call.finish_reason, logprobs)]})
    if usage:
        yield sse({**head, "choices": [], "usage": usage_of(calls)})
    yield b"data: [DONE]\n\n"
