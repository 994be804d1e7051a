"""The wire shapes of Anthropic's messages: requests, answers, streams, errors. Pure.

Requests become messages in OpenAI's shape: a `tool_result` is a message of the role `tool`, a `tool_use` a tool call.
Thinking blocks are left out, since the policy's own are part of its text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from opengyre.proto.traj import Call
from opengyre.rollout.ask import ApiError, Ask, ContextExceededError, check, digest_of, stops_of
from opengyre.rollout.openai import Head, Heard, pieces, read, tool_of


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Body(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    stop_sequences: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    thread: dict[str, Any] | None = None
    compaction: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None


_encoder = msgspec.json.Encoder()
_bodies = msgspec.json.Decoder(_Body)
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse(body: bytes, salt: str = "", *, counting: bool = False) -> Ask:
    """Read a request, or one that only counts; raises `ApiError` naming the field and what is allowed."""
    request: _Body = read(body, _bodies)
    check("messages", bool(request.messages), "must hold at least one message")
    check("messages", request.messages[-1].role != "assistant", "must not end with the assistant: nothing is prefilled")
    least = counting or (request.max_tokens is not None and request.max_tokens >= 1)
    check("max_tokens", least, "must be at least 1")
    _refuse_what_the_server_would_do(request)
    shaped = (request.output_config or {}).get("format") or request.output_format
    check("output_config", not shaped, "must have no format: this model's text follows no schema")
    tools = tuple(_tool(tool) for tool in request.tools or ())
    system = request.system if isinstance(request.system, str) else _texts(request.system or [], "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(request.messages):
        messages += _messages(message, f"messages.{number}")
    return Ask(
        api="messages",
        digest=digest_of("messages", body, salt),
        messages=messages,
        tools=tools,
        calls=(request.tool_choice or {}).get("type") != "none",
        choice=_choice(tools, request.tool_choice),
        parallel=(request.tool_choice or {}).get("disable_parallel_tool_use") is not True,
        stops=stops_of(request.stop_sequences, "stop_sequences"),
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
    )


def _refuse_what_the_server_would_do(request: _Body) -> None:
    """No history is kept for the client but in its own requests, and nothing runs here."""
    if request.thread is not None:
        raise ApiError(
            400,
            "thread is not served: send the whole history with each request.",
            param="thread",
            # By this its clients know that they may go on without.
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    check("compaction", request.compaction is None, "is not served: compact the history yourself")
    check("container", request.container is None, "is not served: nothing runs here")
    check("mcp_servers", not request.mcp_servers, "are not served: call them yourself")


def _texts(blocks: Sequence[Mapping[str, Any]], where: str) -> str:
    for block in blocks:
        text = block.get("type") == "text" and isinstance(block.get("text"), str)
        check(where, text, "must hold text only: this model reads nothing else")
    return "\n".join(block["text"] for block in blocks)


def _messages(message: _Message, where: str) -> list[dict[str, Any]]:
    check(f"{where}.role", message.role in ("user", "assistant"), "must be user or assistant")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    found: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        at = f"{where}.content.{number}"
        if block.get("type") == "tool_result":
            found.append(_result(block, at))
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + _texts([block], at)
        else:
            found.append({"role": "user", "content": _texts([block], at)})
    return found


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    check(where, isinstance(content, str | list), "must have a text or text blocks as content")
    text = content if isinstance(content, str) else _texts([part for part in content if isinstance(part, dict)], where)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    said = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": _texts(said, where)}
    return {**message, "tool_calls": calls} if calls else message


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    own = tool.get("type") in (None, "custom")
    check("tools", own, "must be the client's own: this model knows no others")
    return tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _choice(tools: tuple[dict[str, Any], ...], choice: Mapping[str, Any] | None) -> str | None:
    """The tool that is forced: its name, empty for any of them, None for none."""
    kind, name = (choice or {"type": "auto"}).get("type"), (choice or {}).get("name")
    if kind in ("auto", "none"):
        return None
    if kind == "any":
        check("tool_choice", bool(tools), 'must not be of the type "any" where there are no tools')
        return ""
    named = kind == "tool" and any(tool["name"] == name for tool in tools)
    check("tool_choice", named, 'must be of the type "auto", "any", "none", or "tool" with the name of one')
    return name


def _name(call: Call) -> str:
    return f"msg_{call.execution}-{call.call}"


def _input(arguments: str) -> Any:
    """Tool arguments are an object here."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {}


def _stop_reason(call: Call) -> str:
    if call.tool_calls:
        return "tool_use"
    if call.stop is not None:
        return "stop_sequence"
    return "max_tokens" if call.finish_reason == "length" else "end_turn"


def _text(call: Call) -> str:
    return call.text if call.content is None else call.content


def _usage(call: Call) -> dict[str, int]:
    return {
        "input_tokens": call.prefix_tokens + len(call.prompt_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(call.sampled_ids),
    }


def completion(calls: Sequence[Call], model: str, _heard: Sequence[Heard] | None) -> bytes:
    """The answer to a request that is not streamed."""
    [call] = calls
    content: list[dict[str, Any]] = []
    if _text(call) or not call.tool_calls:
        content.append({"type": "text", "text": _text(call)})
    content += [
        {"type": "tool_use", "id": tool.id, "name": tool.name, "input": _input(tool.arguments)}
        for tool in call.tool_calls
    ]
    return _encoder.encode(
        {
            **_head(call, model),
            "content": content,
            "stop_reason": _stop_reason(call),
            "stop_sequence": call.stop,
            "usage": _usage(call),
        }
    )


def _head(call: Call, model: str) -> dict[str, Any]:
    return {"id": _name(call), "type": "message", "role": "assistant", "model": model}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encoder.encode({"type": kind, **fields}) + b"\n\n"


class MessageStream:
    """Named events of a message: a block of text, where there is any, and one for each tool call."""

    def __init__(self, head: Head, usage: bool) -> None:  # noqa: ARG002 - one signature for all APIs
        self._head = head
        self._open = False

    def begin(self, index: int) -> bytes:  # noqa: ARG002 - there is one answer only
        usage = {
            "input_tokens": self._head.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = {
            "id": f"msg_{self._head.name}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def say(self, index: int, text: str, heard: Heard | None) -> bytes:  # noqa: ARG002 - this API has no log-probs
        delta = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        if self._open:
            return delta if text else b""
        self._open = True
        begin = _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return begin + delta if text else begin

    def end(self, index: int, call: Call, heard: Heard | None) -> Iterator[bytes]:  # noqa: ARG002 - as above
        if not self._open and not call.tool_calls:
            yield self.say(0, "", None)
        at = 0
        if self._open:
            yield _event("content_block_stop", index=at)
            at += 1
        for tool in call.tool_calls:
            block = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}}
            yield _event("content_block_start", index=at, content_block=block)
            for piece in pieces(tool.arguments):
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
            at += 1
        end = {"stop_reason": _stop_reason(call), "stop_sequence": call.stop}
        yield _event("message_delta", delta=end, usage=_usage(call))

    def close(self, calls: Sequence[Call]) -> Iterator[bytes]:  # noqa: ARG002 - one signature for all APIs
        yield _event("message_stop")


def status_of(error: ApiError) -> int:
    """A spent budget is what 402 is for here; 429 would be tried again."""
    return 402 if error.code == "insufficient_quota" else error.status


def error_body(error: ApiError) -> bytes:
    """A refusal in Anthropic's shape."""
    message = str(error)
    if isinstance(error, ContextExceededError):
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    kind = _KINDS.get(status_of(error), "overloaded_error" if error.retry else "api_error")
    more = {} if error.details is None else {"details": error.details}
    return _encoder.encode({"type": "error", "error": {"type": kind, "message": message, **more}})


def stream_error(error: ApiError) -> Iterator[bytes]:
    """An error after the stream has begun."""
    yield b"event: error\ndata: " + error_body(error) + b"\n\n"


def waiting() -> bytes:
    """An event that says nothing, so that the client goes on waiting."""
    return _event("ping")


def counted(tokens: int) -> bytes:
    """The answer of `/v1/messages/count_tokens`."""
    return _encoder.encode({"input_tokens": tokens})
