"""The wire shapes of OpenAI's text completions: requests, answers, streams. Pure."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from opengyre.proto.traj import Call
from opengyre.rollout.ask import MAX_CHOICES, ApiError, Ask, check, digest_of, stops_of
from opengyre.rollout.openai import Head, Heard, StreamOptions, read, sse, usage_of


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


def _logprobs(heard: Heard, offset: int = 0) -> dict[str, Any]:
    offsets = itertools.accumulate((len(text) for text, _ in heard), initial=offset)
    return {
        "tokens": [text for text, _ in heard],
        "token_logprobs": [logprob for _, logprob in heard],
        "top_logprobs": None,
        "text_offset": list(offsets)[: len(heard)],
    }


def _choice(index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _head(name: str, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": model}


def completion(calls: Sequence[Call], model: str, heard: Sequence[Heard] | None) -> bytes:
    """The answer to a request that is not streamed."""
    choices = [
        _choice(index, call.text, call.finish_reason, _logprobs(heard[index]) if heard is not None else None)
        for index, call in enumerate(calls)
    ]
    head = _head(f"{calls[0].execution}-{calls[0].call}", model)
    return _encoder.encode({**head, "choices": choices, "usage": usage_of(calls)})


class TextStream:
    """Server-sent events of text completions."""

    def __init__(self, head: Head, usage: bool) -> None:
        self._head = _head(head.name, head.model)
        self._usage = usage
        self._offsets: Counter[int] = Counter()

    def _event(self, index: int, text: str, finish: str | None, heard: Heard | None) -> bytes:
        logprobs = None
        if heard is not None:
            logprobs = _logprobs(heard, self._offsets[index])
            self._offsets[index] += sum(len(token) for token, _ in heard)
        more = {"usage": None} if self._usage else {}
        return sse({**self._head, "choices": [_choice(index, text, finish, logprobs)], **more})

    def begin(self, index: int) -> bytes:  # noqa: ARG002 - one signature for all APIs
        return b""

    def say(self, index: int, text: str, heard: Heard | None) -> bytes:
        return self._event(index, text, None, heard)

    def end(self, index: int, call: Call, heard: Heard | None) -> Iterator[bytes]:
        yield self._event(index, "", call.finish_reason, heard)

    def close(self, calls: Sequence[Call]) -> Iterator[bytes]:
        if self._usage:
            yield sse({**self._head, "choices": [], "usage": usage_of(calls)})
        yield b"data: [DONE]\n\n"
