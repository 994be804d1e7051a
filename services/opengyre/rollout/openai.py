"""The wire shapes of OpenAI's chat completions: requests, answers, streams, errors. Pure."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from opengyre.proto.traj import Call
from opengyre.rollout.ask import MAX_CHOICES, ApiError, Ask, check, digest_of, stops_of

PIECE = 32
"""Characters of a stream's event."""

Heard = Sequence[tuple[str, float]]
"""The text of each token and its log-prob, where these were asked for."""


class Head(NamedTuple):
    """What a stream begins with."""

    name: str
    """`<execution>-<call>` of the first choice."""
    model: str
    prompt_tokens: int


class Stream(Protocol):
    """The server-sent events of an answer in the shape of an API."""

    def begin(self, index: int) -> bytes: ...

    def say(self, index: int, text: str, heard: Heard | None) -> bytes: ...

    def end(self, index: int, call: Call, heard: Heard | None) -> Iterator[bytes]: ...

    def close(self, calls: Sequence[Call]) -> Iterator[bytes]: ...


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """The fields of a request that matter here."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    web_search_options: Any = None


_encoder = msgspec.json.Encoder()


def read(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """A request's body; raises `ApiError` naming the field and what is allowed."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The request cannot be read: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.") from error


_bodies = msgspec.json.Decoder(_Body)


def parse(body: bytes, salt: str = "") -> Ask:
    """Read a request; raises `ApiError` naming the field and what is allowed."""
    request: _Body = read(body, _bodies)
    wished = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    check("messages", bool(request.messages), "must hold at least one message")
    check("n", request.n is None or 1 <= request.n <= MAX_CHOICES, f"must be 1 to {MAX_CHOICES}")
    check("top_logprobs", not request.top_logprobs, "must be 0: only the sampled token's log-prob is kept")
    kind = (request.response_format or {}).get("type", "text")
    check("response_format", kind == "text", 'must be {"type": "text"}')
    check("web_search_options", request.web_search_options is None, "is not served: nothing is searched here")
    check("modalities", request.modalities in (None, ["text"]), 'must be ["text"]')
    check("max_tokens", wished is None or wished >= 1, "must be at least 1")
    check("functions", not request.functions, "are not served; send them as tools")
    tools = tuple(_tool(tool) for tool in request.tools or ())
    choice = _choice(tools, request.tool_choice)
    return Ask(
        api="chat",
        digest=digest_of("chat", body, salt),
        # Token ids come from the log and from nowhere else.
        messages=[{key: value for key, value in m.items() if key != "token_ids"} for m in request.messages],
        tools=tools,
        calls=request.tool_choice != "none",
        choice=choice,
        parallel=request.parallel_tool_calls is not False,
        n=request.n or 1,
        stops=stops_of(request.stop, "stop"),
        max_tokens=wished,
        stream=bool(request.stream),
        usage=request.stream_options is not None and request.stream_options.include_usage,
        logprobs=bool(request.logprobs),
    )


def tool_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as renderers take it; raises `ApiError`."""
    check("tools", isinstance(name, str) and bool(name), "must each have a name")
    check("tools", description is None or isinstance(description, str), "must have a text as their description")
    check("tools", parameters is None or isinstance(parameters, Mapping), "must have a JSON Schema as parameters")
    schema = parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    shaped = isinstance(properties, Mapping) and all(isinstance(value, Mapping) for value in properties.values())
    listed = isinstance(required, list) and all(isinstance(item, str) for item in required)
    check("tools", shaped and listed, "must have a JSON Schema as parameters: properties an object, required a list")
    return {"name": name, "description": description or "", "parameters": schema}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    check("tools", tool.get("type") == "function" and isinstance(function, Mapping), "must be of the type function")
    assert isinstance(function, Mapping)
    return tool_of(function.get("name"), function.get("description"), function.get("parameters"))


def _choice(tools: tuple[dict[str, Any], ...], choice: Any) -> str | None:
    """The tool that is forced: its name, empty for any of them, None for none."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        check("tool_choice", bool(tools), 'must not be "required" where there are no tools')
        return ""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    check(
        "tool_choice",
        any(tool["name"] == name for tool in tools),
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": NAME}} of one of the tools',
    )
    return name


def usage_of(calls: Sequence[Call]) -> dict[str, int]:
    """The prompt once, the completions of all choices."""
    prompt = calls[0].prefix_tokens + len(calls[0].prompt_ids)
    completion = sum(len(call.sampled_ids) for call in calls)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(heard: Heard) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in heard
    ]
    return {"content": content, "refusal": None}


def _finish(call: Call) -> str:
    return "tool_calls" if call.tool_calls else call.finish_reason


def _content(call: Call) -> str | None:
    content = call.text if call.content is None else call.content
    return content or None if call.tool_calls else content


def _message(call: Call) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(call), "refusal": None}
    if call.tool_calls:
        message["tool_calls"] = [
            {"id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": tool.arguments}}
            for tool in call.tool_calls
        ]
    return message


def completion(calls: Sequence[Call], model: str, heard: Sequence[Heard] | None) -> bytes:
    """The answer to a request that is not streamed."""
    choices = [
        {
            "index": index,
            "message": _message(call),
            "logprobs": _logprobs(heard[index]) if heard is not None else None,
            "finish_reason": _finish(call),
        }
        for index, call in enumerate(calls)
    ]
    head = {
        "id": f"chatcmpl-{calls[0].execution}-{calls[0].call}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
    }
    return _encoder.encode({**head, "choices": choices, "usage": usage_of(calls)})


def pieces(text: str) -> Iterator[str]:
    """The text of a stream, event by event."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


class ChatStream:
    """Server-sent events of a chat's answers. Each choice begins, says its text, and ends with its recorded call."""

    def __init__(self, head: Head, usage: bool) -> None:
        self._head = {
            "id": f"chatcmpl-{head.name}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": head.model,
        }
        self._usage = usage

    def _event(self, index: int, delta: dict[str, Any], finish: str | None, heard: Heard | None) -> bytes:
        logprobs = _logprobs(heard) if heard is not None else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})

    def begin(self, index: int) -> bytes:
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def say(self, index: int, text: str, heard: Heard | None) -> bytes:
        return self._event(index, {"content": text}, None, heard)

    def end(self, index: int, call: Call, heard: Heard | None) -> Iterator[bytes]:
        for place, tool in enumerate(call.tool_calls):
            begin = {"id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": ""}}
            yield self._event(index, {"tool_calls": [{"index": place, **begin}]}, None, None)
            for piece in pieces(tool.arguments):
                more = {"index": place, "function": {"arguments": piece}}
                yield self._event(index, {"tool_calls": [more]}, None, None)
        yield self._event(index, {}, _finish(call), heard)

    def close(self, calls: Sequence[Call]) -> Iterator[bytes]:
        if self._usage:
            yield sse({**self._head, "choices": [], "usage": usage_of(calls)})
        yield b"data: [DONE]\n\n"


def error_body(error: ApiError) -> bytes:
    """A refusal in OpenAI's shape."""
    shape = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    return _encoder.encode({"error": shape})


def stream_error(error: ApiError) -> Iterator[bytes]:
    """An error after the stream has begun."""
    yield b"data: " + error_body(error) + b"\n\n"
    yield b"data: [DONE]\n\n"


def sse(document: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + _encoder.encode(document) + b"\n\n"


def model_entry(name: str) -> dict[str, Any]:
    """Fields of both APIs: their clients ask at the same address."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "opengyre",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def models(name: str) -> bytes:
    """The answer of `/v1/models`."""
    page = {"has_more": False, "first_id": name, "last_id": name}
    return _encoder.encode({"object": "list", "data": [model_entry(name)], **page})


def model(name: str) -> bytes:
    """The answer of `/v1/models/<name>`."""
    return _encoder.encode(model_entry(name))
