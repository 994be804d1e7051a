"""One request and its response, of any API that is known, as model calls. Pure.

Known: OpenAI chat completions, completions and responses, Anthropic messages, each whole or as a stream. Where an
OpenAI-compatible server gives token ids (`prompt_token_ids`, `token_ids`), the call has them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from opengyre.formats.messages import (
    anthropic_message,
    chat_message,
    chat_messages,
    preamble,
    response_input,
    response_item,
)
from opengyre.formats.model import LogCall, Message, Notes, message
from opengyre.formats.roles import headers_of, role_of
from opengyre.formats.streams import events, is_stream, whole
from opengyre.formats.values import decoded, floats, number, obj, seq, string, token_ids


def body_of(value: Any) -> Any:
    """The body of a request or a response: the value itself, or what it has under `body`, parsed where it is a text."""
    if isinstance(value, dict) and "body" in value:
        value = value["body"]
    if isinstance(value, str):
        return whole(events(value)) if is_stream(value) else decoded(value)
    if isinstance(value, list):
        return whole(value)
    return value


def calls_of(request: Any, response: Any, name: str, notes: Notes, execution: str = "") -> Iterator[LogCall]:
    """The calls of one exchange, called `name`; more than one where several answers were asked for. An exchange that
    failed, or whose answer ended early, is a refused call."""
    headers = headers_of(obj(request).get("headers"))
    for call in _calls(request, response, name, notes, execution):
        yield dataclasses.replace(call, role=role_of(call.prompt, headers)) if call.prompt else call


def _calls(request: Any, response: Any, name: str, notes: Notes, execution: str) -> Iterator[LogCall]:
    asked, given = obj(body_of(request)), body_of(response)
    status = number(obj(response).get("status")) or number(obj(response).get("status_code")) or 200
    if not asked:
        yield LogCall(call=name, execution=execution, refused="no_request")
    elif status >= 400 or (obj(given).get("error") and not obj(given).get("output") and not obj(given).get("choices")):
        yield LogCall(call=name, execution=execution, refused="failed_request")
    elif not isinstance(given, dict):
        yield LogCall(call=name, execution=execution, refused="incomplete_answer")
    elif given.get("type") == "message" and isinstance(given.get("content"), list):
        _api(notes, "anthropic-messages")
        before = preamble(asked.get("system"), asked.get("tools"))
        yield LogCall(
            call=name, execution=execution, answer=(anthropic_message(given),), usage=usage_of(given),
            prompt=(*before, *map(anthropic_message, seq(asked.get("messages")))),
        )  # fmt: skip
    elif isinstance(given.get("output"), list):
        _api(notes, "openai-responses")
        before = preamble(asked.get("instructions"), asked.get("tools"))
        former = string(asked.get("previous_response_id")) or None
        yield LogCall(
            call=name, execution=execution, parent=former, usage=usage_of(given),
            prompt=(*(() if former else before), *response_input(asked.get("input"))),
            answer=tuple(response_item(item) for item in given["output"]),
        )  # fmt: skip
    elif isinstance(given.get("choices"), list) and given["choices"]:
        text = "messages" not in asked
        _api(notes, "openai-completions" if text else "openai-chat")
        yield from _choices(asked, given, name, execution, text=text)
    else:
        yield LogCall(call=name, execution=execution, refused="unknown_answer")


def _api(notes: Notes, name: str) -> None:
    counts = notes.facts.setdefault("apis", {})
    counts[name] = counts.get(name, 0) + 1


def _choices(
    asked: dict[str, Any], given: dict[str, Any], name: str, execution: str, *, text: bool
) -> Iterator[LogCall]:
    prompt: tuple[Message, ...]
    own_ids = None
    if text:
        own_ids = token_ids(asked.get("prompt"))
        prompt = (message("prompt", [("text", string(asked.get("prompt")))]),) if own_ids is None else ()
    else:
        prompt = (*preamble(None, asked.get("tools")), *chat_messages(asked["messages"]))
    choices = [obj(choice) for choice in given["choices"]]
    for place, choice in enumerate(choices):
        text_answer = message("answer", [("text", string(choice.get("text")))])
        answer = text_answer if text else chat_message(choice.get("message"))
        entries = obj(choice.get("logprobs"))
        logprobs = floats([obj(entry).get("logprob") for entry in seq(entries.get("content"))])
        prompt_ids = token_ids(given.get("prompt_token_ids")) or token_ids(choice.get("prompt_token_ids")) or own_ids
        sampled = token_ids(choice.get("token_ids"))
        yield LogCall(
            call=name if len(choices) == 1 else f"{name}#{place}",
            execution=execution,
            prompt=prompt,
            answer=(answer,),
            prompt_ids=prompt_ids if sampled is not None else None,
            sampled_ids=sampled if prompt_ids is not None else None,
            logprobs=floats(entries.get("token_logprobs")) or logprobs or None,
            wanted=len(choices) > 1,
            usage=usage_of(given),
        )


def usage_of(given: dict[str, Any]) -> dict[str, int]:
    """The tokens that an API reported: input, output, cache_read, cache_creation, as far as it did."""
    usage = obj(given.get("usage"))
    names = {
        "input": ("input_tokens", "prompt_tokens"), "output": ("output_tokens", "completion_tokens"),
        "cache_read": ("cache_read_input_tokens",), "cache_creation": ("cache_creation_input_tokens",),
    }  # fmt: skip
    found: dict[str, int] = {}
    for ours, theirs in names.items():
        value = next((number(usage[name]) for name in theirs if name in usage), None)
        if value is not None:
            found[ours] = value
    return found
