"""What a client asks for, whichever API it speaks, and how it is told that it cannot have it. Pure.

What the policy and its harness decide (temperature, seed) is not the client's to choose: training needs samples of the
policy as it is. Fields that would change the meaning of an answer and that are not served are refused by name; all
others are ignored, as compatible servers do.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opengyre.proto.traj import EndReason

Api = Literal["chat", "completions", "messages"]
MAX_CHOICES = 128
LANE_HEADER = "x-gyre-lane"
"""By which our own agent says for which lane it asks; the same request of another lane is another one."""
MAX_STOPS = 16


class ApiError(Exception):
    """A refusal; each API writes it in its own shape. `retry` is what the client's automatic retry is told, `details`
    what Anthropic's clients look into."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry: bool = False,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param
        self.retry = retry
        self.retry_after_s = retry_after_s
        self.details = details


class ContextExceededError(ApiError):
    """The prompt leaves no room for a completion. `least`: it was not counted and has `tokens` or more."""

    def __init__(self, tokens: int, limit: int, *, least: bool = False) -> None:
        count = f"at least {tokens}" if least else f"{tokens}"
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {count} "
            "tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.tokens = tokens
        self.limit = limit


def budget_spent(budget: EndReason) -> ApiError:
    """The episode may make no further calls; `budget` is also the error's `param`."""
    what = budget.replace("_", " ")
    return ApiError(
        429,
        f"The {what} of this execution is spent.",
        code="insufficient_quota",
        kind="insufficient_quota",
        param=budget,
    )


def busy(message: str) -> ApiError:
    """Too many calls at once."""
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", retry=True, retry_after_s=1.0)


def moved(message: str) -> ApiError:
    """Not here now; the same request may be answered later."""
    return ApiError(503, message, kind="server_error", retry=True, retry_after_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. Exactly one of `messages`, `text` and `tokens` is given."""

    api: Api
    digest: str
    """The same request again has the same."""
    messages: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's shape."""
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    """`{"name", "description", "parameters"}`."""
    calls: bool = True
    """Whether the text of tool calls becomes tool calls."""
    choice: str | None = None
    """The tool that has to be called; empty: any of them. None: the policy may."""
    parallel: bool = True
    """Whether an answer may have several tool calls."""
    n: int = 1
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = False
    """A stream ends with its usage."""
    logprobs: bool = False
    lane: int | None = None
    """Whose request it is; None: the trunk's."""


def digest_of(api: Api, body: bytes, salt: str = "") -> str:
    """Identity of a request; `salt` (an idempotency key) tells apart requests that are to be sampled anew."""
    begin = b"" if api == "chat" and not salt else f"{api}\0{salt}\0".encode()
    return hashlib.sha256(begin + body).hexdigest()


def check(name: str, allowed: bool, rule: str) -> None:
    """Raise `ApiError` about the field `name` unless `allowed`."""
    if not allowed:
        raise ApiError(400, f"{name} {rule}.", param=name)


def stops_of(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings from a string, a list of strings, or nothing."""
    found = [value] if isinstance(value, str) else value or []
    good = isinstance(found, list) and all(isinstance(stop, str) and stop for stop in found)
    check(name, good and len(found) <= MAX_STOPS, f"must be a text or up to {MAX_STOPS} texts, none of them empty")
    return tuple(found)
