"""Messages of the OpenAI and Anthropic APIs in the common form. Pure.

A text is the same whether it stands alone or as a list with one text block; what only steers the serving (cache marks,
identifiers, signatures, annotations) is left out.
"""

from collections.abc import Iterable
from typing import Any

from opengyre.formats.model import Message, message
from opengyre.formats.values import compact, obj, seq, string

STEERING = frozenset(
    {"cache_control", "id", "signature", "annotations", "logprobs", "index", "status", "citations", "call_id"}
    | {"tool_use_id", "tool_call_id", "encrypted_content", "internal_chat_message_metadata_passthrough"}
)
TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})
CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
CALL_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def stripped(value: Any) -> Any:
    """The value without empty fields and without what only steers the serving, at every level."""
    if isinstance(value, dict):
        return {
            name: stripped(inner)
            for name, inner in value.items()
            if name not in STEERING and inner is not None and inner not in ([], {})
        }
    if isinstance(value, list):
        return [stripped(inner) for inner in value]
    return value


def _other(block: Any) -> tuple[str, str]:
    return ("other", compact(stripped(block)))


def flat(content: Any) -> str:
    """The text of a content that is a text or a list of blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(text for _, text in blocks_of(content))


def blocks_of(content: Any) -> list[tuple[str, str]]:
    """`(kind, text)` of a content: a text, a block, or a list of both."""
    if isinstance(content, str):
        return [("text", content)]
    if isinstance(content, dict):
        content = [content]
    return [_block(one) for one in seq(content)]


def _block(one: Any) -> tuple[str, str]:
    if isinstance(one, str):
        return ("text", one)
    block = obj(one)
    kind = string(block.get("type"))
    if kind in TEXTS or (not kind and "text" in block):
        return ("text", string(block.get("text")) or string(block.get("refusal")))
    if kind in ("thinking", "reasoning"):
        return ("reasoning", string(block.get("thinking")) or string(block.get("reasoning")) or flat_summary(block))
    if kind == "tool_use":
        # Arguments keep every field: here an `id` is content.
        return ("call", compact([string(block.get("name")), block.get("input") or {}]))
    if kind == "tool_result":
        failed = "error: " if block.get("is_error") is True else ""
        return ("result", failed + flat(block.get("content")))
    return _other(one)


def flat_summary(item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, else its summary."""
    return flat(item.get("content")) or flat(item.get("summary"))


def chat_message(value: Any) -> Message:
    """A message of /v1/chat/completions, from a request or from a response's choice."""
    entry = obj(value)
    role = string(entry.get("role")) or "assistant"
    thought = string(entry.get("reasoning_content")) or string(entry.get("reasoning"))
    found = [("reasoning", thought), *blocks_of(entry.get("content")), ("text", string(entry.get("refusal")))]
    for call in seq(entry.get("tool_calls")):
        function = obj(obj(call).get("function")) or obj(obj(call).get("custom")) or obj(call)
        arguments = function.get("arguments", function.get("input"))
        text = arguments if isinstance(arguments, str) else compact(arguments)
        found.append(("call", compact([string(function.get("name")) or string(function.get("function")), text])))
    if isinstance(entry.get("function_call"), dict):
        found.append(("call", compact(stripped(entry["function_call"]))))
    return message(role, [("result", text) if role == "tool" else (kind, text) for kind, text in found])


def anthropic_message(value: Any) -> Message:
    """A message of /v1/messages, from a request or a whole response."""
    entry = obj(value)
    return message(string(entry.get("role")) or "assistant", blocks_of(entry.get("content")))


def response_item(value: Any) -> Message:
    """An item of the Responses API, from an input or an output."""
    item = obj(value)
    kind = string(item.get("type")) or "message"
    if kind == "message":
        return message(string(item.get("role")) or "user", blocks_of(item.get("content")))
    if kind == "reasoning":
        # What is encrypted cannot be read, but one thought is not another.
        text = flat_summary(item) or string(item.get("encrypted_content"))[:64]
        return message("assistant", [("reasoning", text)])
    if kind in CALLS:
        arguments = item.get(CALLS[kind])
        text = arguments if isinstance(arguments, str) else compact(arguments)
        return message("assistant", [("call", compact([string(item.get("name")) or kind, text]))])
    if kind in CALL_OUTPUTS:
        output = item.get("output")
        if isinstance(output, dict):
            output = output.get("content") or output.get("output") or output
        return message("tool", [("result", output if isinstance(output, str) else flat(output))])
    return message("assistant", [("other", compact(stripped(item)))])


def preamble(system: Any, tools: Any) -> list[Message]:
    """What stands before the conversation: the tools, since other tools are another prompt, and the system text."""
    found: list[Message] = []
    if seq(tools):
        found.append(message("tools", [("other", compact([stripped(tool) for tool in tools]))]))
    if system:
        found.append(message("system", blocks_of(system)))
    return found


def chat_messages(values: Any) -> Iterable[Message]:
    return (chat_message(one) for one in seq(values))


def response_input(value: Any) -> list[Message]:
    """The `input` of a request to the Responses API: a text or items."""
    return (
        [message("user", [("text", value)])] if isinstance(value, str) else [response_item(one) for one in seq(value)]
    )
