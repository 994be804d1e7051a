"""vLLM's answers, read: the increments of a call, and spans of weight versions. Pure.

Where a call ends by itself, vLLM says which version sampled which tokens. Until then (and for a call whose engine died)
it is known from when weights were changed: nothing is sampled while the engine is paused, so the boundary is how many
tokens its server then had, which may be more than have come: they come several at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opengyre.tiny.types import (
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Increment,
    InvalidRequestError,
    VersionSpan,
    spans_from,
)

ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the identifier of a call of this endpoint."""
BAD_REQUEST = 400
"""The code of an error in a stream: vLLM answers 200 before it looks at the prompt."""


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] = []


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Fault | None = None


_chunks = msgspec.json.Decoder(_Chunk)


def body_of(request: GenerateRequest, context: int, version: int, interval: int) -> dict[str, Any]:
    """The body of a call whose tokens come `interval` at a time, but for the first. Its seed stays here: on a CPU a
    seed of its own ends the engine as soon as the call's prompt is read in parts (0.32.0: "CPU Generator does not use
    offset")."""
    return {
        "model": "policy",
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "stream": True,
        "priority": request.priority,
        # A block that other weights computed is never taken for one of these.
        "cache_salt": f"v{version}",
        "sampling_params": {
            "max_tokens": min(request.max_tokens, context - len(request.token_ids)),
            "temperature": request.temperature,
            # The whole distribution, whatever a server's own defaults become.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprobs": 0,
            "stop_token_ids": [] if request.ignore_eos else list(request.stop_token_ids),
            # Each increment costs vLLM's server as much time as the host, and its process has one interpreter.
            "stream_interval": interval,
            "ignore_eos": True,  # only the call's own stop tokens end it, not the model's
            "detokenize": False,
        },
    }


def scoring_of(token_ids: Sequence[int], request_id: str | None, priority: int) -> dict[str, Any]:
    """The body of a call that has a prompt scored."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body = {"model": "policy", "token_ids": list(token_ids), "priority": priority, "sampling_params": sampling}
    return body if request_id is None else body | {"request_id": request_id}


def prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Of each token of a scored prompt but the first, in nats. Raises `EngineError` for an answer that has not one for
    each."""
    try:
        found = answer["prompt_logprobs"][1:]
        return [float(one[str(token)]["logprob"]) for one, token in zip(found, token_ids[1:], strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM says of a prompt's log-probs what cannot be read: {error!r}") from error


@dataclass(slots=True)
class Sampling:
    """A call in flight, as far as it came."""

    request: GenerateRequest
    version: int
    """Of the weights, now."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """Of what was sampled before the weights were last changed, some of which may still have to come."""
    finish: FinishReason | None = None
    shown: int | None = None
    """So many tokens are known to others, while those after them are held back."""
    withdrawn: bool = False
    """What was held back is gone, and what comes is not taken."""

    def take(self, line: bytes) -> int:
        """A line of the stream; how many tokens came with it. Raises `EngineError` for a failure of the engine,
        `InvalidRequestError` where it refuses the call."""
        if self.withdrawn or not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            return 0
        try:
            chunk = _chunks.decode(line[5:])
        except msgspec.DecodeError as error:
            raise EngineError(f"vLLM answered what cannot be read: {error}") from error
        if chunk.error is not None:
            refused = InvalidRequestError if chunk.error.code == BAD_REQUEST else EngineError
            raise refused(f"vLLM failed: {chunk.error.message}")
        new = 0
        for choice in chunk.choices[:1]:
            logprobs = [one.logprob for one in choice.logprobs.content] if choice.logprobs is not None else []
            if len(logprobs) != len(choice.token_ids):
                raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(choice.token_ids)} tokens")
            new = len(choice.token_ids)
            self.tokens += choice.token_ids
            self.logprobs += logprobs
            if choice.weight_versions is not None:
                self.spans = [VersionSpan(_number(s.version), s.start, s.end) for s in choice.weight_versions]
            if choice.finish_reason is not None:
                self.finish = finish_of(choice.finish_reason)
        return new

    def changed(self, version: int, sampled: int) -> None:
        """From here on these weights sample; `sampled`: tokens that its server has, whether they have come or not."""
        if version != self.version:
            self.spans = list(self._spans(max(sampled, len(self.tokens))))
            self.version = version

    def hold(self) -> None:
        """What is sampled from here on is held back, until it is `proven` or `withdrawn`."""
        self.shown = len(self.tokens)

    def proven(self) -> None:
        self.shown = None

    def withdraw(self) -> None:
        """The call ends as one that was stopped before it was held."""
        end = len(self.tokens) if self.shown is None else self.shown
        self.spans = list(spans_from(self.covered(), 0, end))
        del self.tokens[end:], self.logprobs[end:]
        self.finish, self.shown, self.withdrawn = None, None, True

    def covered(self) -> tuple[VersionSpan, ...]:
        """Spans over all tokens so far."""
        return self._spans(len(self.tokens))

    def _spans(self, tokens: int) -> tuple[VersionSpan, ...]:
        end = self.spans[-1].end if self.spans else 0
        rest = [VersionSpan(self.version, end, tokens)] if tokens > end else []
        return (*spans_from(tuple(self.spans), 0, tokens), *rest)

    def increment(self, after: int) -> Increment:
        end = len(self.tokens) if self.shown is None else self.shown
        return Increment(
            tuple(self.tokens[after:end]), tuple(self.logprobs[after:end]), spans_from(self.covered(), after, end)
        )

    def result(self) -> GenerateResult:
        """What came, as a call that was stopped where it has not ended by itself."""
        return GenerateResult(tuple(self.tokens), tuple(self.logprobs), self.finish or "abort", self.covered())


def finish_of(reason: str) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # type: ignore[return-value]  # it is one of these
    raise EngineError(f"vLLM ended a call by {reason!r}; known are stop, length and abort")


def _number(version: str) -> int:
    try:
        return int(version)
    except ValueError as error:
        raise EngineError(f"vLLM names weights {version!r}; ours are numbers") from error
